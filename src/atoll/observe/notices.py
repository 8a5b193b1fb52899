"""Lines for people about a worker's run, from any thread, from before its journal is open."""

from __future__ import annotations

import contextlib
import os
import sys

from atoll.core.events import EventBus, Warned
from atoll.core.runclock import record_time
from atoll.observe.rundir import DIRECTORY_VARIABLE


class Notices:
    """A worker's. `bus` hands them to its journals, which `atoll run` shows people; standard error shows them
    while there is no journal, and where no `atoll run` watches. `worker` is the worker's name once it is
    known."""

    def __init__(self, worker: int = -1) -> None:
        self.bus, self.worker = EventBus(), worker

    def warn(self, line: str) -> None:
        """Tell people at once."""
        if DIRECTORY_VARIABLE not in os.environ or not self.bus.is_heard:
            print_warning(line)
        self.bus.emit(Warned(time=record_time(), worker=self.worker, message=line))


def print_warning(line: str) -> None:
    """For a script that no `atoll run` watches."""
    with contextlib.suppress(OSError):  # what it says may go to a disk that is full
        print(f"atoll: {line}", file=sys.stderr, flush=True)
