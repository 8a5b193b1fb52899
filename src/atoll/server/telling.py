"""Reports of a shard, to its records and to people."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from atoll.core.events import AnyEvent, Decided, Warned
from atoll.core.runclock import record_time
from atoll.observe.lastwords import say


class Teller:
    """Reports in the name of the shard `name`. `emit` takes core's events, of worker -1."""

    def __init__(self, name: str, emit: Callable[[AnyEvent], None]) -> None:
        self.name, self._emit = name, emit

    def decide(self, what: str, choice: str, reason: str) -> None:
        """Record a decision."""
        self._emit(Decided(time=record_time(), worker=-1, what=what, choice=choice, reason=reason))

    def warn(self, line: str) -> None:
        """Record a warning, which does not stop the run."""
        self._emit(Warned(time=record_time(), worker=-1, message=line))

    def people(self, line: str) -> None:
        """Report in the records, in this process's log and to `atoll run`, even if the disk is full."""
        self.warn(line)
        say(Warned(time=record_time(), worker=-1, message=line))
        with contextlib.suppress(OSError):
            print(f"atoll: warning: {line}", file=sys.stderr, flush=True)
