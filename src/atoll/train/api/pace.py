"""The pace of a worker: its computing time per sample, from its own iterations."""

from __future__ import annotations

from collections import deque
from statistics import median

_WINDOW = 16  # iterations over which the pace is the median


class Pace:
    """This worker's computing time per sample, once it has made `probe` iterations.

    The first iteration does not count: memory and caches are cold.
    """

    def __init__(self, probe: int) -> None:
        self._probe = probe
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._left_out = True  # True if the iteration under way does not count

    def leave_out(self) -> None:
        """Do not count the iteration under way: it did more than compute."""
        self._left_out = True

    def stepped(self, seconds: float, samples: float) -> None:
        """Count an iteration, given the `seconds` that it computed and its number of `samples`."""
        left_out, self._left_out = self._left_out, False
        if not left_out and seconds > 0 and samples > 0:
            self._seconds.append(seconds / samples)

    @property
    def seconds(self) -> float:
        """The median seconds per sample of the latest iterations; 0 until enough are made."""
        return median(self._seconds) if len(self._seconds) >= self._probe else 0.0

    @property
    def latest(self) -> float:
        """The seconds per sample of the latest iteration that counts; 0 before one does."""
        return self._seconds[-1] if self._seconds else 0.0
