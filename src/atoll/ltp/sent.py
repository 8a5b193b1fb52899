"""Records of a stripe's sent datagrams: in flight, acknowledged or lost.

Arrays with a row for each number from `_first` on; rows move down when the arrays are full. Source:
docs/ltp.md, "What is on its way"; loss detection follows RFC 9002, section 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from atoll.wire.datagrams import Acknowledgement

Items = npt.NDArray[np.int64]

CONTROL, ACK = -1, -2  # in place of a transfer's id; a CONTROL item is the message's sequence

# SILENT: asks for no acknowledgement. GIVEN_UP: lost with its stripe, and ignored from then on.
IN_FLIGHT, ACKED, LOST, SILENT, GIVEN_UP = 1, 2, 3, 4, 5

REORDER_BURSTS = 3  # later bursts that must arrive before a datagram counts as lost
RTT_SHARE = 9 / 8  # of the round trip, after which a datagram that a later one passed is lost (RFC 9002)
MOST_LATENESS = 0.25  # seconds, most allowance for reordering
GRANULARITY = 0.001  # seconds, resolution of a timer
_KEPT = 2**12  # settled numbers kept to detect wrongly declared losses
_ROOM = 2**14  # numbers; doubled when more are in flight


@dataclass(frozen=True)
class Mark:
    """State at the sending of a burst, to measure rates by.

    `delivered` and `arrived` are the receiver's count and clock in its latest Ack (`arrived` < 0: none since
    the sender was idle). `sent` is when that Ack's largest datagram was sent. `acked` is this end's count of
    acknowledged bytes.
    """

    delivered: int
    arrived: float
    sent: float
    acked: int
    limited: bool


@dataclass
class SettledDatagrams:
    """Datagrams of a stripe that one Ack, or passing time, settles. Items by transfer."""

    acked: dict[int, Items] = field(default_factory=dict)
    lost: dict[int, Items] = field(default_factory=dict)
    acked_bytes: int = 0
    acked_count: int = 0
    lost_count: int = 0
    runs: int = 0  # runs of consecutive lost numbers
    rtt: float | None = None
    exact: bool = False  # the Ack's largest number is the newest of `acked`
    newest: tuple[float, Mark] | None = None  # send time and mark of the largest newly acknowledged one


class SentRecords:
    """Sent datagrams of one stripe."""

    def __init__(self) -> None:
        self.next = 0  # the next datagram's number
        self.in_flight = 0  # bytes
        self.waits_since = math.inf  # since when datagrams in flight have had no acknowledgement
        self.largest_acked = -1
        self.last_sent = -math.inf  # time of the last datagram that asks for an acknowledgement
        self.reorder = 0.0  # numbers; at least REORDER_BURSTS bursts
        self.lateness = 0.0  # seconds by which a datagram declared lost still arrived
        self.loss_at = math.inf  # time at which the next datagram counts as lost
        self._patience = 0.0
        self._first = 0
        self._oldest = 0  # no number below it is in flight
        self._state = np.zeros(_ROOM, dtype=np.uint8)
        self._transfer = np.zeros(_ROOM, dtype=np.int64)
        self._item = np.zeros(_ROOM, dtype=np.int64)
        self._size = np.zeros(_ROOM, dtype=np.int64)
        self._time = np.zeros(_ROOM, dtype=np.float64)
        self._mark = np.zeros(_ROOM, dtype=np.int64)
        self._marks: list[Mark] = []
        self._marks_from = 0

    def add(self, now: float, transfer: int, items: Items, size: int, mark: Mark) -> int:
        """Record a burst; return its first number. `size` is bytes of a datagram, seal included."""
        count = len(items)
        self._make_room(count)
        at = self.next - self._first
        rows = slice(at, at + count)
        silent = transfer == ACK
        self._state[rows] = SILENT if silent else IN_FLIGHT
        self._transfer[rows] = transfer
        self._item[rows] = items
        self._size[rows] = size
        self._time[rows] = now
        self._mark[rows] = self._marks_from + len(self._marks)
        self._marks.append(mark)
        if not silent:
            if not self.in_flight:
                self.waits_since = now
            self.in_flight += size * count
            self.last_sent = now
        number = self.next
        self.next += count
        return number

    def handle_ack(self, now: float, ack: Acknowledgement) -> SettledDatagrams:
        """Take in an Ack. An Ack of numbers that were never sent has no effect."""
        told = SettledDatagrams()
        if ack.largest >= self.next:
            return told
        start, stop = max(ack.base, self._first), min(ack.base + len(ack.received), self.next)
        if start >= stop:
            return told
        rows = slice(start - self._first, stop - self._first)
        came = ack.received[start - ack.base : stop - ack.base]
        state = self._state[rows]
        self._measure(now, ack.largest - self._first, told)
        fresh = np.flatnonzero(came & (state == IN_FLIGHT)) + rows.start
        wrongly = np.flatnonzero(came & (state == LOST)) + rows.start
        if len(wrongly):
            self._learn_reordering(now, wrongly)
        newly = np.concatenate((fresh, wrongly)) if len(wrongly) else fresh
        if len(newly):
            sizes = int(self._size[fresh].sum())
            self.in_flight -= sizes
            self.waits_since = now if self.in_flight else math.inf
            told.acked_bytes = sizes + int(self._size[wrongly].sum())
            told.acked_count = len(newly)
            self._state[newly] = ACKED
            told.acked = self._by_transfer(newly)
            newest = int(fresh[-1]) if len(fresh) else int(newly[-1])
            told.newest = float(self._time[newest]), self._mark_of(newest)
            told.exact = newest + self._first == ack.largest and len(fresh) > 0
        self.largest_acked = max(self.largest_acked, ack.largest)
        return told

    def _measure(self, now: float, largest: int, told: SettledDatagrams) -> None:
        """Measure the round trip of the largest number by its first Ack, even if it asked for none."""
        if largest >= 0 and self._state[largest] in (IN_FLIGHT, SILENT):
            told.rtt = max(now - float(self._time[largest]), 0.0)
            if self._state[largest] == SILENT:
                self._state[largest] = ACKED

    def detect(self, now: float, rtt: float, jitter: float, burst: int, told: SettledDatagrams) -> None:
        """Find datagrams lost by now. `rtt` and `jitter` are in seconds, `burst` in datagrams."""
        self.loss_at = math.inf
        low, high = self._oldest - self._first, self.largest_acked - self._first
        if high > low:
            waiting = np.flatnonzero(self._state[low:high] == IN_FLIGHT) + low
            if not len(waiting):
                self._oldest = self.largest_acked
                return
            patience = self._patience = RTT_SHARE * rtt + max(jitter, GRANULARITY) + self.lateness
            reorder = max(self.reorder, float(REORDER_BURSTS * burst))
            gone = (waiting < high - reorder) | (self._time[waiting] + patience <= now)
            lost = waiting[gone]
            if len(lost):
                self._lose(lost, told)
                waiting = waiting[~gone]
            self._oldest = self._first + (int(waiting[0]) if len(waiting) else high)
            if len(waiting):
                self.loss_at = float(self._time[waiting[0]]) + patience

    def give_up(self) -> SettledDatagrams:
        """Declare all datagrams in flight lost: the stripe is silent."""
        told, waiting = SettledDatagrams(), self._waiting()
        if len(waiting):
            self._lose(waiting, told)
            self._state[waiting] = GIVEN_UP
        self._oldest = self.next
        self.loss_at = math.inf
        return told

    def oldest_in_flight(self) -> tuple[int, int] | None:
        """Return the transfer (or CONTROL) and item of the oldest datagram in flight."""
        waiting = self._waiting()
        if not len(waiting):
            return None
        return int(self._transfer[waiting[0]]), int(self._item[waiting[0]])

    def _waiting(self) -> Items:
        low, stop = self._oldest - self._first, self.next - self._first
        return np.flatnonzero(self._state[low:stop] == IN_FLIGHT) + low

    def _lose(self, lost: Items, told: SettledDatagrams) -> None:
        self._state[lost] = LOST
        self.in_flight -= int(self._size[lost].sum())
        if not self.in_flight:
            self.waits_since = math.inf
        told.lost_count += len(lost)
        told.runs += 1 + int(np.count_nonzero(np.diff(lost) > 1))
        told.lost = self._by_transfer(lost)

    def _learn_reordering(self, now: float, wrongly: Items) -> None:
        window = self.next - self._oldest + 1.0
        extent = float(self.largest_acked - self._first - int(wrongly[0]) + 1)
        self.reorder = max(self.reorder, min(extent, max(window, 1.0)))
        late = now - float(self._time[wrongly[0]]) - self._patience
        self.lateness = max(self.lateness, min(late, MOST_LATENESS))

    def _by_transfer(self, rows: Items) -> dict[int, Items]:
        transfers = self._transfer[rows]
        if (transfers == transfers[0]).all():
            return {int(transfers[0]): self._item[rows]}
        return {int(each): self._item[rows[transfers == each]] for each in np.unique(transfers)}

    def _mark_of(self, row: int) -> Mark:
        return self._marks[int(self._mark[row]) - self._marks_from]

    def _make_room(self, count: int) -> None:
        at = self.next - self._first
        if at + count <= len(self._state):
            return
        waiting = self._waiting()  # on a stripe with nothing but SILENT, no Ack moves `_oldest`
        self._oldest = self._first + int(waiting[0]) if len(waiting) else self.next
        keep_from = max(min(self._oldest, self.next - _KEPT) - self._first, 0)
        kept = at - keep_from
        room = len(self._state)
        while kept + count > room // 2:
            room *= 2
        for name in ("_state", "_transfer", "_item", "_size", "_time", "_mark"):
            old = getattr(self, name)
            new = np.zeros(room, dtype=old.dtype)
            new[:kept] = old[keep_from:at]
            setattr(self, name, new)
        self._first += keep_from
        if kept:
            gone = int(self._mark[0]) - self._marks_from
            del self._marks[:gone]
            self._marks_from += gone
