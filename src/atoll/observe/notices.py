"""Lines for people about a worker's run, from any thread, from before its journal is open."""

from __future__ import annotations

import contextlib
import os
import sys

from atoll.core.events import EventBus, Warned
from atoll.core.runclock import record_time
from atoll.observe.rundir import DIRECTORY_VARIABLE


class Notices:
    """A worker's notices.

    `bus` hands them to the worker's journals, from which `atoll run` shows them. Standard error shows them
    while there is no journal, and where no `atoll run` watches.

    Attributes:
        worker: the worker's name; -1 until it is known.
    """

    def __init__(self, worker: int = -1) -> None:
        self.bus, self.worker = EventBus(), worker

    def warn(self, line: str) -> None:
        """Tell people at once."""
        if DIRECTORY_VARIABLE not in os.environ or not self.bus.is_heard:
            print_warning(line)
        self.bus.emit(Warned(time=record_time(), worker=self.worker, message=line))


def print_warning(line: str) -> None:
    """Print a line on standard error, unless that is a file on a disk that is full."""
    with contextlib.suppress(OSError):
        print(f"atoll: {line}", file=sys.stderr, flush=True)
