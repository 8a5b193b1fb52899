"""Judge how a run ended: the worker that failed first, the message for people, and the exit status."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.core.events import Failed
from atoll.launch.launcher import WorkerEnd
from atoll.launch.processes import signal_name
from atoll.launch.tail import last_lines
from atoll.observe.rundir import RunDirectory

_SHOWN_LINES = 20  # of a log, where there is no traceback to show


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run: its exit status, one `line` on the failure (empty: none), and `detail` to print
    first.
    """

    status: int
    line: str = ""
    detail: str = ""


def judge(
    failures: Sequence[Failed], ends: Sequence[WorkerEnd], launcher_status: int, run: RunDirectory
) -> Verdict:
    """Judge a run whose launcher ended with `launcher_status`.

    One worker's end makes others fail, so the verdict names the first worker that failed by itself.

    Args:
        failures: the errors that workers reported, in any order.
        ends: the processes that ended badly, as the launcher saw them.
        launcher_status: the launcher's exit status.
        run: the run's directory, with the logs.
    """
    own = [failure for failure in failures if not failure.echo]
    if own:
        return _of_failure(min(own, key=lambda failure: failure.time), run)
    if launcher_status == 0:
        return Verdict(0)
    silent = _silent(failures, ends)
    if silent is not None:
        return _of_end(silent, run)
    if failures:
        return _of_failure(min(failures, key=lambda failure: failure.time), run)
    shown = "\n".join(last_lines(run.launcher_log, _SHOWN_LINES))
    said = f"was killed by {signal_name(-launcher_status)}" if launcher_status < 0 else "failed"
    return Verdict(1, f"torchrun's launcher {said}; its log is {run.launcher_log}", shown)


def stopped(signum: int, failures: Sequence[Failed], killed: Sequence[str], run: RunDirectory) -> Verdict:
    """Judge a run that was stopped from outside.

    Args:
        signum: the signal that stopped the run.
        failures: the errors of scripts that have ended since. They count after SIGTERM, which scripts handle.
        killed: the names of workers that were killed when `run.grace` was over.
        run: the run's directory, with the logs.
    """
    by = "Ctrl-C" if signum == signal.SIGINT else signal_name(signum)
    line, detail = f"stopped by {by}", ""
    own = [failure for failure in failures if not failure.echo]
    if signum == signal.SIGTERM and own:
        first = _of_failure(min(own, key=lambda failure: failure.time), run)
        line, detail = f"{line}; {first.line}", first.detail
    if killed:
        verb = "was" if len(killed) == 1 else "were"
        line = f"{line}; {' and '.join(killed)} {verb} killed, for not ending within run.grace"
    return Verdict(128 + signum, line, detail)


def _silent(failures: Sequence[Failed], ends: Sequence[WorkerEnd]) -> WorkerEnd | None:
    """Return the first worker that ended badly without a report, except workers that the launcher stopped."""
    spoke = {failure.worker for failure in failures}
    for place, end in enumerate(ends):
        stopped_by_launcher = place > 0 and end.exit_code == -signal.SIGTERM
        if end.worker not in spoke and not stopped_by_launcher:
            return end
    return None


def _of_failure(failure: Failed, run: RunDirectory) -> Verdict:
    if not failure.traceback:
        return Verdict(failure.exit_status, failure.message)
    line = f"worker {failure.worker} ended with {failure.error}; the workers' logs are in {run.logs}"
    return Verdict(failure.exit_status, line, f"worker {failure.worker}:\n{failure.traceback}")


def _of_end(end: WorkerEnd, run: RunDirectory) -> Verdict:
    log = run.log(end.worker)
    if not log.exists():  # it ended before it could open its own
        log = run.launcher_log
    # What worker 0 wrote is on the screen already.
    shown = "\n".join(last_lines(log, _SHOWN_LINES)) if log != run.log(0) else ""
    if end.exit_code >= 0:
        return Verdict(
            end.exit_code, f"worker {end.worker} ended with status {end.exit_code}; its log is {log}", shown
        )
    name = signal_name(-end.exit_code)
    why = " (the system does that when memory runs out)" if -end.exit_code == signal.SIGKILL else ""
    status = 128 + signal.SIGTERM if -end.exit_code == signal.SIGTERM else 1
    return Verdict(status, f"worker {end.worker} was killed by {name}{why}; its log is {log}", shown)
