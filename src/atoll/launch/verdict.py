"""Judge how a run ended: what failed first, what followed from it, and the exit status."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.core.events import Failed
from atoll.core.texts import one_line
from atoll.core.units import format_seconds
from atoll.launch.causes import LAUNCHER, Causes, Life
from atoll.launch.processes import signal_name
from atoll.launch.program import Program
from atoll.launch.tail import closing_word, last_lines, last_word
from atoll.launch.worker import END_OF_OUTPUT
from atoll.observe.rundir import RunDirectory

_SHOWN_LINES = 20  # of a log, where there is no traceback to show
_SHOWN_CHARACTERS = 300  # of an error's text in the closing line
_NAMED = 4  # workers, in the line of what followed


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run: its exit status, one `line` on the first cause (empty: none), `detail` to print
    before it, and `followed`, one line on what came after it (empty: nothing).
    """

    status: int
    line: str = ""
    detail: str = ""
    followed: str = ""


@dataclass(frozen=True)
class Judge:
    """Judges the run in `run`, which began at `began` (seconds since the epoch), by its `causes`.

    `excuses` is true for a worker's error that the run survived. `program` is the workers' program; None:
    nothing is said of a run in which no worker has joined.
    """

    causes: Causes
    run: RunDirectory
    began: float
    excuses: Callable[[Failed], bool] = lambda _failure: False
    program: Program | None = None
    workers: int = 1

    def judge(self, launcher_status: int, has_stalled: bool = False) -> Verdict:
        """Judge a run whose launcher ended with `launcher_status`.

        `has_stalled`: the command itself ended the run, for its workers would have waited in vain.
        """
        first = self.causes.first(self.excuses)
        is_own = first is not None and first.failed is not None and not first.failed.echo
        is_own = is_own and not first.survived and not self.excuses(first.failed)  # type: ignore[union-attr, arg-type]
        if launcher_status == 0 and not has_stalled and not is_own:
            return Verdict(0, self._unjoined())
        if first is not None:
            return self._of(first)
        shown = "\n".join(last_lines(self.run.launcher_log, _SHOWN_LINES))
        said = f"was killed by {signal_name(-launcher_status)}" if launcher_status < 0 else "failed"
        why = last_word(self.run.launcher_log)
        said += f": {one_line(why, _SHOWN_CHARACTERS)}" if why else ""
        return Verdict(1, f"torchrun's launcher {said}{_in_log(self.run.launcher_log)}", shown)

    def before(self, time: float) -> Verdict:
        """Judge a run that was stopped from outside at `time`: what had failed by then, if anything had."""
        earlier = Causes()
        for event in self.causes.events():
            if event.time < time:
                earlier.take(event)
        judge = Judge(earlier, self.run, self.began, self.excuses)
        first = earlier.first(self.excuses)
        if first is None or first.failed is None or first.failed.echo or self.excuses(first.failed):
            return Verdict(0)
        return judge._of(first)

    def stopped(self, signum: int, at: float, killed: Sequence[str]) -> Verdict:
        """Judge a run that was stopped from outside.

        Args:
            signum: the signal that stopped the run.
            at: when it came. Errors of scripts since then count after SIGTERM, which scripts handle.
            killed: the names of workers that were killed when `run.grace` was over.
        """
        before = self.before(at)
        if before.line:
            return before
        by = "Ctrl-C" if signum == signal.SIGINT else signal_name(signum)
        line, detail = f"stopped by {by}", ""
        own = [
            life
            for life in self.causes.lives()
            if life.failed is not None and not life.failed.echo and not self.excuses(life.failed)
        ]
        if signum == signal.SIGTERM and own:
            first = self._of(own[0])
            line, detail = f"{line}; {first.line}", first.detail
        if killed:
            verb = "was" if len(killed) == 1 else "were"
            line = f"{line}; {' and '.join(killed)} {verb} killed, for not ending within run.grace"
        return Verdict(128 + signum, line, detail)

    def left_early(self) -> dict[int, str]:
        """Return the workers that ended with status 0 while the run went on, each with a line on its end."""
        lives = [life for life in self.causes.lives() if life.is_early and life.gone is not None]
        begun = [life for life in lives if life.started is not None and not life.survived]
        return {life.worker: self._of_end(life, "").line for life in begun}

    def _unjoined(self) -> str:
        """Return a line for a run that has ended well and of which Atoll knows nothing; else nothing."""
        if self.program is None or self.program.asks_for_help or self.causes.has_joined():
            return ""
        said = "no worker called atoll.join"
        if self.workers == 1:
            return f"{said}: {self.program.title} ran once, without Atoll"
        ran = f"{self.workers} workers ran {self.program.title}"
        return f"{said}: {ran}, and Atoll synchronised nothing between them"

    # One life

    def _of(self, first: Life) -> Verdict:
        followed = self._followed(first)
        if first.failed is None:
            return self._of_end(first, followed)
        failure = first.failed
        text = one_line(failure.message, 4 * _SHOWN_CHARACTERS)
        if first.worker == LAUNCHER:
            text = one_line(self.causes.service_word(text), 4 * _SHOWN_CHARACTERS) or text
        if not failure.traceback:
            return Verdict(failure.exit_status, self._said(first, failure, text), "", followed)
        how = f"{failure.error}{f' at {failure.line}' if failure.line else ''}"
        text = one_line(failure.message, _SHOWN_CHARACTERS)
        if (child := self.causes.child_end(failure)) is not None:
            said = f": {one_line(child.message, _SHOWN_CHARACTERS)}" if child.message else ""
            at = f" (sys.exit{_at(child.line)})" if child.line else ""
            text = f"a process of its DataLoader ended with status {child.status}{at}{said}"
        line = f"worker {first.worker} ended with {how}, {self._when(first)}{f': {text}' if text else ''}"
        detail = f"worker {first.worker}:\n{failure.traceback}"
        return Verdict(failure.exit_status, f"{line}{_in_log(self._log(first))}", detail, followed)

    def _said(self, first: Life, failure: Failed, text: str) -> str:
        """Return an error of Atoll's in one line, with its worker and time unless all workers report it."""
        lives = [life for life in self.causes.lives() if life.failed is not None]
        has_begun = any(life.started is not None for life in self.causes.lives())
        same = all(life.failed is not None and life.failed.message == failure.message for life in lives)
        if "worker " in text or first.worker == LAUNCHER or (same and (len(lives) > 1 or not has_begun)):
            return text
        return f"worker {first.worker}, {self._when(first)}: {text}"

    def _of_end(self, first: Life, followed: str) -> Verdict:
        """Judge a process that ended without an error of Python's."""
        who, when, status = f"worker {first.worker}", self._when(first), first.status or 0
        log = self._log(first)
        # What worker 0 wrote is on the screen already.
        shown = [line for line in last_lines(log, _SHOWN_LINES) if line != END_OF_OUTPUT]
        detail = "\n".join(shown) if log != self.run.log(0) else ""
        ended = first.ended
        if status < 0:
            name = signal_name(-status)
            why = " (the system does that when memory runs out)" if status == -signal.SIGKILL else ""
            has_begun = any(life.started is not None for life in self.causes.lives())
            before = "" if has_begun else " before the run began"
            line = f"{who} was killed by {name}{before}{why}, {when}"
            code = 128 + signal.SIGTERM if status == -signal.SIGTERM else 1
        elif ended is not None and ended.call == "KeyboardInterrupt":
            line = f"{who} was interrupted (KeyboardInterrupt{_at(ended.line)}), {when}"
            code = status or 1
        else:
            call = f" (sys.exit{_at(ended.line)})" if ended is not None and ended.call else ""
            line = f"{who} ended with status {status}{call}, {when}{self._early(first)}"
            code = status or 1
        # A worker that has executed another program, or become another user, can report only in its log.
        said = ended.message if ended is not None else closing_word(log) if status == 1 else ""
        if said:
            line += f": {one_line(said, _SHOWN_CHARACTERS)}"
        return Verdict(code, f"{line}{_in_log(log)}", detail, followed)

    def _early(self, first: Life) -> str:
        """Return which part of the run was not over when a worker ended with status 0."""
        if not first.is_early:
            return ""
        if first.joining is None and first.started is None:
            return ", without calling atoll.join"
        return ", before its session was over"

    def _when(self, life: Life) -> str:
        seconds = max(0.0, life.time - self.began)
        if not math.isfinite(seconds):
            return "at the end"
        return f"after {f'{seconds:.1f} s' if seconds < 60 else format_seconds(seconds)}"

    def _log(self, life: Life) -> Path:
        log = self.run.log(life.worker)
        return log if log.exists() else self.run.launcher_log  # it ended before it could open its own

    # The others

    def _followed(self, first: Life) -> str:
        """Return in one line what followed from the first cause; empty if nothing did."""
        by_end: dict[str, list[int]] = {}
        last = {
            life.worker: life for life in self.causes.lives() if life.worker not in (first.worker, LAUNCHER)
        }
        for worker, life in sorted(last.items()):
            if life.survived or (life.status == 0 and life.finished is not None):
                continue
            if _says_the_same(life, first):
                continue
            by_end.setdefault(_consequence(life), []).append(worker)
        ends = [
            end if end.startswith("node ") else f"{_named(workers)} {_plural(end, len(workers))}"
            for end, workers in by_end.items()
        ]
        return f"then {'; '.join(ends)}" if ends else ""


