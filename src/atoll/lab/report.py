"""Report of a lab: what the links did, and what that cost the run; lab.json and the closing lines."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.core.decoding import decoded, json_decoder
from atoll.core.errors import UserError
from atoll.core.events import AnyEvent, Decided, Started, StepDone, decode
from atoll.core.units import format_bytes, format_rate, format_seconds
from atoll.lab.emulator import EmulatorCounters, LinkCounters
from atoll.lab.spec import workers_of
from atoll.lab.topology import Topology

RECORD = "lab.json"  # in the folder of records


class Count(msgspec.Struct, frozen=True):
    """Packets on the wire, and their bytes from the IP header on."""

    packets: int
    bytes: int


class LinkRecord(msgspec.Struct, frozen=True):
    """Totals of one direction of a link. Times are in seconds.

    `offered` packets came to the link, `delivered` ones left it, copies included. `lost` counts by cause:
    `queue` (full), `loss` and `outage` (of the topology), `lab` (the emulator itself). `rate` is delivered
    bytes per second of the workers' time, `share` the part of that time in which the wire was sending.
    """

    source: str
    target: str
    offered: Count
    delivered: Count
    lost: dict[str, int]
    duplicated: int
    corrupted: int
    reordered: int
    queue_delay_mean: float
    queue_delay_worst: float
    rate: float
    share: float


class WorkerRecord(msgspec.Struct, frozen=True):
    """Totals of one training process: `seconds` of its steps, and the part of them spent `waiting`.

    `waiting_for_slower` is the part of `waiting` that perfect links would not save: in each iteration, the
    time by which the slowest worker computed longer. None if workers do not meet in each iteration (ssp,
    asp).
    """

    worker: int
    name: str  # site and number
    speed: float
    steps: int
    seconds: float
    waiting: float
    bytes_sent: int
    waiting_for_slower: float | None = None


class LabRecord(msgspec.Struct, frozen=True):
    """Contents of lab.json. If the emulator was killed, `emulator` is None and `links` is empty."""

    command: list[str]
    status: int
    seed: int
    began: float  # seconds since the epoch: zero of the topology's times, just before the workers' start
    seconds: float  # from the workers' start to their end
    kept_up: bool  # False: the emulator was too slow, and links were worse than the topology says
    links: list[LinkRecord]
    emulator: EmulatorCounters | None
    dropped_before: dict[str, int]  # by site: packets that the kernel dropped before the emulator read them
    workers: list[WorkerRecord]
    topology: Topology


def make(
    topology: Topology,
    command: Sequence[str],
    *,
    status: int,
    began: float,
    seconds: float,
    links: Sequence[LinkCounters],
    emulator: EmulatorCounters | None,
    dropped_before: Mapping[str, int],
    journals: Path,
) -> LabRecord:
    """Return the record of a lab, from the emulator's counters and the workers' journals."""
    names = [site.name for site in topology.sites]
    return LabRecord(
        command=list(command),
        status=status,
        seed=topology.seed,
        began=began,
        seconds=seconds,
        kept_up=emulator is not None and emulator.kept_up and not any(dropped_before.values()),
        links=[_link(counted, names, seconds) for counted in links],
        emulator=emulator,
        dropped_before=dict(dropped_before),
        workers=_workers(topology, journals),
        topology=topology,
    )


def _link(counted: LinkCounters, names: Sequence[str], seconds: float) -> LinkRecord:
    time = max(seconds, 1e-9)
    return LinkRecord(
        source=names[counted.source],
        target=names[counted.target],
        offered=Count(counted.offered_packets, counted.offered_bytes),
        delivered=Count(counted.delivered_packets, counted.delivered_bytes),
        lost={
            "queue": counted.lost_queue_packets,
            "loss": counted.lost_loss_packets,
            "outage": counted.lost_outage_packets,
            "lab": counted.dropped,
        },
        duplicated=counted.duplicated,
        corrupted=counted.corrupted,
        reordered=counted.reordered,
        queue_delay_mean=counted.mean_queue_delay,
        queue_delay_worst=counted.max_queue_delay,
        rate=counted.delivered_bytes / time,
        share=counted.busy_seconds / time,
    )


@dataclass(frozen=True)
class WorkerJournal:
    """Events from one process's journal. `worker` is its number in the lab."""

    worker: int
    events: list[AnyEvent]

    @property
    def steps(self) -> list[StepDone]:
        return [event for event in self.events if isinstance(event, StepDone)]


