"""Results of a link's measurement: figures of each transport, in words and as JSON, and which one to take."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from atoll.core.units import format_bytes, format_rate, format_seconds
from atoll.ltp.settings import LtpSettings

SOONER = 0.9  # of TCP's median: below this the loss-tolerant transport is worth its losses
SHORTER_TAIL = 0.8  # of TCP's 99th percentile, if the medians are about equal
USABLE = LtpSettings().usable
_RELIABLE = "ltp:reliable"
_CLOCK_READINGS = 32
_CLOCK_SECONDS = 60.0  # by then two clocks may have drifted a few milliseconds apart


class Clocks:
    """The offset of another machine's monotonic clock from this one's, by readings over the network.

    Of the last minute's readings, that with the shortest round trip counts; its clock is taken to have been
    read half-way, so if the two ways differ in length the error is half of the difference.
    """

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float, float]] = deque(maxlen=_CLOCK_READINGS)

    def add(self, sent: float, read: float, came: float) -> None:
        """Add a reading: the other clock showed `read`, between `sent` and `came` of this one."""
        while self._readings and came - self._readings[0][2] > _CLOCK_SECONDS:
            self._readings.popleft()
        self._readings.append((sent, read, came))

    @property
    def ahead(self) -> float:
        sent, read, came = min(self._readings, key=lambda each: each[2] - each[0])
        return read - (sent + came) / 2

    @property
    def round_trip(self) -> float:
        """The shortest round trip, in seconds."""
        return min(came - sent for sent, _, came in self._readings)


@dataclass(frozen=True)
class Turn:
    """One transfer: seconds from its sender's start until it was usable, and the parts that were there
    then."""

    seconds: float
    there: int  # bytes
    how: str = ""  # the rule by which it was handed on; empty: TCP
    highs: int = 0  # blocks
    highs_there: int = 0
    lows: int = 0
    lows_there: int = 0
    fill: str = "none"  # values in place of missing blocks
    repaired: int = 0  # blocks that forward error correction gave back

    @property
    def missing(self) -> int:
        return self.highs - self.highs_there + self.lows - self.lows_there


@dataclass(frozen=True)
class Packets:
    """A sender's packets over all transfers that count: datagrams, or TCP's segments.

    `lost` are those that the sender took for lost. TCP counts only those sent again, spurious repeats too.
    """

    sent: int = 0
    lost: int = 0
    again: int = 0

    def since(self, before: Packets) -> Packets:
        return Packets(self.sent - before.sent, self.lost - before.lost, self.again - before.again)


@dataclass
class TransportResult:
    """A transport's transfers of `size` bytes each."""

    transport: str
    detail: str  # the congestion control, the offload
    size: int
    turns: list[Turn] = field(default_factory=list)
    packets: Packets = field(default_factory=Packets)
    stopped: str = ""  # why it made fewer transfers than were asked for

    @property
    def short(self) -> int:
        """Number of transfers handed on, late, with fewer blocks than a usable one needs (docs/ltp.md,
        "The receiver")."""
        return sum(turn.lows_there < USABLE * turn.lows for turn in self.turns)

    @property
    def seconds(self) -> list[float]:
        return [turn.seconds for turn in self.turns]

    def to_json(self) -> dict[str, Any]:
        """Return the figures: times in seconds, goodput in bits per second, shares from 0 to 1, the rest
        in packets or blocks."""
        there = bool(self.turns)
        blocks = sum(turn.highs + turn.lows for turn in self.turns)
        return {
            "transport": self.transport,
            "detail": self.detail,
            "transfers": len(self.turns),
            "median": median(self.seconds) if there else None,
            "p99": nearest_rank(self.seconds, 0.99) if there else None,
            "worst": max(self.seconds) if there else None,
            "goodput": 8 * sum(turn.there for turn in self.turns) / sum(self.seconds) if there else None,
            "loss": self.packets.lost / self.packets.sent if self.packets.sent else 0.0,
            **asdict(self.packets),
            "repaired": sum(turn.repaired for turn in self.turns),
            "borne": sum(turn.missing for turn in self.turns if turn.fill == "borne"),
            "filled": sum(turn.missing for turn in self.turns if turn.fill not in ("none", "borne")),
            "blocks": blocks,
            "highs_missing": sum(turn.highs - turn.highs_there for turn in self.turns),
            "short": self.short,
            "stopped": self.stopped,
            "seconds": [round(each, 6) for each in self.seconds],
        }


