"""Which blocks of a gradient must arrive over a lossy link. Workers and sites' shards send alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from atoll.ltp.blocks import Importance, Mask, mean_abs


class Priorities:
    """Which blocks must arrive: of each chunk those with the largest mean |g|, smoothed over iterations, as
    large a share of them as `high` says, or as is derived (None)."""

    def __init__(self, high: float | None) -> None:
        self._share = high
        self._importance: dict[int, tuple[int, Importance]] = {}  # by chunk: of the run from that element on
        self._sizes: dict[int, float] = {}  # by chunk: of its latest values, the sum of absolute values

    def high(self, chunk: int, values: npt.NDArray[np.floating], block: int, start: int = 0) -> Mask:
        """By block of `block` elements: of the values that are sent, (elements,), a run of the chunk from
        element `start` on. What is held back is in them, so that what was lost again and again arrives."""
        means = mean_abs(values, block)
        found = self._importance.get(chunk)
        if found is None or found[0] != start or found[1].blocks != len(means):
            found = self._importance[chunk] = start, Importance(len(means))
        importance = found[1]
        importance.update(means)
        self._sizes[chunk] = float(np.nansum(means, where=np.isfinite(means)) * block)
        return importance.high(self._share if self._share is not None else importance.derived_share()[0])

    def size(self, chunk: int) -> float:
        """The sum of absolute values of what was sent of a chunk last; 0 for nothing yet."""
        return self._sizes.get(chunk, 0.0)
