"""Arrivals on a stripe, and when to acknowledge them. Source: docs/ltp.md, "Acknowledgements".

Acknowledgements are out of order: an Ack has a bit for each of the last numbers. A lost Ack costs nothing,
since the next one repeats its bits.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from atoll.wire.datagrams import ACK_BITS, Acknowledgement

Numbers = npt.NDArray[np.int64]

ACK_EVERY = 256  # datagrams: at 1 Gb/s 350 Acks a second, each of which costs both ends some 100 us
LONGEST_DELAY = 0.005  # seconds that an acknowledgement waits for more datagrams
DELAY_SHARE = 1 / 8  # of the round trip: the longest delay where this is shorter
TOLD_AGAIN = 1024  # least numbers in an Ack: some 10 Acks in a row may be lost without harm
LEAST_REORDER = 3  # numbers by which a later datagram must have passed a missing one (RFC 9002, 6.1.1)
REORDER_DECAY = 0.98  # factor on the measured reordering for each batch that shows less
_ROOM = 4 * ACK_BITS  # numbers in the bitmap; it moves down when they are used up


class Arrivals:
    """Record the numbers that arrived on one stripe in one direction.

    The replay window has already dropped repeated numbers.
    """

    def __init__(self, most_bits: int) -> None:
        self.largest = -1
        self.reorder = float(LEAST_REORDER)  # measured reordering, in numbers
        self._most_bits = most_bits
        self._came = np.zeros(_ROOM, dtype=np.bool_)
        self._first = 0  # number of the first bit in `_came`
        self._largest_at = 0.0
        self._lowest_pending = 0
        self._pending = 0  # datagrams that wait for an acknowledgement
        self._due = math.inf

    def handle_numbers(self, now: float, numbers: Numbers, *, asks: bool, longest_delay: float) -> None:
        """Record a batch of numbers, (n,), in the order of arrival.

        Args:
            asks: the batch wants an Ack within `longest_delay` seconds, or at once where a gap shows.
        """
        first, largest, before = int(numbers[0]), int(numbers[-1]), self.largest
        if first > before and (len(numbers) == 1 or bool((np.diff(numbers) > 0).all())):
            extent, lowest = 0, first
            gap = largest - before != len(numbers)
        else:
            highest = np.maximum.accumulate(numbers)
            np.maximum(highest, before, out=highest)
            extent, lowest, largest = int((highest - numbers).max()), int(numbers.min()), int(highest[-1])
            gap = largest - before != int(np.count_nonzero(numbers > before))
        if extent >= self.reorder:
            self.reorder = float(min(extent + 1, ACK_BITS))
        else:
            self.reorder = max(self.reorder * REORDER_DECAY, extent + 1.0, float(LEAST_REORDER))
        if largest - self._first >= _ROOM:
            self._make_room(largest)
        offsets = numbers - self._first
        self._came[offsets if lowest >= self._first else offsets[offsets >= 0]] = True
        if largest > before:
            self.largest, self._largest_at = largest, now
        if not asks:
            return
        self._lowest_pending = lowest if not self._pending else min(lowest, self._lowest_pending)
        self._pending += len(numbers)
        soon = gap or extent > 0 or self._pending >= ACK_EVERY
        self._due = min(self._due, now if soon else now + longest_delay)

    def hurry(self, now: float) -> None:
        """Make the pending acknowledgement due now."""
        if self._pending:
            self._due = now

    @property
    def due(self) -> float:
        """Time of the next acknowledgement; inf if none is pending."""
        return self._due

    def poll_ack(self, now: float, stripe: int, delivered: int) -> Acknowledgement | None:
        """Return the Ack if one is due. `delivered` is bytes received over all stripes."""
        if now < self._due or self.largest < 0:
            return None
        base = self._base
        received = self._came[base - self._first : self.largest + 1 - self._first].copy()
        self._due, self._pending = math.inf, 0
        return Acknowledgement(
            of=stripe,
            largest=self.largest,
            arrived=self._largest_at,
            delay=now - self._largest_at,
            base=base,
            received=received,
            delivered=delivered,
        )

    @property
    def bits(self) -> int:
        """Numbers that the next Ack covers."""
        return self.largest + 1 - self._base

    @property
    def _base(self) -> int:
        base = max(min(self._lowest_pending, self.largest - TOLD_AGAIN + 1), self._first, 0)
        return max(base, self.largest - self._most_bits + 1)

    def _make_room(self, largest: int) -> None:
        first = largest - ACK_BITS
        keep = self._came[max(first - self._first, 0) :].copy() if first - self._first < _ROOM else None
        self._came[:] = False
        if keep is not None:
            self._came[: len(keep)] = keep
        self._first = first


def ack_delay(srtt: float) -> float:
    """Return the seconds that an acknowledgement may wait for more datagrams."""
    return min(srtt * DELAY_SHARE, LONGEST_DELAY)
