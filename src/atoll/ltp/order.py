"""The order in which a transfer's blocks are sent: two counts tell both ends which blocks are high.

A block's index is its turn. The k-th high block, by place, has the index floor((2k + 1) blocks / (2 highs)).
Low blocks take the other indices, by place. The delivered shares of high and low blocks so rise together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.core.errors import UserError
from atoll.wire.datagrams import Element

Indices = npt.NDArray[np.int64]

ELEMENTS: dict[np.dtype[Any], Element] = {
    np.dtype(np.float32): Element.FLOAT32,
    np.dtype(np.float64): Element.FLOAT64,
    np.dtype(np.float16): Element.FLOAT16,
    np.dtype(np.uint16): Element.BFLOAT16,
    np.dtype(np.uint8): Element.BYTE,
}
DTYPES = {int(element): dtype for dtype, element in ELEMENTS.items()}


@dataclass(frozen=True)
class Extent:
    """Size and dtype of a chunk that may arrive. Raises UserError for those that no transfer can have."""

    elements: int
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENTS or not 1 <= self.elements < 2**32:
            raise UserError(
                f"a chunk of {self.elements} elements of {self.dtype}: a transfer has 1 to 2^32 - 1, of "
                f"{', '.join(str(each) for each in ELEMENTS)} (uint16 is bfloat16)"
            )


def high_indices(blocks: int, highs: int) -> Indices:
    """Return the indices of the high blocks, ascending, (highs,)."""
    turns = np.arange(highs, dtype=np.int64)
    return (2 * turns + 1) * blocks // (2 * max(highs, 1))


def places_of(high: npt.NDArray[np.bool_]) -> Indices:
    """Return the place of each index, (blocks,); `high` is by place."""
    blocks, highs = len(high), int(np.count_nonzero(high))
    places = np.empty(blocks, dtype=np.int64)
    at_high = np.zeros(blocks, dtype=np.bool_)
    at_high[high_indices(blocks, highs)] = True
    places[at_high] = np.flatnonzero(high)
    places[~at_high] = np.flatnonzero(~high)
    return places
