"""The chunks that are still to be stepped, and the waits for them. Source: docs/memory.md, "The step"."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from atoll.core.errors import DeadlineError, RunError

Settings: TypeAlias = dict[str, Any]  # a param group without its parameters
DEADLINE = 600.0  # seconds: the slowest disk has stepped a chunk by then


@dataclass
class Step:
    """One call of `optimizer.step()`: what the call found, and the chunks that are still to be stepped."""

    own: dict[str, Any]  # the optimizer's attributes
    groups: list[Settings]
    present: dict[int, tuple[bool, ...]]  # by chunk, which slots have a gradient
    waiting: deque[int] = field(default_factory=deque)
    under_way: int | None = None

    def has(self, chunk: int) -> bool:
        return chunk == self.under_way or chunk in self.waiting

    @property
    def is_over(self) -> bool:
        return self.under_way is None and not self.waiting


class StepQueue:
    """Chunks on their way from `optimizer.step()` to the thread that steps them (`stepping.Stepper`).

    Whoever needs a chunk's values, gradient or state waits here. Where nothing is stepped it stays empty.
    `condition` guards it. All methods may be called from several threads.
    """

    def __init__(self, words: Mapping[int, str] | None = None) -> None:
        """`words` name the chunks, by id, for people."""
        self.condition = threading.Condition()
        self.waited = 0.0  # seconds, in all
        self.is_closed = False
        self._words = words or {}
        self._step: Step | None = None  # the latest
        self._failed: dict[int, BaseException] = {}  # by chunk, what its step has raised
        self._untold: BaseException | None = None  # the first of them, until the script has been told
        self._tells = True

    def wait_stepped(self, chunk: int, seconds: float = DEADLINE, *, tells: bool = True) -> None:
        """Wait until no step of this chunk is under way or still to come; the next to be stepped is it.

        Raises DeadlineError after `seconds`, whatever this chunk's step has raised (where it `tells`, the
        script has been told by that), and RunError where the steps have ended before it came.
        """
        with self.condition:
            step = self._step
            if step is not None and chunk in step.waiting:
                step.waiting.remove(chunk)
                step.waiting.appendleft(chunk)
            what = self._words.get(chunk, "a parameter")
            self._wait(lambda: step is None or not step.has(chunk), seconds, what)
            if chunk in self._failed and self._tells:
                if not tells:
                    raise self._failed[chunk]
                self._tell(self._failed[chunk])

    def wait_all(self, seconds: float = DEADLINE) -> None:
        """Wait until no chunk's step is under way or still to come. Raises as `wait_stepped`."""
        self.wait_over(seconds)
        for error in self._failed.values():
            self._tell(error)

    def wait_over(self, seconds: float = DEADLINE) -> None:
        """Wait as `wait_all`, whatever a step has raised."""
        with self.condition:
            step = self._step
            self._wait(lambda: step is None or step.is_over, seconds, "all parameters")

    def tell_untold(self) -> None:
        """Raise what a step has raised and the script was not told of."""
        if self._untold is not None:
            self._tell(self._untold)

    def _tell(self, error: BaseException) -> None:
        self._untold = None
        raise error

    def _wait(self, over: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for `over`, holding the condition. Raises RunError where nobody steps any more."""
        began = time.monotonic()
        while not over():
            if self.is_closed and (self._step is None or self._step.under_way is None):
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

    # Whoever steps the chunks

    def begin(self, step: Step, chunks: Iterable[int]) -> None:
        """Let these chunks be stepped, in this order."""
        with self.condition:
            step.waiting.extend(chunks)
            self._step = step
            self.condition.notify_all()

    @property
    def has_next(self) -> bool:
        """True if a chunk waits to be stepped."""
        return self._step is not None and bool(self._step.waiting)

    def take(self) -> tuple[Step, int]:
        """The next chunk, and the step that it is of. `ended` follows. Holds the condition."""
        step = self._step
        assert step is not None
        step.under_way = step.waiting.popleft()
        return step, step.under_way

    def ended(self, step: Step, error: BaseException | None) -> None:
        """The step of the chunk that was taken has ended, by this error if there is one."""
        with self.condition:
            if error is not None and step.under_way is not None:
                self._failed[step.under_way] = error
                self._untold = self._untold or error
            step.under_way = None
            self.condition.notify_all()

    def close(self) -> None:
        """Begin no step any more."""
        with self.condition:
            self.is_closed = True
            self.condition.notify_all()

    def end_telling(self) -> None:
        """From here on, chunks whose step has failed are read as the step has left them."""
        self._tells = False