def _in_log(log: Path) -> str:
    """Return where to read more; empty if the log is gone with its directory."""
    return f"; its log is {log}" if log.exists() else ""


def _says_the_same(life: Life, first: Life) -> bool:
    own, other = life.failed, first.failed
    return own is not None and other is not None and (own.error, own.message) == (other.error, other.message)


def _consequence(life: Life) -> str:
    if life.failed is not None and life.failed.echo:
        return "lost touch with it"
    said = one_line(life.failed.message, 4 * _SHOWN_CHARACTERS) if life.failed is not None else ""
    if life.failed is not None and not life.failed.traceback and said.startswith(f"worker {life.worker} "):
        return said.removeprefix(f"worker {life.worker} ")
    if life.failed is not None and not life.failed.traceback and said.startswith("node "):
        return said
    if life.failed is not None:
        return f"ended with {life.failed.error}{_at(life.failed.line)}"
    if life.status in (None, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT):
        return "was stopped"
    if life.status is not None and life.status < 0:
        return f"was killed by {signal_name(-life.status)}"
    return f"ended with status {life.status}"


def _plural(end: str, workers: int) -> str:
    return f"were {end.removeprefix('was ')}" if workers > 1 and end.startswith("was ") else end


def _at(line: str) -> str:
    return f" at {line}" if line else ""


def _named(workers: Sequence[int]) -> str:
    names = [f"worker {worker}" for worker in workers[:_NAMED]]
    if len(workers) > _NAMED:
        names.append(f"{len(workers) - _NAMED} more")
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
