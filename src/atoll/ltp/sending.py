"""A transfer that this end sends: what of it goes next, what goes again, and what the receiver says of it.

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
from atoll.ltp.settings import Settings
from atoll.wire.datagrams import (
    HEADER,
    SEAL_BYTES,
    SLICE,
    Bytes,
    Kind,
    payload_bytes,
)
from atoll.wire.linkcontrol import Closed, mark_missing

UNSENT, FLYING, THERE, GONE, WANTED = 0, 1, 2, 3, 4  # GONE: lost, or left out, and not to be sent (again)
REMIND_SECONDS, MOST_REMIND_SECONDS = 1.0, 8.0  # without the receiver's word, once all was sent; doubled
LATE_LOST = 1e-4  # the chance that all copies of a repair are lost that goes within the last round trip
MOST_COPIES = 4


class Outgoing:
    """One transfer. `high` is by block, in the order of place; the last block is made high, for it alone
    tells where the chunk ends. Raises UserError for what cannot be sent."""

    def __init__(
        self,
        settings: Settings,
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
        self.stopped = ""  # why no low block is sent any more
        self.repaired = 0  # datagrams that were sent again
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
        self._copies: Items = np.zeros(self.blocks, dtype=np.int64)  # datagrams on their way, by item
        self._sent_at: npt.NDArray[np.float64] = np.zeros(self.blocks, dtype=np.float64)
        self.remind_at = math.inf
        self._reminders = 0
        self._asked = np.zeros(self.blocks, dtype=np.bool_)  # goes again though it seems to be restorable
        self._next = 0
        self._wanted = 0
        self._lows_gone = 0
        self._lows_borne = (self.blocks - self.highs) - least(settings.usable, self.blocks - self.highs)
        self._low_reserve = 0  # of those: what the last round trip, from this block on, may lose
        self._tail = 0  # datagrams that a round trip carries
        self._tail_from = self.blocks
        self._late_copies, self._apart = 1, 0.0  # of a repair within the last round trip, and seconds between
        self._later: deque[tuple[float, Items]] = deque()  # when these go once more
        self._repeated: Items = np.zeros(self.blocks, dtype=np.int64)  # copies beyond the first
        self._missing = np.zeros(self.blocks, dtype=np.bool_)  # by index
        self._parts: set[int] = set()

    # -- what goes ------------------------------------------------------------------------------------------

    def begin(self, loss: float, burst: float, tail: int, apart: float = 0.0) -> str:
        """Its window begins. `loss` and `burst` are the path's; `tail` is datagrams that a round trip
        carries: the last so many get parity, for a repair of those would come after the end, and what is
        repaired by then goes in several copies, `apart` seconds from each other."""
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
        """Whether all of it was sent once, or left out."""
        return self._next >= self.items

    @property
    def bytes_left(self) -> int:
        """That are still to be sent."""
        if self.closed is not None:
            return 0
        return (self.items - self._next + self._wanted) * self.size

    @property
    def ready(self) -> bool:
        """Whether something is to be sent."""
        return self.closed is None and (self._wanted > 0 or self._next < self.items)

    @property
    def repairs(self) -> bool:
        return self.closed is None and self._wanted > 0

    def take(self, now: float, most: int) -> tuple[Kind, Items] | None:
        """The next items, repairs first, at most so many; they count as on their way."""
        if self._wanted:
            items = self._take_repairs(most)
            if len(items):
                more = min(most - len(items), self.blocks - self._next)
                self._repeat(now, items)
                if more > 0 and not self.stopped:  # a burst costs the same with few as with many
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
        """What is lost of repairs within the last round trip could not be repaired in time."""
        if self._late_copies < 2 or self.items - self._next > self._tail:
            return
        again = repairs[self._high_at[repairs] & (self._repeated[repairs] + 1 < self._late_copies)]
        if len(again):
            self._repeated[again] += 1
            self._later.append((now + self._apart, again))

    @property
    def due(self) -> float:
        """When `poll` has something to do."""
        if self.closed is not None:
            return math.inf
        return min(self.remind_at, self._later[0][0] if self._later else math.inf)

    def poll(self, now: float) -> None:
        """Has go again what is due."""
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

    # -- what is said of it ---------------------------------------------------------------------------------

    def handle_acked(self, items: Items) -> None:
        """These came."""
        np.subtract.at(self._copies, items, 1)
        if self.repaired:
            items = np.unique(items)  # two copies of one may be acknowledged together
        self._wanted -= int(np.count_nonzero(self._state[items] == WANTED))
        gone = items[self._state[items] == GONE]
        if len(gone):
            self._lows_gone -= int(np.count_nonzero(~self._high_at[gone[gone < self.blocks]]))
        self._state[items] = THERE

    def handle_lost(self, items: Items) -> int:
        """These were lost: high ones go again unless the receiver may restore them, low ones only where the
        transfer would not be usable. Returns how many it can restore for sure."""
        np.subtract.at(self._copies, items, 1)
        items = np.unique(items)
        lost = items[(self._state[items] == FLYING) & (self._copies[items] <= 0)]
        self._state[lost] = GONE
        data = lost[lost < self.blocks]
        self._repeated[data] = 0
        self._lows_gone += int(np.count_nonzero(~self._high_at[data]))
        # Of a group that has lost one more, others that were lost may not be restorable any more.
        self._repair_high(np.flatnonzero(self._gone) if (self._group[lost] >= 0).any() else data)
        self._repair_low()
        return int(np.count_nonzero(self._restorable(data)))

    def handle_early(self, reason: str) -> None:
        """The receiver has enough: no low block goes any more, and high ones only where it has not all."""
        self.stopped = reason
        data = self._state[: self.blocks]
        left = (data == WANTED) if self.settings.close_high >= 1.0 else (data == WANTED) & ~self._high_at
        data[left] = GONE
        self._wanted = int(np.count_nonzero(data == WANTED))

    def handle_need(self, now: float, ranges: list[tuple[int, int]], rtt: float) -> None:
        """The receiver asks for these. What went out within the last round trip may be there by now."""
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
        """A part of the receiver's last word; with the last part the word is out. Raises WireError for blocks
        that the transfer has not."""
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
        """All of it came or is given up, and the receiver's word is overdue: a block that comes once more has
        it say it again."""
        self._reminders += 1
        self.remind_at = math.inf
        self._asked[self._high_indices[-1:]] = True
        self._want(self._high_indices[-1:])

    def probe(self, item: int) -> bool:
        """Sends a high block again though nothing says that it is lost; False: it is none, or came."""
        if item >= self.blocks or not self._high_at[item] or self._state[item] != FLYING:
            return False
        self._want(np.array([item]))
        return True

    # -- inside ---------------------------------------------------------------------------------------------

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
        """High ones of these go again that the receiver cannot restore any more, whatever comes."""
        if self.stopped and self.settings.close_high >= 1.0:
            return  # the receiver has said that it can restore them
        high = lost[self._high_at[lost]]
        self._want(high[~self._in_groups(high, self._state != GONE)])

    def _repair_low(self) -> None:
        """As many low blocks go again as are too many to be borne, with those that the last round trip may
        lose, which cannot be repaired in time. Those that the receiver may yet restore are not lost."""
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
        """Which of these blocks the receiver can restore from what was acknowledged of their group."""
        return self._in_groups(items, self._state == THERE)

    def _in_groups(self, items: Items, there: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which of these blocks could be restored if just the items `there` came."""
        if self._protection is None or not len(items):
            return np.zeros(len(items), dtype=np.bool_)
        return self._protection.could_restore(self._group[items], self._group[there & (self._group >= 0)])