@dataclass
class LinkReport:
    """A link, measured."""

    address: str
    size: int
    high: float
    round_trip: float
    outcomes: list[TransportResult]
    notes: list[str] = field(default_factory=list)
    lost: str = ""  # why the test ended early, with what had been measured by then

    def to_json(self) -> dict[str, Any]:
        take, reason = advise(self.outcomes)
        return {
            "address": self.address,
            "bytes": self.size,
            "high": self.high,
            "round_trip": self.round_trip,
            "transports": [outcome.to_json() for outcome in self.outcomes],
            "notes": self.notes,
            "take": take,
            "reason": reason,
        }

    def lines(self) -> list[str]:
        """Return a table, remarks, and the advice on which transport to take."""
        head = f"{self.address}: round trip {format_seconds(self.round_trip)}"
        head += f"; transfers of {_shown(self.size)}; until usable:"
        titles = [
            "transport",
            "median",
            "99 %",
            "goodput",
            "loss",
            "sent again",
            "repaired",
            "borne",
            "filled",
            "",
        ]
        rows = [titles, *(_row(outcome) for outcome in self.outcomes)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
        table = [
            "  ".join(
                cell.ljust(width) if not column else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row[:-1], widths, strict=False))
            )
            + f"  {row[-1]}"
            for row in rows
        ]
        shorts = [
            f"{each.transport}: {each.short} of {len(each.turns)} transfers were handed on with less than "
            f"{USABLE:.0%} of their blocks of low priority"
            for each in self.outcomes
            if each.short
        ]
        stops = [f"{each.transport}: {each.stopped}" for each in self.outcomes if each.stopped]
        take, reason = advise(self.outcomes)
        verdict = f"take {take}: {reason}" if take else reason
        return [head, *(line.rstrip() for line in table), *shorts, *stops, *self.notes, verdict]


def _shown(size: int) -> str:
    """Return a size in powers of ten, as rates are."""
    if size < 1000:
        return f"{size} B"
    return f"{size / 1e6:g} MB" if size >= 10**5 else f"{size / 1e3:g} kB"


def _row(outcome: TransportResult) -> list[str]:
    made = outcome.to_json()
    if not outcome.turns:
        return [outcome.transport, *["-"] * 8, outcome.detail]
    blocks = made["blocks"]
    shares = [f"{made[key] / blocks:.2%}" if blocks else "-" for key in ("borne", "filled")]
    return [
        outcome.transport,
        format_seconds(made["median"]),
        format_seconds(made["p99"]),
        format_rate(made["goodput"]),
        f"{made['loss']:.2%}",
        str(made["again"]),
        str(made["repaired"]) if blocks else "-",
        *shares,
        outcome.detail,
    ]


