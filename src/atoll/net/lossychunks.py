"""Choice of the blocks of a gradient that must arrive over a lossy link; for workers and sites' shards."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from atoll.ltp.blocks import Importance, Mask, mean_abs


class Priorities:
    """The blocks of each chunk that must arrive: those with the largest mean |g|, smoothed over
    iterations. `high` is their share; None: it is derived."""

    def __init__(self, high: float | None) -> None:
        self._share = high
        self._importance: dict[int, tuple[int, Importance]] = {}  # by chunk: of the run from that element on
        self._sizes: dict[int, float] = {}  # by chunk: of its latest values, the sum of absolute values

    def high(self, chunk: int, values: npt.NDArray[np.floating], block: int, start: int = 0) -> Mask:
        """Return a mask of the blocks, of `block` elements each, that must arrive. `values`, (elements,),
        are a run of the chunk from element `start` on, residuals included, so that blocks lost again and
        again arrive."""
        means = mean_abs(values, block)
        found = self._importance.get(chunk)
        if found is None or found[0] != start or found[1].blocks != len(means):
            found = self._importance[chunk] = start, Importance(len(means))
        importance = found[1]
        importance.update(means)
        self._sizes[chunk] = float(np.nansum(means, where=np.isfinite(means)) * block)
        return importance.high(self._share if self._share is not None else importance.derived_share()[0])

    def size(self, chunk: int) -> float:
        """Return the sum of absolute values last sent of a chunk; 0 if there are none yet."""
        return self._sizes.get(chunk, 0.0)
