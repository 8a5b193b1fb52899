"""The thread that steps the optimizer, beside the one that speaks with nodes and worker.

torch lets go of the interpreter while it computes, so messages are heard during a long step: why a thread,
and not a step cut in pieces between messages, is in docs/notes/peers.md.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")
_CLOSING_SECONDS = 60.0  # for a job that is under way to end


class _Job(Generic[_Result]):
    def __init__(self, work: Callable[[], _Result], done: Callable[[_Result], None]) -> None:
        self._work, self._done = work, done
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        if self._error is not None:
            raise self._error
        self._done(self._result)


class Calculating:
    """One thread for one job at a time; `fileno` can be read from when `collect` has something to do."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._given, self._over = threading.Event(), False
        self._job: _Job[Any] | None = None
        self._thread = threading.Thread(target=self._run, name="atoll-calculating", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._read

    @property
    def busy(self) -> bool:
        """Whether a job is under way, or its end not collected."""
        return self._job is not None

    def start(self, job: _Job[Any]) -> None:
        """Have a job done on the thread; `collect` sees to its end."""
        assert self._job is None
        self._job = job
        self._given.set()

    def collect(self) -> None:
        """See to a job that has ended."""
        try:
            os.read(self._read, 64)
        except BlockingIOError:
            return
        job, self._job = self._job, None
        if job is not None:
            job.finish()

    def close(self) -> None:
        """End the thread, once the job under way is done."""
        self._over = True
        self._given.set()
        self._thread.join(_CLOSING_SECONDS)
        os.close(self._read)
        os.close(self._write)

    def _run(self) -> None:
        while True:
            self._given.wait()
            self._given.clear()
            if self._over:
                return
            assert self._job is not None
            self._job.run()
            os.write(self._write, b"\0")


class Work:
    """What is to be computed, one thing after the other. What the worker asks for goes first, then what the
    decisions of the node's present life say."""

    def __init__(self) -> None:
        self._calculating = Calculating()
        self._asked: deque[_Job[Any]] = deque()
        self._jobs: deque[_Job[Any]] = deque()

    def fileno(self) -> int:
        """What can be read from when `collect` has something to do."""
        return self._calculating.fileno()

    @property
    def is_at_it(self) -> bool:
        """Whether something is computed, or the decisions' next is."""
        return self._calculating.busy or bool(self._jobs)

    def answer(self, work: Callable[[], _Result], done: Callable[[_Result], None]) -> None:
        """Have `work` done for the worker; `collect` calls `done` with what it gives, or raises its error."""
        self._asked.append(_Job(work, done))

    def do(self, work: Callable[[], _Result], done: Callable[[_Result], None]) -> None:
        """As `answer`, for the decisions."""
        self._jobs.append(_Job(work, done))

    def forget(self) -> None:
        """The decisions' life is over."""
        self._jobs.clear()

    def start_next(self) -> bool:
        """Have the next thing computed; False where nothing is."""
        if not self._calculating.busy:
            if not self._asked and not self._jobs:
                return False
            self._calculating.start(self._asked.popleft() if self._asked else self._jobs.popleft())
        return True

    def start(self, work: Callable[[], _Result], done: Callable[[_Result], None]) -> None:
        """Have `work` done at once, where nothing else is (`start_next`)."""
        self._calculating.start(_Job(work, done))

    def collect(self) -> None:
        """See to what has ended."""
        self._calculating.collect()

    def close(self) -> None:
        self._calculating.close()