def nearest_rank(values: Sequence[float], share: float) -> float:
    """Return the quantile that is one of the values: at least `share` of them are no larger."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def advise(outcomes: Sequence[TransportResult]) -> tuple[str, str]:
    """Return the transport to take, and why; an empty name if there is no choice.

    TCP delivers every byte and needs no choice of priorities, so a transport that is only about as fast does
    not replace it. The reason names others of its kind that are about as fast.
    """
    measured = [outcome for outcome in outcomes if outcome.turns]
    if not measured:
        return "", "nothing was measured"
    if len(measured) == 1:
        return "", f"only {measured[0].transport} was measured: nothing to compare it with"
    taken, reason = _chosen(measured)
    return taken.transport, reason + _caveat(taken) + _beside(taken, measured)


def _chosen(measured: Sequence[TransportResult]) -> tuple[TransportResult, str]:
    """Return the transport to take, and why."""
    tcp = _best([each for each in measured if _is_tcp(each)])
    ltp = _best([each for each in measured if not _is_tcp(each)])
    if tcp is None or ltp is None:
        best = _best(measured)
        assert best is not None
        return best, "the shortest median"
    ours, theirs = median(ltp.seconds), median(tcp.seconds)
    our_tail, their_tail = (nearest_rank(each.seconds, 0.99) for each in (ltp, tcp))
    if ours <= SOONER * theirs:
        return ltp, f"a transfer is usable {theirs / ours:.1f}x sooner than with {tcp.transport}"
    if ours <= theirs / SOONER and our_tail <= SHORTER_TAIL * their_tail:
        return ltp, (
            f"as fast as {tcp.transport} at the median, and {their_tail / our_tail:.1f}x sooner at the 99th "
            "percentile"
        )
    if theirs <= SOONER * ours:
        return tcp, f"{ours / theirs:.1f}x sooner than {ltp.transport}, and every byte arrives"
    return tcp, f"about as fast as {ltp.transport}, and every byte arrives"


def _beside(taken: TransportResult, measured: Sequence[TransportResult]) -> str:
    """Return words on others of its kind: those that tie with it, and the cost of full reliability."""
    others = [each for each in measured if each is not taken and _is_tcp(each) == _is_tcp(taken)]
    if _is_tcp(taken):
        ties = [each.transport for each in others if _ties(each, taken)]
        names = " and ".join([", ".join(ties[:-1]), ties[-1]] if len(ties) > 1 else ties)
        return f"; {names} {'are' if len(ties) > 1 else 'is'} about as fast" if ties else ""
    if taken.transport == _RELIABLE:
        return "; every byte arrives"
    for each in others:
        if _ties(each, taken):
            return f"; {each.transport} is about as fast, and by it every byte arrives"
        longer = median(each.seconds) / median(taken.seconds)
        return f"; {each.transport}, by which every byte arrives, takes {longer:.1f}x as long"
    return ""


def _ties(one: TransportResult, best: TransportResult) -> bool:
    """True if `one` is about as fast as `best`, which has the shortest median, there and at the 99th
    percentile."""
    tails = [nearest_rank(each.seconds, 0.99) for each in (best, one)]
    return median(best.seconds) >= SOONER * median(one.seconds) and tails[0] >= SHORTER_TAIL * tails[1]


def _caveat(outcome: TransportResult) -> str:
    """Return what speaks against the transport in spite of its speed."""
    if not outcome.short:
        return ""
    return (
        f"; but {outcome.short} of its {len(outcome.turns)} transfers were handed on with less than "
        f"{USABLE:.0%} of their low blocks: take it where training bears that"
    )


def _is_tcp(outcome: TransportResult) -> bool:
    return outcome.transport.split(":")[0] == "tcp"


def _best(outcomes: Sequence[TransportResult]) -> TransportResult | None:
    return min(outcomes, key=lambda each: median(each.seconds), default=None)


def window_note(most_in_flight: int | None, round_trip: float, outcomes: Sequence[TransportResult]) -> str:
    """Return a note if the kernel's buffers, and not the link, may have limited TCP; else an empty string."""
    tcp = [outcome for outcome in outcomes if _is_tcp(outcome) and outcome.turns]
    if most_in_flight is None or not tcp or round_trip <= 0:
        return ""
    # Half of the buffer goes to the kernel's own accounting of packets.
    cap = most_in_flight / 2 / round_trip
    best = max(outcome.size / min(outcome.seconds) for outcome in outcomes if outcome.turns)
    if best < 0.7 * cap:
        return ""
    return (
        f"TCP: the kernel lets a connection have about {format_bytes(most_in_flight / 2)} on its way, "
        f"which is {format_rate(8 * cap)} at this round trip; a larger net.ipv4.tcp_wmem here, and tcp_rmem "
        "there, may help"
    )
