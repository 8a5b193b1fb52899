"""Time limits that follow measurements: how long an answer, an iteration or a round may take.

Each is the median plus a multiple of the deviation, never a fixed guess. Source: docs/notes/peers.md.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from atoll.core.units import format_seconds

_WINDOW = 64  # measurements that count
_FEWEST = 4  # measurements for a limit
_MULTIPLE = 8.0  # of the deviation, above the median
_LEAST_DEVIATION = 1 / 8  # of the median: if all are equal, the limit is twice the median


class Limit:
    """A time limit of `seconds` for `what`: the measurements' median plus a multiple of the median
    absolute deviation, between `low` and `high`. Before enough was measured it is `start`, or `high` if
    that is lower."""

    def __init__(self, what: str, low: float, high: float, start: float = math.inf) -> None:
        self.what, self.low, self.high = what, low, high
        self.seconds = min(start, high)
        self._median = self._deviation = 0.0
        self._measured: deque[float] = deque(maxlen=_WINDOW)
        self._sources: deque[int] = deque(maxlen=_WINDOW)

    def note(self, seconds: float, source: int = 0) -> None:
        """Record a duration, measured at node `source`. Record what did not end within the limit with the
        limit itself: then the limit grows if everything becomes slower."""
        self._measured.append(seconds)
        self._sources.append(source)
        if len(self._measured) < _FEWEST:
            return
        self._median = statistics.median(self._measured)
        deviations = [abs(each - self._median) for each in self._measured]
        self._deviation = max(statistics.median(deviations), _LEAST_DEVIATION * self._median)
        self.seconds = min(max(self._wanted(), self.low), self.high)

    def _wanted(self) -> float:
        return self._median + _MULTIPLE * self._deviation

    def reason(self) -> str:
        """Return in words why the limit is what it is."""
        limit, count = format_seconds(self.seconds), len(self._measured)
        if count < _FEWEST:
            allowed = "the most allowed" if self.seconds == self.high else "to begin with"
            return f"{self.what}: {limit}, {allowed}, for only {count} of {_FEWEST} were measured"
        nodes = len(set(self._sources))
        words = (
            f"{self.what}: {limit}; the median of the latest {count}, at {nodes} node{'s' * (nodes != 1)}, "
            f"is {format_seconds(self._median)}, the deviation {format_seconds(self._deviation)}"
        )
        if self._wanted() < self.low:
            return f"{words}, and {format_seconds(self.low)} is the least allowed"
        if self._wanted() > self.high:
            return f"{words}, and {format_seconds(self.high)} is the most allowed"
        return words
