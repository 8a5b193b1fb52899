"""The queue of chunks that are still to be stepped, and the waits for them. Source: docs/memory.md, "The
step"."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from atoll.core.errors import DeadlineError, RunError

Settings: TypeAlias = dict[str, Any]  # a param group without its parameters
DEADLINE = 600.0  # seconds; even with the slowest disk a chunk's step ends in less


@dataclass(frozen=True)
class StepCall:
    """One call of an optimizer's `step()`.

    Attributes:
        own: the optimizer's attributes.
        groups: its param groups.
        present: for each chunk with gradients, which slots have one.
        make: steps one of these chunks, on the stepping thread.
    """

    own: dict[str, Any]
    groups: list[Settings]
    present: dict[int, tuple[bool, ...]]
    make: Callable[[StepCall, int], None]


class StepQueue:
    """Chunks on their way from `optimizer.step()` to the thread that steps them (`modelsteps.ModelSteps`).

    A chunk is in the queue for one call at most: an optimizer waits for its own chunks before it adds them
    again. Chunks of several optimizers may be there at once.

    Whoever needs a chunk's values, gradient or state waits here. If no step is made here the queue stays
    empty. All methods may be called from several threads.

    Args:
        words: what errors call the chunks, by id.

    Attributes:
        condition: guards the queue.
        waited: seconds that callers have waited, in all.
    """

    def __init__(self, words: Mapping[int, str] | None = None) -> None:
        """`words` name the chunks in errors, by id."""
        self.condition = threading.Condition()
        self.waited = 0.0
        self.is_closed = False
        self._words = words or {}
        self._waiting: deque[int] = deque()  # chunks that are still to be stepped, in order
        self._calls: dict[int, StepCall] = {}  # the call that steps each of them
        self._under_way: int | None = None  # the chunk that is being stepped
        self._failed: dict[int, BaseException] = {}  # the error of each chunk's step
        self._untold: BaseException | None = None  # the first error, until one was raised to the script
        self._tells = True

    def wait_stepped(self, chunk: int, seconds: float = DEADLINE, *, tells: bool = True) -> None:
        """Wait until no step of this chunk is under way or still to come. The chunk becomes the next to be
        stepped.

        Args:
            tells: True if an error raised here reaches the script.

        Raises DeadlineError after `seconds`, the error of this chunk's step, and RunError if the steps have
        ended before it.
        """
        with self.condition:
            if chunk in self._calls:
                self._waiting.remove(chunk)
                self._waiting.appendleft(chunk)
            what = self._words.get(chunk, "a parameter")
            self._wait(lambda: not self._has(chunk), seconds, what)
            if chunk in self._failed and self._tells:
                if not tells:
                    raise self._failed[chunk]
                self._tell(self._failed[chunk])

    def wait_all(self, seconds: float = DEADLINE, chunks: Collection[int] | None = None) -> None:
        """Wait until no chunk's step is under way or still to come; with `chunks`, none of these.

        Raises DeadlineError after `seconds`, the error of any step, and RunError if the steps have ended
        before.
        """
        self.wait_over(seconds, chunks)
        for error in self._failed.values():
            self._tell(error)

    def wait_over(self, seconds: float = DEADLINE, chunks: Collection[int] | None = None) -> None:
        """Wait as `wait_all` does, without raising a step's error."""

        def over() -> bool:
            left = [*self._waiting] if self._under_way is None else [*self._waiting, self._under_way]
            return not left if chunks is None else not any(chunk in chunks for chunk in left)

        with self.condition:
            self._wait(over, seconds, "all parameters")

    def _has(self, chunk: int) -> bool:
        return chunk == self._under_way or chunk in self._calls

    def tell_untold(self) -> None:
        """Raise the first error of a step, if none was raised to the script."""
        if self._untold is not None:
            self._tell(self._untold)

    def _tell(self, error: BaseException) -> None:
        self._untold = None
        raise error

    def _wait(self, over: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for `over`. The caller holds the condition.

        Raises DeadlineError after `seconds`, and RunError if no thread steps any more.
        """
        began = time.monotonic()
        while not over():
            if self.is_closed and self._under_way is None:
                raise RunError(
                    f"the optimizer's step of {what} will not come: the session ended before it; use the "
                    "model inside the session"
                )
            left = began + seconds - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"waited {seconds:.0f} s for the optimizer's step of {what}, which has not ended: the "
                    "disk of memory.disk is too slow or stands still"
                )
            self.condition.wait(left)
        self.waited += time.monotonic() - began

    # For the thread that steps the chunks

    def begin(self, step: StepCall, chunks: Iterable[int]) -> None:
        """Add these chunks to the queue, in this order, for `step`."""
        with self.condition:
            for chunk in chunks:
                self._waiting.append(chunk)
                self._calls[chunk] = step
            self.condition.notify_all()

    @property
    def has_next(self) -> bool:
        """True if a chunk waits to be stepped."""
        return bool(self._waiting)

    def take(self) -> tuple[StepCall, int]:
        """Return the next chunk and its step; `ended` follows. The caller holds the condition."""
        chunk = self._under_way = self._waiting.popleft()
        return self._calls.pop(chunk), chunk

    def ended(self, chunk: int, error: BaseException | None) -> None:
        """Note that the step of the chunk that was taken has ended, with `error` if it failed."""
        with self.condition:
            if error is not None:
                self._failed[chunk] = error
                self._untold = self._untold or error
            self._under_way = None
            self.condition.notify_all()

    def close(self) -> None:
        """Let no further step begin."""
        with self.condition:
            self.is_closed = True
            self.condition.notify_all()

    def end_telling(self) -> None:
        """From here on, let waits for a chunk ignore the error of its failed step."""
        self._tells = False
