"""The pace of a worker: its computing time per sample, from its own iterations."""

from __future__ import annotations

from collections import deque
from statistics import median

_WINDOW = 16  # iterations over which the pace is the median


class Pace:
    """For how long this worker computes a sample, once it has made `probe` iterations; the first one, in
    which memory and caches are cold, does not count."""

    def __init__(self, probe: int) -> None:
        self._probe = probe
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._left_out = True  # the iteration under way

    def leave_out(self) -> None:
        """The iteration under way was more than that."""
        self._left_out = True

    def stepped(self, seconds: float, samples: float) -> None:
        """An iteration is over, which computed for so long on so many samples."""
        left_out, self._left_out = self._left_out, False
        if not left_out and seconds > 0 and samples > 0:
            self._seconds.append(seconds / samples)

    @property
    def seconds(self) -> float:
        """The median of the latest iterations; 0 until enough are made."""
        return median(self._seconds) if len(self._seconds) >= self._probe else 0.0

    @property
    def latest(self) -> float:
        """Of the latest iteration that counts alone; 0 before one does."""
        return self._seconds[-1] if self._seconds else 0.0
