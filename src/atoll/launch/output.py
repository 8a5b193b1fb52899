"""Passes on a worker's output, as far as the reader of the command's output keeps up.

Nothing here waits for the reader. Lines for which the reader has no time stay in the worker's log, and a line
says how much was left out where.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from atoll.core.units import format_bytes
from atoll.launch.tail import Tail
from atoll.observe.progress import Progress

_LOOK_SECONDS = 0.03  # of one look, however much there is to show
_MOST_BEHIND = 64 << 20  # bytes of the log that a slow reader may still get
_MOST_BEHIND_TERMINAL = 1 << 20  # a terminal's reader wants recent lines
_KEPT = 32 << 10  # bytes that are shown after a gap
_PAUSE_SECONDS = 0.02
FINISH_SECONDS = 5.0  # for a reader to take what is left, once all workers have ended


class Output:
    """The output of one worker at a time, by its `log`.

    `warn` is called once, with a line for people, when something is left out for the first time.
    """

    def __init__(self, worker: int, log: Path, progress: Progress, warn: Callable[[str], None]) -> None:
        self._worker, self._log, self._progress, self._warn = worker, log, progress, warn
        self._tail = Tail(log)
        self._has_warned = False

    def look(self, last: bool = False) -> None:
        """Show what is new, for a fraction of a second at most. With `last`, an unfinished line too."""
        until = time.monotonic() + _LOOK_SECONDS
        outlet, shows = self._progress.lines_to, True
        most = _MOST_BEHIND_TERMINAL if outlet.isatty() else _MOST_BEHIND
        while shows and outlet.room and time.monotonic() < until:
            if self._tail.behind > most:
                self._leave_out()
            shows = self._show(last)

    def finish(self, hurried: Callable[[], bool]) -> None:
        """Show what is left, as far as the reader takes it in `FINISH_SECONDS`, and at least its end."""
        until = time.monotonic() + FINISH_SECONDS
        while self._tail.behind and not self._progress.lines_to.gone:
            self.look(last=True)
            if hurried() or time.monotonic() > until:
                break
            if not self._progress.lines_to.room:
                time.sleep(_PAUSE_SECONDS)
        self._leave_out()
        while self._show(last=True):
            pass

    def follow(self, worker: int, log: Path) -> None:
        """Pass on another worker's output from here on."""
        self._leave_out()
        while self._show(last=True):
            pass
        self._worker, self._log, self._tail = worker, log, Tail(log, from_end=True)

    def go_on(self) -> None:
        """Show the output from now on again: the worker was started again."""
        self._tail.go_on()

    def _show(self, last: bool) -> bool:
        """Show one block; False if there is none."""
        behind = self._tail.behind
        lines = self._tail.read(last)
        if lines:
            self._progress.lines(lines)
        return behind > 0

    def _leave_out(self) -> None:
        """Pass over all but the end of what was not shown yet, and say how much."""
        left_out = self._tail.skip(_KEPT)
        if not left_out:
            return
        self._progress.lines([f"atoll: {format_bytes(left_out)} are left out here; see {self._log}"])
        if not self._has_warned and not self._progress.lines_to.gone:
            self._has_warned = True
            self._warn(f"worker {self._worker} prints more than can be shown; all of it is in {self._log}")