def read_journals(journals: Path, workers: int) -> list[WorkerJournal]:
    """Return the journals of processes that made steps, by worker; files are named `worker-pid.jsonl`."""
    found = []
    for path in sorted(journals.glob("*.jsonl")):
        number = path.stem.partition("-")[0]
        if number.isdecimal() and int(number) < workers:
            journal = WorkerJournal(int(number), list(_events(path)))
            found += [journal] if journal.steps else []
    return sorted(found, key=lambda journal: journal.worker)


def _events(journal: Path) -> Iterator[AnyEvent]:
    """Yield the events of a journal, without a line that was cut off."""
    for line in journal.read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            yield decode(line)


def slowest(journals: Sequence[WorkerJournal]) -> dict[int, float]:
    """Return the slowest worker's seconds of computing by iteration; empty unless all meet in each."""
    most: dict[int, float] = {}
    if _in_step(journals):
        for step in itertools.chain.from_iterable(each.steps for each in journals):
            most[step.iteration] = max(most.get(step.iteration, 0.0), step.seconds - step.waiting)
    return most


def _in_step(journals: Sequence[WorkerJournal]) -> bool:
    """Return True if all are workers of one run that meets in each iteration: a ring, or bsp.

    One worker's journal speaks for all.
    """
    events = [event for each in journals for event in each.events]
    choices = {event.what: event.choice for event in events if isinstance(event, Decided)}
    workers = min((event.workers for event in events if isinstance(event, Started)), default=0)
    meets = choices["server"].startswith("bsp") if "server" in choices else "ring" in choices
    return meets and workers >= max(2, len(journals))


def for_slower(step: StepDone, most: Mapping[int, float]) -> float:
    """Return the part of a step's waiting that perfect links would not save; see `slowest`."""
    longer = most.get(step.iteration, 0.0) - (step.seconds - step.waiting)
    return min(step.waiting, max(0.0, longer))


def _workers(topology: Topology, journals: Path) -> list[WorkerRecord]:
    """Return one record for each process that made steps."""
    placed = workers_of(topology)
    found = read_journals(journals, len(placed))
    most = slowest(found)
    return [
        WorkerRecord(
            worker=each.worker,
            name=placed[each.worker].name,
            speed=placed[each.worker].speed,
            steps=len(each.steps),
            seconds=sum(step.seconds for step in each.steps),
            waiting=sum(step.waiting for step in each.steps),
            bytes_sent=sum(step.bytes_sent for step in each.steps),
            waiting_for_slower=sum(for_slower(step, most) for step in each.steps) if most else None,
        )
        for each in found
    ]


def write(record: LabRecord, folder: Path) -> None:
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def read(folder: Path) -> LabRecord:
    """Return the record that `write` left in `folder`. Raises UserError if there is none."""
    path = folder / RECORD
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return decoded(json_decoder(LabRecord), raw, UserError, f"{path}: is not a lab's record")


# The closing report


def shown(record: LabRecord) -> str:
    """Return the closing report, several lines."""
    lines = [f"the lab ran for {_span(record.seconds)}"]
    lines += [_link_line(link) for link in record.links]
    lines += [_worker_line(worker) for worker in record.workers]
    lines += _emulator_lines(record)
    return "\n".join(lines)


def _span(seconds: float) -> str:
    """Format seconds; below a millisecond in microseconds."""
    return f"{seconds * 1e6:.0f} us" if 0 < seconds < 1e-3 else format_seconds(seconds)


