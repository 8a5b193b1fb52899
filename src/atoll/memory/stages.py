"""Stages: places in host memory where values of other members arrive. Source: docs/memory.md, "Members"."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.core.errors import DeadlineError
from atoll.memory.arena import Arena, Block
from atoll.moves.search import STAGES

_DEADLINE = 600.0  # seconds until a stage must be free


class Stage:
    """A place in host memory.

    Attributes:
        holds: the values that lie there: (chunk, count of sync points, count of writes); None for none.
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        self.holds: tuple[int, int, int] | None = None


class Stages:
    """All stages, in `nbytes` of host memory; for 0 there are none."""

    def __init__(self, nbytes: int) -> None:
        self._free: list[Stage] = []
        self._condition = threading.Condition()
        self.arena: Arena | None = None
        if nbytes:
            self.arena = Arena(nbytes, nbytes // STAGES, "cpu", "host", poison=False)
            self.arena.lock_pages()
            self._free = [Stage(self.arena.take()) for _ in range(STAGES)]

    @contextmanager
    def one(self, words: str, wanted: tuple[int, int, int] | None = None) -> Iterator[Stage]:
        """Take a stage for the length of the block. See `take`."""
        stage = self.take(words, wanted)
        try:
            yield stage
        finally:
            self.give(stage)

    def take(self, words: str, wanted: tuple[int, int, int] | None = None) -> Stage:
        """Take a free stage; if one holds the `wanted` values, that one.

        Args:
            words: the values, for people.

        Raises DeadlineError after ten minutes.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: self._free, _DEADLINE):
                raise DeadlineError(
                    f"waited {_DEADLINE:.0f} s for room in host memory in which the values of "
                    f"{words} are to arrive: another worker that sends values stands still"
                )
            stage = self._free[0]
            if wanted is not None:
                stage = next((each for each in self._free if each.holds == wanted), stage)
            self._free.remove(stage)
            return stage

    def give(self, stage: Stage) -> None:
        """Give a stage back."""
        with self._condition:
            self._free.append(stage)
            self._condition.notify_all()
