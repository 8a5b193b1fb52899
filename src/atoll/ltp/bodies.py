"""Bytes of a transfer's datagrams: blocks of values, and parity over groups of them.

Items are the transfer's datagrams: data by index (atoll.ltp.order), then parity. Source: docs/ltp.md,
"Datagrams".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.ltp import fec
from atoll.ltp.events import Mask, Values
from atoll.ltp.order import places_of
from atoll.ltp.protecting import ProtectedBlocks, Protection
from atoll.wire.datagrams import (
    CODED_FROM,
    HEADER,
    HIGH,
    NO_GROUP,
    NOT_SAID,
    RELIABLE,
    SEAL_BYTES,
    SLICE,
    Bytes,
    Kind,
)

Items = npt.NDArray[np.int64]

_BODY = HEADER.itemsize
_ELEMENTS = HEADER.itemsize + SLICE.itemsize


class Bodies:
    """Write the bodies of one transfer's datagrams.

    Args:
        numbers: the fields `transfer`, `chunk` and `iteration` of every SLICE.
        values: (elements,); the caller must not change them.
        block: elements in a block.
        high: mask of high blocks, (blocks,), by place.
        element: the wire's number of the values' dtype.
        reliable: the transfer's flag RELIABLE.
    """

    def __init__(
        self, numbers: dict[str, int], values: Values, block: int, high: Mask, element: int, reliable: bool
    ) -> None:
        self.values, self.blocks = values, len(high)
        self._block_bytes = block * values.itemsize
        self._places = places_of(high)  # by index
        self._high_at: npt.NDArray[np.bool_] = high[self._places]  # by index
        flat = np.ascontiguousarray(values).view(np.uint8)
        whole = len(values) // block * self._block_bytes
        self._whole: Bytes = flat[:whole].reshape(-1, self._block_bytes)
        self._last: Bytes | None = None  # the last block, padded with zeros, if the values do not fill it
        if whole < len(flat):
            self._last = np.zeros(self._block_bytes, dtype=np.uint8)
            self._last[: len(flat) - whole] = flat[whole:]
        flags = np.where(self._high_at, HIGH, 0) | (RELIABLE if reliable else 0)
        self._slices = self._describe(numbers | {"highs": int(np.count_nonzero(high))}, block, element, flags)
        self._counted = np.zeros(self.blocks, dtype=np.bool_)  # by index: `nonzero` is filled in
        self._protection: Protection | None = None
        self._parity: Bytes = np.zeros((0, 0), dtype=np.uint8)

    def _describe(
        self, numbers: dict[str, int], block: int, element: int, flags: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        """Return the SLICE of each block by index, (blocks,)."""
        slices: npt.NDArray[Any] = np.zeros(self.blocks, dtype=SLICE)
        for name, number in numbers.items():
            slices[name] = number
        last = self.blocks - 1
        slices["blocks"] = self.blocks
        slices["group"] = NO_GROUP
        slices["element"] = element
        slices["flags"] = flags
        slices["offset"] = self._places * block
        slices["index"] = np.arange(self.blocks)
        slices["scale"] = 1.0
        slices["count"] = np.where(self._places < last, block, len(self.values) - last * block)
        slices["nonzero"] = NOT_SAID  # counted for high blocks when they are sent
        return slices

    def protect(self, protection: Protection) -> None:
        """Add parity datagrams over the groups of `protection`."""
        self._protection = protection
        for part in protection.parts:
            group = part.turns % part.groups.count
            self._slices["group"][part.blocks] = part.first_group + group
            self._slices["place"][part.blocks] = part.turns // part.groups.count
            self._slices["data"][part.blocks] = part.groups.data_of(group)
            self._slices["parity"][part.blocks] = part.groups.parity
        size = SLICE.itemsize + self._block_bytes
        self._parity = np.zeros((protection.parities, size), dtype=np.uint8)

    def write(self, kind: Kind, items: Items, frames: Bytes) -> None:
        """Write the bodies of `items` into rows with room for header, body and seal, (n, size)."""
        if kind is Kind.PARITY:
            self._write_parity(items, frames)
            return
        self._count_nonzero(items)
        frames[:, _BODY:_ELEMENTS] = self._slices[items].view(np.uint8).reshape(len(items), SLICE.itemsize)
        target = frames[:, _ELEMENTS : _ELEMENTS + self._block_bytes]
        places = self._places[items]
        first, count = int(places[0]), len(self._whole)
        if int(places[-1]) - first == len(items) - 1 and (
            len(items) < 3 or bool((np.diff(places) == 1).all())
        ):
            end = min(first + len(items), count)
            target[: end - first] = self._whole[first:end]
            if first + len(items) > count and self._last is not None:
                target[-1] = self._last
            return
        if self._last is not None:
            tail = np.flatnonzero(places == count)
            if len(tail):
                places[tail] = 0
                target[:] = self._whole[places] if count else 0
                target[tail] = self._last
                return
        target[:] = self._whole[places]

    def _count_nonzero(self, items: Items) -> None:
        """Fill in `nonzero` of the high blocks among `items`; low blocks leave it unset."""
        fresh = items[self._high_at[items] & ~self._counted[items]]
        if not len(fresh):
            return
        self._counted[fresh] = True
        places = self._places[fresh]
        whole = places < len(self._whole)
        rows = self._whole[places[whole]].view(self.values.dtype)
        self._slices["nonzero"][fresh[whole]] = np.count_nonzero(rows, axis=1)
        if self._last is not None:
            self._slices["nonzero"][fresh[~whole]] = np.count_nonzero(self._last.view(self.values.dtype))

    def _write_parity(self, items: Items, frames: Bytes) -> None:
        assert self._protection is not None
        for item in items.tolist():
            part = self._protection.part_of(item)
            if item < part.first_item + part.groups.count:
                self._encode(part, item - part.first_item)
        frames[:, _BODY : _BODY + self._parity.shape[1]] = self._parity[items - self.blocks]

    def _encode(self, part: ProtectedBlocks, group: int) -> None:
        """Compute all parity of one group; called before its first parity datagram."""
        count, parity = part.groups.count, part.groups.parity
        members = part.blocks[group::count]
        frames = np.empty((len(members), _ELEMENTS + self._block_bytes + SEAL_BYTES), dtype=np.uint8)
        self.write(Kind.DATA, members, frames)
        first = part.first_item - self.blocks
        rows = self._parity[first + group : first + part.parities : count]
        rows[:, :CODED_FROM] = frames[0, _BODY : _BODY + CODED_FROM]
        rows[:, CODED_FROM:] = fec.encode(frames[:, _BODY + CODED_FROM : -SEAL_BYTES], parity)
        slices = rows[:, : SLICE.itemsize].view(SLICE)[:, 0]
        slices["place"] = len(members) + np.arange(parity)
