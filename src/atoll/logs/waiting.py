"""What waits until a log is kept as far as it was then; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Act = Callable[[], None]


class Waiting:
    """Acts, each for a position of the log, which never falls from one to the next."""

    def __init__(self) -> None:
        self._acts: deque[tuple[int, Act]] = deque()

    def __bool__(self) -> bool:
        return bool(self._acts)

    def add(self, position: int, act: Act) -> None:
        """Let this wait until the log is kept up to a position, and all before it has been done."""
        self._acts.append((position, act))

    def release(self, kept: int | None) -> None:
        """Do what need wait no more: the log is kept up to a position; None: nobody keeps it."""
        while self._acts and (kept is None or self._acts[0][0] <= kept):
            self._acts.popleft()[1]()
