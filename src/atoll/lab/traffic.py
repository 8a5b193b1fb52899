"""Traffic of the links over time: links.jsonl in a lab's records.

The first line names the links and the columns. Each other line is a moment: seconds since the links' times
began, and a row for each link. Rows count from the beginning, so a missing moment or a cut last line does not
affect the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from atoll.core.decoding import from_json
from atoll.lab.emulator import LinkCounters
from atoll.lab.topology import Topology

TRAFFIC = "links.jsonl"  # in the folder of records
INTERVAL = 0.5  # seconds between two moments, at first
_MOST_MOMENTS, _FEWEST_MOMENTS = 2000, 100
_MOST_ROWS = 500_000  # of all links together: some 20 MB


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Counters of one direction of a link since the beginning, as the wire carries packets."""

    delivered_bytes: int
    offered: int  # packets
    lost_queue: int
    lost_loss: int
    lost_outage: int
    lost_lab: int
    queue_seconds: float  # total waiting time of its packets

    @staticmethod
    def of(counted: LinkCounters) -> Row:
        queued = counted.offered_packets - counted.lost_queue_packets
        return Row(
            delivered_bytes=counted.delivered_bytes,
            offered=counted.offered_packets,
            lost_queue=counted.lost_queue_packets,
            lost_loss=counted.lost_loss_packets,
            lost_outage=counted.lost_outage_packets,
            lost_lab=counted.dropped,
            queue_seconds=round(counted.mean_queue_delay * queued, 6),
        )

    @property
    def lost(self) -> int:
        return self.lost_queue + self.lost_loss + self.lost_outage + self.lost_lab


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """All links at one time, in the topology's order."""

    at: float  # seconds since the links' times began
    rows: list[Row]


class Head(msgspec.Struct, frozen=True):
    """The file's first line."""

    links: list[tuple[str, str]]  # source site, target site
    columns: tuple[str, ...] = Row.__struct_fields__


class TrafficLog:
    """Collect the links' counters at each moment; `write` makes links.jsonl at the end.

    Nothing touches the disk before: the emulator's memory is in the same process, and a page fault makes
    packets late. When moments become too many, every second one is dropped and `interval` doubles.
    """

    def __init__(self, topology: Topology) -> None:
        names = [site.name for site in topology.sites]
        self._head = Head([(names[link.source], names[link.target]) for link in topology.links])
        self.interval = INTERVAL
        self._moments: list[bytes] = []
        most = _MOST_ROWS // max(1, len(topology.links))
        self._most = max(_FEWEST_MOMENTS, min(_MOST_MOMENTS, most))

    def add(self, at: float, links: Sequence[LinkCounters]) -> None:
        if len(self._moments) >= self._most:
            del self._moments[1::2]
            self.interval *= 2
        self._moments.append(msgspec.json.encode(Moment(round(at, 4), [Row.of(each) for each in links])))

    def write(self, path: Path) -> None:
        """Write the file. Raises OSError if that fails."""
        path.write_bytes(b"".join(line + b"\n" for line in (msgspec.json.encode(self._head), *self._moments)))


def read(path: Path) -> list[Moment]:
    """Return the moments of a links.jsonl, without a cut last line; none if the file is missing."""
    moments = []
    try:
        lines = path.read_bytes().splitlines()[1:]
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            moments.append(from_json(line, Moment))
        except msgspec.DecodeError:
            continue
    return moments


class Span(msgspec.Struct, frozen=True):
    """One link between two moments."""

    start: float  # seconds
    end: float
    rate: float  # bit/s delivered
    lost: dict[str, int]  # packets, by cause
    queue_delay: float  # seconds, mean of the packets that passed


def spans(moments: Sequence[Moment], link: int) -> Iterator[Span]:
    """Yield the traffic of link number `link` between each two moments."""
    for first, second in pairwise(moments):
        before, after = first.rows[link], second.rows[link]
        took = second.at - first.at
        if took <= 0:
            continue
        causes = ("queue", "loss", "outage", "lab")
        lost = {each: getattr(after, f"lost_{each}") - getattr(before, f"lost_{each}") for each in causes}
        queued = after.offered - before.offered - lost["queue"]
        yield Span(
            start=first.at,
            end=second.at,
            rate=8 * (after.delivered_bytes - before.delivered_bytes) / took,
            lost=lost,
            queue_delay=(after.queue_seconds - before.queue_seconds) / queued if queued > 0 else 0.0,
        )


def together(spans: Sequence[Span]) -> Span:
    """Merge consecutive spans into one; its queue delay is their mean."""
    seconds = [span.end - span.start for span in spans]
    return Span(
        start=spans[0].start,
        end=spans[-1].end,
        rate=sum(span.rate * took for span, took in zip(spans, seconds, strict=True)) / sum(seconds),
        lost={cause: sum(span.lost[cause] for span in spans) for cause in spans[0].lost},
        queue_delay=sum(span.queue_delay for span in spans) / len(spans),
    )