def _link_line(link: LinkRecord) -> str:
    """Return a sentence such as `link a -> b carried 3.0 MiB, and lost 12 of 2100 packets (0.57%): ...`"""
    lost = sum(link.lost.values())
    causes = [f"{count} by {cause}" for cause, count in link.lost.items() if count]
    other = {"twice": link.duplicated, "corrupted": link.corrupted, "out of order": link.reordered}
    came = [f"{count} came {what}" for what, count in other.items() if count]
    packets = f"{link.offered.packets} packet{'s' * (link.offered.packets != 1)}"
    share = lost / max(1, link.offered.packets)
    parts = [
        f"link {link.source} -> {link.target} carried {format_bytes(link.delivered.bytes)} "
        f"({format_rate(8 * link.rate)}, busy {link.share:.0%} of the time)",
        f"and lost {lost} of {packets} ({share:.2%}): {', '.join(causes)}"
        if lost
        else f"and lost none of {packets}",
        ", ".join(came),
    ]
    if link.queue_delay_worst > 0:
        parts.append(
            f"they queued {_span(link.queue_delay_mean)} on average, {_span(link.queue_delay_worst)} at worst"
        )
    return "; ".join(filter(None, [" ".join(parts[:2]), *parts[2:]]))


def _worker_line(worker: WorkerRecord) -> str:
    """Return a sentence with a worker's time for an iteration, split into computing and waiting."""
    each = worker.seconds / worker.steps

    def part(seconds: float) -> str:
        return f"{_span(seconds / worker.steps)} ({seconds / worker.seconds if each > 0 else 0.0:.0%})"

    speed = f" at speed {worker.speed:g}" if worker.speed != 1 else ""
    slower = worker.waiting_for_slower
    waited = f"waited {part(worker.waiting)} for others and the links"
    if slower is not None:
        waited = f"waited {part(slower)} for slower workers and {part(worker.waiting - slower)} for the links"
    return (
        f"worker {worker.name}{speed} made {worker.steps} iterations of {_span(each)}: it computed "
        f"{part(worker.seconds - worker.waiting)} and {waited}; it sent "
        f"{format_bytes(worker.bytes_sent / worker.steps)} in each"
    )


def _emulator_lines(record: LabRecord) -> list[str]:
    emulator = record.emulator
    if emulator is None:
        return ["*** THE EMULATOR WAS KILLED: what the links did is not known ***"]
    lines = [
        f"the emulator wrote {emulator.packets} packets, {_span(emulator.lateness_mean)} late on "
        f"average, 99 % by less than {_span(emulator.lateness_p99)}, at worst "
        f"{_span(emulator.lateness_worst)}; {emulator.cpu_seconds:.1f} s of a core"
    ]
    if emulator.unrouted or emulator.malformed:
        lines.append(
            f"dropped: {emulator.unrouted} packets to a site that no link leads to, and "
            f"{emulator.malformed} unreadable ones"
        )
    lines += emulator.notes()
    lines += _complaints(record, emulator)
    return lines


def _complaints(record: LabRecord, emulator: EmulatorCounters) -> list[str]:
    """Return warnings, in capitals, if the links were worse than the topology says."""
    early = {site: count for site, count in record.dropped_before.items() if count}
    faults = []
    if emulator.dropped:
        faults.append(f"it dropped {emulator.dropped} packets itself")
    if early:
        sites = ", ".join(f"{count} in {site}" for site, count in early.items())
        faults.append(f"packets were dropped before it could read them ({sites})")
    if emulator.behind_seconds:
        faults.append(f"in {emulator.behind_seconds} seconds it was behind")
    if not faults:
        return []
    return [
        f"*** THE EMULATOR COULD NOT KEEP UP: {'; '.join(faults)} ***",
        "*** the links were worse than the topology says; give the machine more cores or the links less ***",
    ]
