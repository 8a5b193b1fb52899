"""Blocks: runs of a chunk, one for each DATA datagram, and their importance.

The blocks with the largest mean |g|, smoothed over iterations, have high priority. Source: docs/ltp.md,
"Blocks and their order".
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Values: TypeAlias = npt.NDArray[Any]  # (elements,), of a floating type where arithmetic is done
Mask: TypeAlias = npt.NDArray[np.bool_]  # (blocks,)
Means: TypeAlias = npt.NDArray[np.float64]  # (blocks,)

FLOATS = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16))
CARRIED = 0.6  # part of the smoothed mean |g| in the blocks of a derived share
LEAST_SHARE, MOST_SHARE = 0.05, 0.5  # bounds of a derived share
_SLICE_BYTES = 2**18  # per pass: fits a core's own cache


def block_count(elements: int, block: int) -> int:
    """Return the number of blocks of `elements`; the last block may be shorter."""
    return -(-elements // block)


def by_block(values: Values, block: int) -> tuple[Values, Values]:
    """Return two views: the whole blocks, (blocks, block), and the shorter last one, (elements,)."""
    whole = len(values) // block
    return values[: whole * block].reshape(whole, block), values[whole * block :]


def require_floats(dtype: np.dtype[Any]) -> None:
    """Raise TypeError unless NumPy can do arithmetic in `dtype`."""
    if dtype not in FLOATS:
        hint = " (bfloat16 that uint16 hold: make it float32 first)" if dtype == np.uint16 else ""
        raise TypeError(f"{dtype}{hint}: only float16, float32 and float64 can be reckoned with")


def mean_abs(values: Values, block: int) -> Means:
    """Return the mean |value| of each block, (blocks,); not finite if a block has such a value, or
    overflows."""
    require_floats(values.dtype)
    full, rest = by_block(values, block)
    means = np.empty(block_count(len(values), block))
    sums = np.float64 if values.dtype == np.float64 else np.float32
    rows = max(1, _SLICE_BYTES // (block * values.itemsize))
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(full), rows):
            sizes = np.abs(full[first : first + rows])
            means[first : first + len(sizes)] = np.add.reduce(sizes, axis=1, dtype=sums) / block
        if len(rest):
            means[-1] = np.abs(rest).mean(dtype=sums)
    return means


class Importance:
    """Mean |g| of each block of one chunk, smoothed over iterations.

    `smoothing` is the weight of the past, in [0, 1). A block whose newest mean is not finite ranks first,
    since it shows a failed step; the smoothed mean leaves that value out.
    """

    def __init__(self, blocks: int, smoothing: float = 0.9) -> None:
        if not 0.0 <= smoothing < 1.0:
            raise ValueError(f"smoothing = {smoothing:g}: it is at least 0 and below 1")
        self._smoothing = smoothing
        self._smoothed: Means = np.zeros(blocks)
        self._known = np.zeros(blocks, bool)  # had a finite mean before
        self._urgent: Mask = np.zeros(blocks, bool)

    @property
    def blocks(self) -> int:
        return len(self._smoothed)

    @property
    def smoothed(self) -> Means:
        """Smoothed mean |g| of each block, (blocks,); 0 before the first finite mean."""
        return self._smoothed.copy()

    def update(self, means: npt.ArrayLike) -> None:
        """Take an iteration's `mean_abs`, (blocks,). A block's first finite mean counts in full."""
        new = np.asarray(means, np.float64)
        if new.shape != self._smoothed.shape:
            raise ValueError(f"means of shape {new.shape} for {len(self._smoothed)} blocks")
        finite = np.isfinite(new)
        weight = np.where(self._known, self._smoothing, 0.0)[finite]
        self._smoothed[finite] = weight * self._smoothed[finite] + (1.0 - weight) * new[finite]
        self._known |= finite
        self._urgent = ~finite

    def high(self, share: float) -> Mask:
        """Return the mask of high-priority blocks: this share of them, rounded up; ties go to the first.

        All blocks that are not finite are in the mask, even if they exceed the share.
        """
        blocks = len(self._smoothed)
        count = max(share_of(share, blocks), int(self._urgent.sum()))
        ranked = np.where(self._urgent, np.inf, self._smoothed)
        if count in (0, blocks):
            return np.full(blocks, count > 0)
        least = np.partition(ranked, blocks - count)[blocks - count]
        mask: Mask = np.greater(ranked, least)
        ties = np.flatnonzero(ranked == least)
        mask[ties[: count - int(mask.sum())]] = True
        return mask

    def derived_share(
        self, carried: float = CARRIED, least: float = LEAST_SHARE, most: float = MOST_SHARE
    ) -> tuple[float, str]:
        """Return the smallest share of blocks that carries `carried` of the smoothed mean |g|, and the
        reason.

        The share is clamped to `least` and `most`.
        """
        total = float(self._smoothed.sum())
        if total == 0.0:
            return least, f"no block has a gradient yet: the least share, {least:g}"
        sums = np.cumsum(np.sort(self._smoothed)[::-1])
        count = min(int(np.searchsorted(sums / total, carried)) + 1, len(sums))
        share = count / len(sums)
        carriers = f"{count} of {len(sums)} blocks carry {sums[count - 1] / total:.1%} of the mean |g|"
        if share < least:
            return least, f"{carriers}: the least share, {least:g}"
        if share > most:
            return most, f"{carriers}: the most share, {most:g}"
        return share, carriers


def share_of(share: float, blocks: int) -> int:
    """Return the given share of `blocks`, rounded up. Raises ValueError for a share outside [0, 1]."""
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share = {share:g}: a share is between 0 and 1")
    return math.ceil(share * blocks - 1e-9)  # 0.1 * 30 is a little above 3
