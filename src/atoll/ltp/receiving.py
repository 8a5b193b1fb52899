"""A transfer at its receiver: placing blocks, restoring them from parity, and handing on.

The first datagram declares the transfer. A datagram that contradicts it, or itself, has the whole transfer
refused, with a reason. Source: docs/ltp.md, "The receiver".
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import numpy.typing as npt

from atoll.core.errors import AtollError
from atoll.ltp import fec, filling
from atoll.ltp.closing import TransferState, Verdict, decide, least
from atoll.ltp.events import Arrived, Mask, Values
from atoll.ltp.order import DTYPES, ELEMENTS, Extent, high_indices
from atoll.ltp.settings import LtpSettings
from atoll.wire.datagrams import (
    CODED_FROM,
    HEADER,
    HIGH,
    LEAST_DATAGRAM_BYTES,
    NO_GROUP,
    NOT_SAID,
    RELIABLE,
    SLICE,
    Bytes,
    Datagrams,
    Kind,
    Records,
    payload_bytes,
    restored_untrusted,
)

Items = npt.NDArray[np.int64]

DEVIATIONS = 4  # of the gap between arrivals, waited for beyond the mean (like TCP's timeout)
LEAST_WAIT = 0.002  # seconds: bursts are up to 2 ms apart
RATE_SPAN = 0.02  # seconds, least time that the arrival rate is averaged over; else a round trip
LEAST_NEED = 0.01  # seconds between two Needs of a transfer, however near the path
NEED_RTTS = 2.0  # round trips after which a high block that was passed by is requested
LEAST_PAYLOAD = payload_bytes(LEAST_DATAGRAM_BYTES)  # below it, records of a block outweigh the block
_SAME = ("chunk", "iteration", "blocks", "highs", "element")  # equal in all datagrams of a transfer


class BadTransferError(AtollError):
    """An arriving transfer cannot be accepted."""


class ArrivalRate:
    """Arrival rate of a session's blocks while any arrive, and how much the gaps between batches vary.

    It outlives transfers: each one begins with the rate of those before.
    """

    def __init__(self) -> None:
        self.gap_deviation = 0.0
        self._gap = 0.0
        self._last = -math.inf
        self._blocks = 0.0
        self._seconds = 0.0

    def handle_blocks(self, now: float, blocks: int, srtt: float) -> None:
        """Count a batch of blocks."""
        gap, self._last = now - self._last, now
        span = max(srtt, RATE_SPAN)
        if gap > 4 * span:  # the sender had nothing to send
            return
        fade = math.exp(-gap / span)
        self._blocks = self._blocks * fade + blocks
        self._seconds = self._seconds * fade + gap
        self.gap_deviation += (abs(gap - self._gap) - self.gap_deviation) / 16
        self._gap += (gap - self._gap) / 8

    @property
    def rate(self) -> float:
        """Blocks per second; inf before the first measurement."""
        return self._blocks / self._seconds if self._seconds > 0.0 else math.inf

    def expected(self, blocks: int) -> float:
        """Return the seconds in which so many blocks arrive."""
        return blocks / self.rate


class Incoming:
    """One arriving transfer.

    Args:
        first: SLICE of its first datagram.
        payload: bytes of elements in a datagram.
        extent: size of the chunk; None if unknown.
        most_bytes: most memory for its blocks.

    Raises:
        BadTransferError: the first datagram contradicts `extent`, or exceeds `most_bytes`.
    """

    def __init__(
        self,
        settings: LtpSettings,
        first: Records,
        payload: int,
        extent: Extent | None,
        most_bytes: int,
        now: float,
    ) -> None:
        self.settings = settings
        self.transfer, self.chunk = int(first["transfer"]), int(first["chunk"])
        self.iteration = int(first["iteration"])
        self.blocks, self.highs = int(first["blocks"]), int(first["highs"])
        self.reliable = bool(first["flags"] & RELIABLE)
        self.dtype = DTYPES[int(first["element"])]
        self.block = payload // self.dtype.itemsize
        self._like = {name: first[name] for name in _SAME}
        self._head = first.tobytes()[:CODED_FROM]
        self._check_size(payload, extent, most_bytes)
        self._elements = extent.elements if extent is not None else None
        self.first_at = self.last_at = now
        self.usable_at = math.inf
        self.restored = 0
        self.early_said = False
        self.verdict = Verdict("wait", "")
        self._memory: Bytes = np.empty((self.blocks, payload), dtype=np.uint8)  # by place
        self._there = np.zeros(self.blocks, dtype=np.bool_)  # by index
        self._taken = np.zeros(self.blocks, dtype=np.bool_)  # by place
        self._place = np.zeros(self.blocks, dtype=np.int64)  # by index
        self._scale: npt.NDArray[np.float32] | None = None  # by place, once one is not 1
        self._nonzero = np.full(self.blocks, NOT_SAID, dtype=np.uint16)  # by place
        self._high_at = np.zeros(self.blocks, dtype=np.bool_)  # by index
        self._high_indices = high_indices(self.blocks, self.highs)
        self._high_at[self._high_indices] = True
        self._count, self._highs_there = 0, 0
        self._least_lows = least(settings.usable, self.blocks - self.highs)
        self._furthest = -1  # highest index received; beyond the blocks once parity arrived
        self._watched: Mask | None = None  # high blocks that later datagrams passed, by index
        self._groups = _Coded(self.blocks, payload + SLICE.itemsize - CODED_FROM)
        self._grace_at = self._deadline_at = self._need_at = math.inf

    def _check_size(self, payload: int, extent: Extent | None, most_bytes: int) -> None:
        name = f"transfer {self.transfer} of chunk {self.chunk}"
        if payload < LEAST_PAYLOAD or payload % 8:
            raise BadTransferError(
                f"{name}: {payload} B of elements in a datagram: a multiple of 8 from {LEAST_PAYLOAD} on"
            )
        if not self.highs:
            raise BadTransferError(f"{name}: no high block, where the last one always is")
        if self.blocks * payload > most_bytes:
            raise BadTransferError(
                f"{name}: {self.blocks} blocks of {payload} B, where {most_bytes} B are the most"
            )
        if extent is not None and extent.dtype != self.dtype:
            came, agreed = ELEMENTS[self.dtype].name.lower(), ELEMENTS[extent.dtype].name.lower()
            raise BadTransferError(f"{name}: elements of type {came}, where the chunk's are {agreed}")
        if extent is not None and self.blocks != -(-extent.elements // self.block):
            raise BadTransferError(
                f"{name}: {self.blocks} blocks of {self.block}, "
                f"where the chunk has {extent.elements} elements"
            )

    @property
    def whole(self) -> bool:
        """True if every high block is there."""
        return self._highs_there == self.highs

    @property
    def _usable(self) -> bool:
        """True if enough low blocks are there."""
        return self._count - self._highs_there >= self._least_lows

    @property
    def _has_enough(self) -> bool:
        return self.whole and self._usable

    @property
    def bytes(self) -> int:
        """Memory of its blocks and parity, in bytes."""
        return self._memory.nbytes + self._groups.bytes

    # -- arrival --------------------------------------------------------------------------------------------

    def handle_datagrams(self, now: float, batch: Datagrams, drops: Counter[str]) -> None:
        """Take DATA or PARITY of this transfer. Raises BadTransferError for a contradiction."""
        slices = batch.slices
        self._check_alike(slices)
        if batch.elements.shape[1] != self._memory.shape[1]:
            raise BadTransferError(
                f"transfer {self.transfer}: a datagram with {batch.elements.shape[1]} B of elements, "
                f"where the others have {self._memory.shape[1]} B"
            )
        self.last_at = now
        if batch.kind is Kind.PARITY:
            if not self._groups.add_parity(slices, batch.frames[:, HEADER.itemsize + CODED_FROM :]):
                return
            # Parity is sent after all data.
            self._furthest = max(self._furthest, self.blocks - 1 + self._groups.parities)
        else:
            self._place_blocks(slices, batch.elements)
        if self._groups.parities and not self._has_enough:
            self._restore(drops)

    def _check_alike(self, slices: Records) -> None:
        for name, value in self._like.items():
            if (slices[name] != value).any():
                raise BadTransferError(
                    f"transfer {self.transfer}: its datagrams differ in {name} ({value} and another)"
                )
        if ((slices["flags"] & RELIABLE != 0) != self.reliable).any():
            raise BadTransferError(f"transfer {self.transfer}: some of its datagrams are of a reliable one")

    def _place_blocks(self, slices: Records, elements: Bytes) -> None:
        index = slices["index"].astype(np.int64)
        self._furthest = max(self._furthest, int(index.max()))
        fresh = ~self._there[index]
        if not fresh.all():
            slices, elements, index = slices[fresh], elements[fresh], index[fresh]
            if not len(index):
                return
        place, rest = np.divmod(slices["offset"].astype(np.int64), self.block)
        self._check_places(slices, index, place, rest)
        self._there[index] = True
        self._taken[place] = True
        count = int(np.count_nonzero(self._there))
        if int(np.count_nonzero(self._taken)) != count:
            raise BadTransferError(f"transfer {self.transfer}: two blocks at one place")
        self._place[index] = place
        self._memory[place] = elements
        self._keep_scale(slices["scale"], place)
        self._nonzero[place] = slices["nonzero"]
        self._groups.add_data(slices, index)
        self._count = count
        self._highs_there = int(np.count_nonzero(self._there[self._high_indices]))
        if self._highs_there == self.highs and not self._taken[-1]:
            raise BadTransferError(f"transfer {self.transfer}: its last block is none of the high ones")

    def _check_places(self, slices: Records, index: Items, place: Items, rest: Items) -> None:
        high = slices["flags"] & HIGH != 0
        wrong = (rest != 0) | (place >= self.blocks) | (high != self._high_at[index])
        wrong |= (slices["count"] != self.block) & (place != self.blocks - 1)
        if wrong.any():
            bad = int(np.flatnonzero(wrong)[0])
            raise BadTransferError(
                f"transfer {self.transfer}: block {index[bad]} of {self.blocks} at element "
                f"{slices['offset'][bad]}, {slices['count'][bad]} long, "
                f"{'high' if high[bad] else 'low'}: blocks have {self.block}"
            )
        last = np.flatnonzero(place == self.blocks - 1)
        if len(last):
            self._check_end(slices, last)

    def _check_end(self, slices: Records, last: Items) -> None:
        counts = slices["count"][last]
        elements = (self.blocks - 1) * self.block + int(counts[0])
        if self._elements is None:
            self._elements = elements
        if (counts != counts[0]).any() or self._elements != elements or counts[0] > self.block:
            raise BadTransferError(
                f"transfer {self.transfer}: {elements} elements, where the chunk has {self._elements}"
            )

    def _keep_scale(self, scale: npt.NDArray[np.float32], place: Items) -> None:
        if self._scale is None:
            if (scale == 1.0).all():
                return
            if self.dtype.kind != "f":
                raise BadTransferError(f"transfer {self.transfer}: a scale for {self.dtype}")
            self._scale = np.ones(self.blocks, dtype=np.float32)
        self._scale[place] = scale

    def _restore(self, drops: Counter[str]) -> None:
        """Restore blocks from parity as long as the transfer lacks some."""
        for group in self._groups.restorable(self._there):
            if self._has_enough:
                return
            members = self._groups.members(group, self._there)
            places = self._place[members]
            heads = self._groups.heads[members]
            rows = np.concatenate((heads, self._memory[places]), axis=1)
            try:
                restored = self._groups.restore(group, members, rows)
            except ValueError as error:
                raise BadTransferError(f"transfer {self.transfer}: {error}") from None
            frames = np.zeros(
                (len(restored), HEADER.itemsize + CODED_FROM + restored.shape[1]), dtype=np.uint8
            )
            frames[:, HEADER.itemsize + CODED_FROM :] = restored
            frames[:, HEADER.itemsize : HEADER.itemsize + CODED_FROM] = np.frombuffer(
                self._head, dtype=np.uint8
            )
            batch = Datagrams(Kind.DATA, frames)
            slices = batch.slices
            slices["group"], slices["place"], slices["data"], slices["parity"] = NO_GROUP, 0, 0, 0
            index = np.minimum(slices["index"], self.blocks - 1)
            slices["flags"] = np.where(self._high_at[index], HIGH, 0) | (RELIABLE if self.reliable else 0)
            good = restored_untrusted(batch, drops)
            if not good.all():
                raise BadTransferError(f"transfer {self.transfer}: its parity restores an invalid block")
            before = self._count
            self._place_blocks(slices, batch.elements)
            self.restored += self._count - before

    # -- handing on -----------------------------------------------------------------------------------------

    def poll_verdict(
        self,
        now: float,
        reorder: float,
        rates: ArrivalRate,
        srtt: float,
        rttvar: float,
        *,
        idle: bool = False,
    ) -> Verdict:
        """Return the rule of atoll.ltp.closing that holds now. `idle`: wait no longer for low blocks."""
        spread = DEVIATIONS * rates.gap_deviation
        patience = NEED_RTTS * srtt + DEVIATIONS * rttvar + spread
        whole = self.whole
        lows, lows_there = self.blocks - self.highs, self._count - self._highs_there
        usable = self._usable
        if whole:
            self._set_deadlines(now, usable, rates, srtt, spread)
        else:
            self._watch(now, reorder, rates, patience)
        seen = TransferState(
            highs=self.highs,
            highs_there=self._highs_there,
            lows=lows,
            lows_there=lows_there,
            passed=whole and usable and self._count < self.blocks and self._all_passed(reorder),
            grace_over=now >= self._grace_at,
            deadline_over=idle or now >= self._deadline_at,
            early_said=self.early_said,
            need_over=now >= self._need_at,
        )
        self.verdict = decide(seen, self.settings)
        if self.verdict.name == "early":
            self.early_said = True
        return self.verdict

    def poll_need(self, now: float, srtt: float, rttvar: float) -> Mask:
        """Return the high blocks to request, by index, and set the time of the next request."""
        missing = self.missing_high
        asked = missing if self._watched is None else self._watched & missing
        self._watched = missing
        self._need_at = now + max(NEED_RTTS * srtt + DEVIATIONS * rttvar, LEAST_NEED)
        return asked

    def _set_deadlines(
        self, now: float, usable: bool, rates: ArrivalRate, srtt: float, spread: float
    ) -> None:
        """Set how long to wait for low blocks, now that every high block is there."""
        self._need_at = math.inf
        if usable and self.usable_at == math.inf:
            self.usable_at = now
            self._grace_at = now + rates.expected(self.blocks - self._count) + max(spread, LEAST_WAIT)
        if self._deadline_at == math.inf:
            left = max(self.blocks - 1 - self._furthest, 0)
            self._deadline_at = now + rates.expected(left) + max(srtt / 2, spread, LEAST_WAIT)

    def _watch(self, now: float, reorder: float, rates: ArrivalRate, patience: float) -> None:
        """Find high blocks that later datagrams passed, and set when the sender should have noticed."""
        if self._watched is not None:
            if now < self._need_at or (self._watched & ~self._there).any():
                return
            self._watched = None
        elif now >= self._need_at:
            return  # the end is overdue, and no later datagram has passed the missing ones
        passed = self.missing_high
        passed[max(int(self._furthest - reorder), 0) :] = False
        if passed.any():
            self._watched, self._need_at = passed, now + patience
        else:
            left = max(self.blocks - 1 - self._furthest, 0)
            self._need_at = self.last_at + rates.expected(left) + patience

    def _all_passed(self, reorder: float) -> bool:
        """Return True if later datagrams passed every missing block by more than the reordering."""
        last = self.blocks - 1 - int(self.missing[::-1].argmax())
        return self._furthest - last > reorder

    @property
    def deadline(self) -> float:
        """Time at which poll_verdict may change without a datagram."""
        return min(self._deadline_at, self._need_at, self._grace_at)

    @property
    def missing(self) -> Mask:
        """Mask of missing blocks, by index."""
        return ~self._there

    @property
    def missing_high(self) -> Mask:
        """Mask of missing high blocks, by index."""
        return ~self._there & self._high_at

    def finish(self, now: float, last: Values | None) -> Arrived:
        """Return the transfer's event. `last`: the chunk's last values, or None."""
        assert self._elements is not None  # the last block is of high priority
        block, present = self.block, self._taken
        high = np.zeros(self.blocks, dtype=np.bool_)
        high[self._place[self._high_indices]] = True
        values = self._memory.reshape(-1).view(self.dtype)[: self._elements]
        if self._scale is not None:
            with np.errstate(all="ignore"):  # the sender chose the scale
                values *= np.repeat(self._scale, block)[: self._elements].astype(self.dtype)
        choice = self._fill(values, present, high, last)
        return Arrived(
            self.transfer,
            self.chunk,
            self.iteration,
            values,
            present,
            high,
            self._nonzero,
            block,
            self.verdict.how,
            choice.how,
            min(self.usable_at, now) - self.first_at,
            f"{self.verdict.reason}; {choice.reason}",
        )

    def _fill(self, values: Values, present: Mask, high: Mask, last: Values | None) -> filling.Filling:
        if last is not None and (last.shape != values.shape or last.dtype != values.dtype):
            last = None
        fill = self.settings.fill
        choice = filling.choose_filling(
            self.blocks - self._count,
            self.blocks - self.highs,
            fill="zero" if fill == "rescale" and values.dtype.kind != "f" else fill,
            fill_above=self.settings.fill_above,
            has_last=last is not None,
        )
        if choice.how != "none":
            filling.apply(choice.how, values, present, high, self.block, last)
        return choice


class _Coded:
    """The parity of a transfer and the groups of its blocks."""

    def __init__(self, blocks: int, width: int) -> None:
        self.parities = 0
        self.heads = np.zeros((0, 0), dtype=np.uint8)  # coded half of SLICE, by index; empty before any
        self._blocks, self._most = blocks, min(blocks, NO_GROUP)
        self._width = width
        self._group = np.zeros(0, dtype=np.int64)  # by index
        self._place = np.zeros(0, dtype=np.int64)
        self._data = np.zeros(0, dtype=np.int64)  # by group
        self._done = np.zeros(0, dtype=np.bool_)  # by group: restored
        self._parity: dict[int, dict[int, Bytes]] = {}  # by group and place
        self._parity_count = np.zeros(0, dtype=np.int64)  # by group

    def add_data(self, slices: Records, index: Items) -> None:
        """Record the groups of newly placed blocks."""
        grouped = slices["group"] != NO_GROUP
        if not grouped.any():
            return
        self._open()
        if not grouped.all():
            slices, index = slices[grouped], index[grouped]
        self._learn(slices)
        self._group[index] = slices["group"]
        self._place[index] = slices["place"]
        raw = np.ascontiguousarray(slices).view(np.uint8).reshape(len(slices), SLICE.itemsize)
        self.heads[index] = raw[:, CODED_FROM:]

    def add_parity(self, slices: Records, coded: Bytes) -> bool:
        """Keep a copy of arrived parity; return True if any was new.

        No more parity is kept than there are blocks: more could restore nothing else.
        """
        self._open()
        self._learn(slices)
        before = self.parities
        for row, group, place in zip(coded, slices["group"].tolist(), slices["place"].tolist(), strict=True):
            if self.parities >= self._blocks:
                break
            rows = self._parity.setdefault(group, {})
            if place not in rows:
                rows[place] = row.copy()
                self._parity_count[group] += 1
                self.parities += 1
        return self.parities > before

    @property
    def bytes(self) -> int:
        """Memory of the parity, in bytes."""
        return self.parities * self._width

    def restorable(self, there: Mask) -> list[int]:
        """Return the groups that lack blocks and have received enough datagrams to restore them."""
        count = len(self._data)
        grouped = (self._group >= 0) & there
        data = np.bincount(self._group[grouped], minlength=count)
        parity = self._parity_count
        enough = (data < self._data) & (data + parity >= self._data) & (parity > 0) & ~self._done
        return [int(group) for group in np.flatnonzero(enough)]

    def members(self, group: int, there: Mask) -> Items:
        """Return the blocks of a group that are there, by index."""
        return np.flatnonzero((self._group == group) & there)

    def restore(self, group: int, members: Items, rows: Bytes) -> Bytes:
        """Return the coded bytes of the group's lost blocks. Raises ValueError for contradictory places."""
        parity = self._parity[group]
        coded = np.concatenate((rows, np.stack(list(parity.values()))))
        places = np.concatenate((self._place[members], np.array(list(parity), dtype=np.int64)))
        data = int(self._data[group])
        self._done[group] = True
        return fec.restore(coded, places, data)

    def _open(self) -> None:
        if not len(self._group):
            self._group = np.full(self._blocks, -1, dtype=np.int64)
            self._place = np.zeros(self._blocks, dtype=np.int64)
            self._data = np.zeros(self._most, dtype=np.int64)
            self._done = np.zeros(self._most, dtype=np.bool_)
            self._parity_count = np.zeros(self._most, dtype=np.int64)
            self.heads = np.zeros((self._blocks, SLICE.itemsize - CODED_FROM), dtype=np.uint8)

    def _learn(self, slices: Records) -> None:
        group, data = slices["group"].astype(np.int64), slices["data"].astype(np.int64)
        if (group >= self._most).any():
            raise BadTransferError(f"a group {int(group.max())}, where there are at most {self._most}")
        known = self._data[group]
        if ((known != 0) & (known != data)).any():
            raise BadTransferError("datagrams of one group differ in how many data it has")
        self._data[group] = np.where(known == 0, data, known)
