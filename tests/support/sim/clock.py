"""A clock that stands still until somebody moves it on."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable


class VirtualClock:
    """Seconds since the world began, and what is to happen when.

    What is due at the same moment happens in the order in which it was asked for: so a run is the same each
    time.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._timers: list[
            tuple[float, int]
        ] = []  # a heap; the numbers of cancelled ones lie in it until due
        self._actions: dict[int, Callable[[], None]] = {}
        self._count = 0

    @property
    def now(self) -> float:
        return self._now

    def call_at(self, when: float, action: Callable[[], None]) -> int:
        """Have `action` called when the clock comes to `when`, at once if that is past; returns its
        number."""
        self._count += 1
        heapq.heappush(self._timers, (max(when, self._now), self._count))
        self._actions[self._count] = action
        return self._count

    def cancel(self, number: int) -> None:
        """Forget a call; one that was made, or forgotten, is no error."""
        self._actions.pop(number, None)

    def next_event(self) -> float:
        """When the next call is due; infinity when none is."""
        while self._timers and self._timers[0][1] not in self._actions:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else math.inf

    def advance(self, to: float) -> None:
        """Go on to `to`, and make the calls that are due by then, each at its own time. Raises ValueError for
        a time that is past."""
        if not to >= self._now:
            raise ValueError(f"the clock is at {self._now:.9g} and cannot go back to {to:.9g}")
        while self.next_event() <= to:
            self._now, number = heapq.heappop(self._timers)
            self._actions.pop(number)()
        self._now = to
