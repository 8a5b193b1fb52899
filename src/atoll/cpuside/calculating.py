"""The thread that steps the optimizer, beside the thread that exchanges messages.

torch releases the interpreter lock while it computes, so messages are handled during a long step.
docs/notes/peers.md says why the step is not cut in pieces between messages instead.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")
_CLOSING_SECONDS = 60.0  # wait for the running job at the end


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
    """A thread that runs one job at a time; `fileno` becomes readable when the job has ended."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._given, self._closing = threading.Event(), False
        self._job: _Job[Any] | None = None
        self._thread = threading.Thread(target=self._run, name="atoll-calculating", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._read

    @property
    def busy(self) -> bool:
        """True from `start` until `collect` has finished the job."""
        return self._job is not None

    def start(self, job: _Job[Any]) -> None:
        """Run a job on the thread; `collect` finishes it."""
        assert self._job is None
        self._job = job
        self._given.set()

    def collect(self) -> None:
        """Finish the job if it has ended: call its `done`, or raise its error."""
        try:
            os.read(self._read, 64)
        except BlockingIOError:
            return
        job, self._job = self._job, None
        if job is not None:
            job.finish()

    def close(self) -> None:
        """End the thread after the running job."""
        self._closing = True
        self._given.set()
        self._thread.join(_CLOSING_SECONDS)
        os.close(self._read)
        os.close(self._write)

    def _run(self) -> None:
        while True:
            self._given.wait()
            self._given.clear()
            if self._closing:
                return
            assert self._job is not None
            self._job.run()
            os.write(self._write, b"\0")


class Work:
    """A queue of jobs for the thread: the worker's requests first, then jobs of the node's decisions."""

    def __init__(self) -> None:
        self._calculating = Calculating()
        self._asked: deque[_Job[Any]] = deque()
        self._jobs: deque[_Job[Any]] = deque()

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `collect` has something to do."""
        return self._calculating.fileno()

    @property
    def is_at_it(self) -> bool:
        """True if a job runs or a job of the decisions waits."""
        return self._calculating.busy or bool(self._jobs)

    def answer(self, work: Callable[[], _Result], done: Callable[[_Result], None]) -> None:
        """Queue a request of the worker; `collect` calls `done` with the result of `work`, or raises its
        error."""
        self._asked.append(_Job(work, done))

    def do(self, work: Callable[[], _Result], done: Callable[[_Result], None]) -> None:
        """Queue a job of the decisions; `collect` calls `done` with the result, or raises the error."""
        self._jobs.append(_Job(work, done))

    def forget(self) -> None:
        """Drop the decisions' jobs, since their life is over."""
        self._jobs.clear()

    def start_next(self) -> bool:
        """Start the next job if none runs; returns False if there is none at all."""
        if not self._calculating.busy:
            if not self._asked and not self._jobs:
                return False
            self._calculating.start(self._asked.popleft() if self._asked else self._jobs.popleft())
        return True

    def start(self, work: Callable[[], _Result], done: Callable[[_Result], None]) -> None:
        """Run a job at once; call only after `start_next` has returned False."""
        self._calculating.start(_Job(work, done))

    def collect(self) -> None:
        """Finish the job that has ended, if any."""
        self._calculating.collect()

    def close(self) -> None:
        self._calculating.close()
