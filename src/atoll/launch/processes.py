"""Process trees on Linux: no process outlives its parent, and none is left behind.

`atoll run` starts torchrun's launcher, which starts the workers, each in a session of its own, and a worker
may start processes too (a DataLoader's). Three things keep that tree from leaving anything: `die_with_parent`
in launcher and workers, for a parent that is killed and cannot clean up; `adopt_orphans` in the command, so
that an orphan becomes the command's child and can still be found; and `kill_descendants` at the end.
`Standstill` finds processes that a signal has stopped. On systems other than Linux the first two do nothing,
and `Standstill` finds none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from atoll.core.errors import RunError

PARENT_VARIABLE = "ATOLL_PARENT"  # the process id that a launcher or a worker must be a child of
GRACE_VARIABLE = "ATOLL_GRACE"  # seconds that a launcher gives its workers after SIGTERM: run.grace
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_WAYS_OUT = {
    errno.EAGAIN: "there may be no more processes for this user or in this container (ulimit -u, pids.max)",
    errno.EMFILE: "this process may have no more files open (ulimit -n)",
    errno.ENOMEM: "the machine's memory is used up",
}


def why_no_thread(error: BaseException) -> str:
    """Return a line on the limit of threads if a RuntimeError of Python's means that; else an empty
    string."""
    return f"cannot start a thread: {_WAYS_OUT[errno.EAGAIN]}" if "start new thread" in str(error) else ""


def die_with_parent(signum: int, parent: int) -> None:
    """Have this process sent `signum` when its parent, which is the process `parent`, ends.

    If the parent is gone already, this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died before the call above: no signal will come
        os._exit(128 + signum)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def descendants(root: int) -> list[int]:
    """Return the process ids of the children of `root`, their children, and so on, without zombies."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we were looking
            # The name, in parentheses, may hold anything; the state and the parent come after it.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in ("Z", "X"):
                children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    pending = [root]
    while pending:
        pending += (born := children.get(pending.pop(), []))
        found += born
    return found


def is_stopped(pid: int) -> bool:
    """True if a signal (SIGSTOP) has stopped a process, but not a debugger; False if that is not known."""
    try:
        state: str = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == "T"


class Standstill:
    """Finds processes that have been stopped for longer than `patience` seconds, by frequent looks. A gap
    between two looks counts for at most `most` seconds: the looking process may have stood still too."""

    def __init__(
        self, patience: float, most: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._patience, self._most, self._clock = patience, most, clock
        self._looked = clock()
        self._seconds: dict[int, float] = {}  # process id -> seconds for which it was seen stopped

    def look(self, pids: Collection[int]) -> dict[int, float]:
        """Return those of `pids` that were stopped for too long, with the seconds."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, self._most), now
        stopped = [pid for pid in pids if is_stopped(pid)]
        self._seconds = {pid: self._seconds.get(pid, -passed) + passed for pid in stopped}
        return {pid: seconds for pid, seconds in self._seconds.items() if seconds > self._patience}


def kill_descendants(spare: Collection[int] = (), deadline: float = 5.0) -> list[int]:
    """SIGKILL this process's descendants, but for the processes in `spare`, until none is left.

    Returns those that are left after `deadline` seconds. A process may be born while the list is made, so it
    is made anew until it is empty. Adopted orphans are reaped.
    """
    until = time.monotonic() + deadline
    while left := [pid for pid in descendants(os.getpid()) if pid not in spare]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:  # stuck in the kernel: nobody can kill it
            return left
        time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # a child's child, which its own parent reaps
                os.waitpid(pid, os.WNOHANG)
    return []


def start_process(who: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process with these options of `subprocess.Popen`. Raises RunError if that fails."""
    try:
        return subprocess.Popen(command, **options)
    except OSError as error:
        why = error.strerror or str(error)
        hint = f": {_WAYS_OUT[error.errno]}" if error.errno in _WAYS_OUT else ""
        raise RunError(f"{who} cannot be started: {why}{hint}") from None


def start_logged(
    who: str, command: Sequence[str], log: Path, environment: Mapping[str, str], umask: int = -1
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, which the terminal's Ctrl-C does not reach, and append its
    output to `log`, or drop it if the log cannot be opened. Raises RunError if the start fails."""
    try:
        file: IO[bytes] | int = log.open("ab")
    except OSError:
        file = subprocess.DEVNULL
    try:
        return start_process(
            who,
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            umask=umask,
            start_new_session=True,
        )
    finally:
        if not isinstance(file, int):
            file.close()


def signal_name(signum: int) -> str:
    """Return a signal's name: `SIGKILL` for 9."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
