"""Actions that wait until a log is durable up to a position; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Act = Callable[[], None]


class Waiting:
    """Queue of actions, each with a position of the log; positions never decrease."""

    def __init__(self) -> None:
        self._acts: deque[tuple[int, Act]] = deque()

    def __bool__(self) -> bool:
        return bool(self._acts)

    def add(self, position: int, act: Act) -> None:
        """Queue `act` until the log is durable up to `position` and all earlier actions have run."""
        self._acts.append((position, act))

    def release(self, kept: int | None) -> None:
        """Run all actions up to position `kept`, or all if None: nothing is kept any more."""
        while self._acts and (kept is None or self._acts[0][0] <= kept):
            self._acts.popleft()[1]()
