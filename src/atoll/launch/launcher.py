"""torchrun's launcher, as `atoll run` starts it: ends with its parent, and records how workers ended.

Run as a module, with torchrun's own arguments. torchrun starts each worker in a session of its own, sends
SIGTERM to the others when one fails, and hands SIGINT on to all of them. `launch/grace.py` handles SIGTERM.
Where a run has several launches, each a node of strategy `peers`, a launch ends as its failed worker did.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from atoll.core.config import FIRST_VARIABLE
from atoll.core.decoding import from_json
from atoll.core.events import Gone
from atoll.launch.ends import EndWatch
from atoll.launch.grace import Grace
from atoll.launch.processes import GRACE_VARIABLE, PARENT_VARIABLE, die_with_parent
from atoll.observe.lastwords import say
from atoll.observe.logstream import LogStreams
from atoll.observe.rundir import RunDirectory

_TOLD_SECONDS = 1.0  # until the last end is reported


class WorkerEnd(msgspec.Struct, frozen=True):
    """The end of a worker's process: `exit_code` is its status, or minus the signal that killed it."""

    worker: int
    pid: int
    exit_code: int


def write_ends(ends: list[WorkerEnd], path: Path) -> None:
    """Write the workers' ends; on a full disk write nothing."""
    with contextlib.suppress(OSError):
        path.write_bytes(msgspec.json.encode(ends))


def read_ends(path: Path) -> list[WorkerEnd]:
    """Return the ends of the workers that failed, in the order in which the launcher saw them; empty if
    none did."""
    try:
        return from_json(path.read_bytes(), list[WorkerEnd])
    except (OSError, msgspec.DecodeError):  # the launcher was killed before, or while, it wrote
        return []


def launcher_command(workers: int, script: Sequence[str]) -> list[str]:
    """Return the command that launches so many workers on this machine: `script` is its path and its
    arguments."""
    # One machine needs no name service, and a laptop's own name often leads nowhere.
    torchrun = ["--standalone", f"--nproc-per-node={workers}", "--local-addr=127.0.0.1"]
    # After "--" argparse looks for no options: the script's own may abbreviate several of torchrun's.
    module = ["-m", "--", "atoll.launch.worker"]
    return [sys.executable, "-m", "atoll.launch.launcher", *torchrun, *module, *script]


def culprit_of(ends: Sequence[WorkerEnd]) -> WorkerEnd:
    """Return the worker whose end made the others end: one that was killed, else one with the highest
    status. Workers that the agent stopped, or that lost touch, come last."""
    killed = [end for end in ends if end.exit_code < 0 and end.exit_code != -signal.SIGTERM]
    return killed[0] if killed else max(ends, key=lambda end: end.exit_code)


def end_as(end: WorkerEnd) -> None:
    """End this process as a worker did: by its signal, or with its status."""
    if end.exit_code >= 0:
        raise SystemExit(end.exit_code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has left its own
    if end.exit_code != -signal.SIGKILL:
        signal.signal(-end.exit_code, signal.SIG_DFL)
    os.kill(os.getpid(), -end.exit_code)


class Ends:
    """Reports the end of each worker of this launch to `atoll run`. `first` is its first worker."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._watch = EndWatch(self._say)
        self._processes: dict[int, tuple[int, Callable[[], int | None]]] = {}

    def watch(self, rank: int, pid: int, status: Callable[[], int | None]) -> None:
        """Watch a worker; `status` returns its status once this process has reaped it."""
        self._processes[pid] = (self._first + rank, status)
        self._watch.watch(pid)

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` until all ends are reported."""
        self._watch.join(seconds)

    def _say(self, pid: int, code: int | None, at: float) -> None:
        worker, status = self._processes[pid]
        until = time.monotonic() + _TOLD_SECONDS
        while code is None and time.monotonic() < until:  # the agent has just reaped it
            code = status()
            time.sleep(0.01)
        if code is not None:
            say(Gone(time=at, worker=worker, exit_code=code))


def main() -> None:
    # SIGHUP, not SIGKILL: the launcher then stops its workers' sessions with all child processes.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
    die_with_parent(signal.SIGHUP, int(os.environ[PARENT_VARIABLE]))
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for the workers
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    LogStreams().install()
    first = os.environ.get(FIRST_VARIABLE)
    told = Ends(int(first or 0))
    Grace(float(os.environ[GRACE_VARIABLE]), told.watch).install()
    run = RunDirectory.from_environment()
    assert run is not None, "started by atoll.launch.run, which sets the run directory"
    if first is not None:
        run.ends_of(int(first)).unlink(missing_ok=True)  # of a life before
    try:
        try:
            torchrun(sys.argv[1:])
        finally:
            told.join(_TOLD_SECONDS)
    except ChildFailedError as error:
        ends = [WorkerEnd(rank, failure.pid, failure.exitcode) for rank, failure in error.failures.items()]
        with contextlib.suppress(OSError):  # the log's disk is full
            print(error, file=sys.stderr)
        if first is not None:
            its = culprit_of(ends)
            write_ends([WorkerEnd(int(first) + its.worker, its.pid, its.exit_code)], run.ends_of(int(first)))
            end_as(its)
        write_ends(ends, run.ends)
        raise SystemExit(1) from None
    except SignalException as error:
        if first is not None:
            end_as(WorkerEnd(int(first), os.getpid(), -error.sigval))
        raise SystemExit(128 + error.sigval) from None


if __name__ == "__main__":
    main()
