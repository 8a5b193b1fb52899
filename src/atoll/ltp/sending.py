"""A transfer at its sender: what goes next, what is resent, and the receiver's answers.

Items are the transfer's datagrams: data by index (atoll.ltp.order), then parity. Source: docs/ltp.md, "The
sender".
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

from atoll.core.errors import UserError
from atoll.ltp.bodies import Bodies, Items
from atoll.ltp.closing import least
from atoll.ltp.events import Delivered, Mask, Values
from atoll.ltp.order import ELEMENTS, high_indices, places_of
from atoll.ltp.protecting import Protection
from atoll.ltp.settings import LtpSettings
from atoll.wire.datagrams import (
    HEADER,
    SEAL_BYTES,
    SLICE,
    Bytes,
    Kind,
    payload_bytes,
)
from atoll.wire.linkcontrol import Closed, mark_missing

# WANTED: to be resent. GONE: lost or left out, and not to be resent.
UNSENT, FLYING, THERE, GONE, WANTED = 0, 1, 2, 3, 4
# From the last datagram to a reminder, while the receiver has not closed the transfer; doubled each time.
REMIND_SECONDS, MOST_REMIND_SECONDS = 1.0, 8.0
LATE_LOST = 1e-4  # accepted probability that all copies of a repair within the last round trip are lost
MOST_COPIES = 4


class Outgoing:
    """One transfer of this end.

    Args:
            high: mask of high blocks, (blocks,), by place. The last block is made high, since it alone shows
            where the chunk ends.
        reliable: all blocks are high.

    Raises:
        UserError: the values or numbers cannot be sent.
    """

    def __init__(
        self,
        settings: LtpSettings,
        transfer: int,
        chunk: int,
        iteration: int,
        values: Values,
        high: Mask | None,
        reliable: bool,
    ) -> None:
        element = ELEMENTS.get(values.dtype)
        if element is None or values.ndim != 1 or not 1 <= len(values) < 2**32:
            raise UserError(
                f"a transfer of {values.dtype} of shape {values.shape}: it takes 1 to 2^32 - 1 values "
                f"in one dimension, of {', '.join(str(each) for each in ELEMENTS)} (uint16 is bfloat16)"
            )
        for name, number in (("chunk", chunk), ("iteration", iteration)):
            if not 0 <= number < 2**32:
                raise UserError(f"{name} {number}: between 0 and 2^32 - 1, as it has 32 bits in a header")
        payload = payload_bytes(settings.datagram_bytes)
        self.block = payload // values.itemsize
        self.blocks = -(-len(values) // self.block)
        if high is not None and high.shape != (self.blocks,):
            raise UserError(f"high: of shape {high.shape}, where the transfer has {self.blocks} blocks")
        self.settings, self.transfer, self.chunk, self.iteration = settings, transfer, chunk, iteration
        self.reliable = reliable
        self.high = np.full(self.blocks, reliable) if high is None or reliable else high.astype(np.bool_)
        self.high[-1] = True
        self.highs = int(np.count_nonzero(self.high))
        self.size = HEADER.itemsize + SLICE.itemsize + payload + SEAL_BYTES
        self.begun = False
        self.stopped = ""  # why no more low blocks are sent
        self.repaired = 0  # datagrams sent again
        self.closed: Closed | None = None
        numbers = {"transfer": transfer, "chunk": chunk, "iteration": iteration}
        self.bodies = Bodies(numbers, values, self.block, self.high, int(element), reliable)
        self._places = places_of(self.high)
        self._high_at = np.zeros(self.blocks, dtype=np.bool_)  # by index
        self._high_indices = high_indices(self.blocks, self.highs)
        self._high_at[self._high_indices] = True
        self._protection: Protection | None = None
        self._group: Items = np.full(self.blocks, -1, dtype=np.int64)  # by item
        self._state: Bytes = np.zeros(self.blocks, dtype=np.uint8)
        self._copies: Items = np.zeros(self.blocks, dtype=np.int64)  # copies in flight, by item
        self._sent_at: npt.NDArray[np.float64] = np.zeros(self.blocks, dtype=np.float64)
        self.remind_at = math.inf
        self._reminders = 0
        self._asked = np.zeros(self.blocks, dtype=np.bool_)  # requested: resend though it seems restorable
        self._next = 0
        self._wanted = 0
        self._lows_gone = 0
        self._lows_borne = (self.blocks - self.highs) - least(settings.usable, self.blocks - self.highs)
        self._low_reserve = 0  # part of `_lows_borne` that the last round trip may lose
        self._tail = 0  # datagrams of a round trip
        self._tail_from = self.blocks  # first block of the last round trip
        self._late_copies, self._apart = 1, 0.0  # copies of a repair in the last round trip; seconds between
        self._later: deque[tuple[float, Items]] = deque()  # times of the next copies
        self._repeated: Items = np.zeros(self.blocks, dtype=np.int64)  # copies beyond the first
        self._missing = np.zeros(self.blocks, dtype=np.bool_)  # by index
        self._parts: set[int] = set()

    # -- sending --------------------------------------------------------------------------------------------

    def begin(self, loss: float, burst: float, tail: int, apart: float = 0.0) -> str:
        """Begin the window; plan parity, and return its reason.

        A repair sent within the last round trip arrives after the transfer's end. The blocks sent then
        therefore get parity, and repairs sent then go in several copies.

        Args:
            loss, burst: the path's loss rate, and mean datagrams lost in a row.
            tail: datagrams of a round trip.
            apart: seconds between copies of a repair.
        """
        self.begun = True
        if not self.settings.redundancy:
            return "no forward error correction"
        if 0.0 < loss < 1.0:
            self._late_copies = min(math.ceil(math.log(LATE_LOST) / math.log(loss)), MOST_COPIES)
        self._tail, self._apart = tail, apart
        protection = Protection(self._high_at, tail, self._lows_borne, loss, burst)
        self._low_reserve = min(math.ceil(protection.lost), self._lows_borne)
        self._tail_from = protection.begin
        if protection.parts:
            self._protection, parities = protection, protection.parities
            self.bodies.protect(protection)
            self._group = protection.group_of_items()
            self._state = np.concatenate((self._state, np.zeros(parities, dtype=np.uint8)))
            self._copies = np.concatenate((self._copies, np.zeros(parities, dtype=np.int64)))
            self._sent_at = np.concatenate((self._sent_at, np.zeros(parities)))
        return protection.reason

    @property
    def items(self) -> int:
        return len(self._state)

    @property
    def whole(self) -> bool:
        """True if every item was sent once, or left out."""
        return self._next >= self.items

    @property
    def bytes_left(self) -> int:
        """Bytes still to be sent."""
        if self.closed is not None:
            return 0
        return (self.items - self._next + self._wanted) * self.size

    @property
    def ready(self) -> bool:
        """True if an item waits to be sent."""
        return self.closed is None and (self._wanted > 0 or self._next < self.items)

    @property
    def repairs(self) -> bool:
        return self.closed is None and self._wanted > 0

    def take(self, now: float, most: int) -> tuple[Kind, Items] | None:
        """Return the next items, at most `most`, repairs first, and count them as in flight."""
        if self._wanted:
            items = self._take_repairs(most)
            if len(items):
                more = min(most - len(items), self.blocks - self._next)
                self._repeat(now, items)
                if more > 0 and not self.stopped:  # fill up the burst, whose cost is fixed
                    items = np.concatenate((items, np.arange(self._next, self._next + more)))
                    self._next += more
                return self._gone_out(now, Kind.DATA, items)
        while self._next < self.items:
            if self._next >= self.blocks:
                items = np.arange(self._next, min(self._next + most, self.items))
                self._next += len(items)
                return self._gone_out(now, Kind.PARITY, items)
            if self.stopped:
                rest = self._high_indices[np.searchsorted(self._high_indices, self._next) :]
                items = rest[:most]
                self._next = int(items[-1]) + 1 if len(rest) > most else self.blocks
                if not len(items):
                    continue
            else:
                items = np.arange(self._next, min(self._next + most, self.blocks))
                self._next += len(items)
            return self._gone_out(now, Kind.DATA, items)
        return None

    def _take_repairs(self, most: int) -> Items:
        wanted = np.flatnonzero(self._state[: self.blocks] == WANTED)
        if self._protection is not None:
            useless = self._restorable(wanted) & ~self._asked[wanted]
            self._state[wanted[useless]] = GONE
            self._lows_gone += int(np.count_nonzero(~self._high_at[wanted[useless]]))
            wanted = wanted[~useless]
        self._wanted = max(len(wanted) - most, 0)
        self.repaired += min(len(wanted), most)
        return wanted[:most]

    def _repeat(self, now: float, repairs: Items) -> None:
        """Queue further copies of repairs within the last round trip: no later repair would be in time."""
        if self._late_copies < 2 or self.items - self._next > self._tail:
            return
        again = repairs[self._high_at[repairs] & (self._repeated[repairs] + 1 < self._late_copies)]
        if len(again):
            self._repeated[again] += 1
            self._later.append((now + self._apart, again))

    @property
    def due(self) -> float:
        """Time at which `poll` has something to do."""
        if self.closed is not None:
            return math.inf
        return min(self.remind_at, self._later[0][0] if self._later else math.inf)

    def poll(self, now: float) -> None:
        """Queue copies that are due, and a reminder."""
        while self._later and now >= self._later[0][0]:
            items = self._later.popleft()[1]
            if not self.stopped or self.settings.close_high < 1.0:
                self._want(items[self._state[items] == FLYING])
        if now >= self.remind_at:
            self.remind()

    def _gone_out(self, now: float, kind: Kind, items: Items) -> tuple[Kind, Items]:
        self._state[items] = FLYING
        self._copies[items] += 1
        self._sent_at[items] = now
        if self.whole and not self._wanted:
            self.remind_at = now + min(REMIND_SECONDS * 2.0**self._reminders, MOST_REMIND_SECONDS)
        return kind, items

    # -- the receiver's answers -----------------------------------------------------------------------------

    def handle_acked(self, items: Items) -> None:
        """Record that these items arrived."""
        np.subtract.at(self._copies, items, 1)
        if self.repaired:
            items = np.unique(items)  # two copies of an item may be acknowledged together
        self._wanted -= int(np.count_nonzero(self._state[items] == WANTED))
        gone = items[self._state[items] == GONE]
        if len(gone):
            self._lows_gone -= int(np.count_nonzero(~self._high_at[gone[gone < self.blocks]]))
        self._state[items] = THERE

    def handle_lost(self, items: Items) -> None:
        """Record lost items.

        High blocks are resent unless the receiver may restore them, low ones only if the transfer would not
        be usable.
        """
        np.subtract.at(self._copies, items, 1)
        items = np.unique(items)
        lost = items[(self._state[items] == FLYING) & (self._copies[items] <= 0)]
        self._state[lost] = GONE
        data = lost[lost < self.blocks]
        self._repeated[data] = 0
        self._lows_gone += int(np.count_nonzero(~self._high_at[data]))
        # Another loss in a group may make its earlier losses unrestorable.
        self._repair_high(np.flatnonzero(self._gone) if (self._group[lost] >= 0).any() else data)
        self._repair_low()

    def handle_early(self, reason: str) -> None:
        """Stop: the receiver has enough. No low block is sent any more, and high ones only if it lacks
        some."""
        self.stopped = reason
        data = self._state[: self.blocks]
        left = (data == WANTED) if self.settings.close_high >= 1.0 else (data == WANTED) & ~self._high_at
        data[left] = GONE
        self._wanted = int(np.count_nonzero(data == WANTED))

    def handle_need(self, now: float, ranges: list[tuple[int, int]], rtt: float) -> None:
        """Resend requested blocks, but those sent within the last round trip, which may still arrive."""
        asked = np.zeros(self.blocks, dtype=np.bool_)
        for start, stop in ranges:
            asked[start:stop] = True
        state = self._state[: self.blocks]
        late = (
            (state == GONE)
            | (state == THERE)
            | ((state == FLYING) & (self._sent_at[: self.blocks] <= now - rtt))
        )
        self._asked |= asked & late
        self._want(np.flatnonzero(asked & late))

    def handle_closed(self, part: Closed) -> Delivered | None:
        """Take one part of a Closed; return the event after the last part.

        Raises WireError for blocks that the transfer does not have.
        """
        if part.how in ("refused", "dropped"):
            self._missing[:] = True
        else:
            mark_missing(part, self._missing)
        self._parts.add(part.part)
        if len(self._parts) < part.parts:
            return None
        self.closed = part
        missing = np.zeros(self.blocks, dtype=np.bool_)
        missing[self._places] = self._missing
        reason = f"{part.how}: {int(np.count_nonzero(missing))} of {self.blocks} blocks missing"
        return Delivered(self.transfer, self.chunk, self.iteration, missing, part.fill, reason)

    def remind(self) -> None:
        """Resend the last high block, so that the receiver repeats its overdue Closed."""
        self._reminders += 1
        self.remind_at = math.inf
        self._asked[self._high_indices[-1:]] = True
        self._want(self._high_indices[-1:])

    def probe(self, item: int) -> bool:
        """Resend a high block that is not known to be lost. Returns False if the item is low, parity or not
        in flight."""
        if item >= self.blocks or not self._high_at[item] or self._state[item] != FLYING:
            return False
        self._want(np.array([item]))
        return True

    # -- repairs --------------------------------------------------------------------------------------------

    def _want(self, items: Items) -> None:
        items = items[self._state[items] != WANTED]
        low_gone = items[(self._state[items] == GONE) & ~self._high_at[items]]
        self._lows_gone -= len(low_gone)
        self._state[items] = WANTED
        self._wanted += len(items)

    @property
    def _gone(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self._state[: self.blocks] == GONE)

    def _repair_high(self, lost: Items) -> None:
        """Resend the high blocks among `lost` that the receiver cannot restore, whatever else arrives."""
        if self.stopped and self.settings.close_high >= 1.0:
            return  # Early means that the receiver has or can restore all high blocks
        high = lost[self._high_at[lost]]
        self._want(high[~self._in_groups(high, self._state != GONE)])

    def _repair_low(self) -> None:
        """Resend low blocks in excess of those that may be missing.

        A reserve is kept for losses of the last round trip, which cannot be repaired in time. Blocks that the
        receiver may still restore do not count as lost.
        """
        if (
            self._lows_gone + self._low_reserve <= self._lows_borne
            or self.stopped
            or not self.settings.repair_low
        ):
            return
        gone = np.flatnonzero(self._gone & ~self._high_at)
        gone = gone[~self._in_groups(gone, self._state != GONE)]
        before = int(np.searchsorted(gone, self._tail_from))
        excess = max(len(gone), before + self._low_reserve) - self._lows_borne
        self._want(gone[: max(excess, 0)])

    def _restorable(self, items: Items) -> npt.NDArray[np.bool_]:
        """Return which of these blocks the receiver can restore from acknowledged datagrams."""
        return self._in_groups(items, self._state == THERE)

    def _in_groups(self, items: Items, there: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which of these blocks could be restored if only the items `there` arrived."""
        if self._protection is None or not len(items):
            return np.zeros(len(items), dtype=np.bool_)
        return self._protection.could_restore(self._group[items], self._group[there & (self._group >= 0)])
