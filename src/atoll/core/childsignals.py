"""Find a DataLoader's processes that have died, and keep their deaths from interrupting other code.

A DataLoader sets a handler of SIGCHLD that raises a RuntimeError in whatever the main thread does when one of
its processes has died. While a worker tells of its first error, that would hide the error. Or the script gets
another error first, from the connection to that process, which names neither.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_LOADER = "torch.utils.data.dataloader"
_DEATH_SECONDS = 1.0  # from a broken connection to the end of the process at its other end
_LOOK_SECONDS = 0.01
_MOST_TRIES = 100  # each loses to a child that dies in just that moment


def ignore_child_deaths() -> object:
    """Have the deaths of children interrupt nothing from now on; returns the handler that was there.

    Does nothing outside the main thread, where no handler runs, and returns None.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    for _ in range(_MOST_TRIES):
        with contextlib.suppress(RuntimeError):  # of a child that has just died
            return signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return None


@contextlib.contextmanager
def child_deaths_ignored() -> Iterator[None]:
    """Do so while entered."""
    handler = ignore_child_deaths()
    try:
        yield
    finally:
        if callable(handler):
            signal.signal(signal.SIGCHLD, handler)


def death_behind(error: BaseException) -> str:
    """The death of a DataLoader's process that made its parent's `error`, in torch's own words; empty where
    the error has another cause.

    torch says so itself, unless the connection to the process breaks first.
    """
    if not isinstance(error, (OSError, EOFError)) or not _is_loaders(error):
        return ""
    until = time.monotonic() + _DEATH_SECONDS
    while True:
        for pid in _children():
            if code := _status_of(pid):
                how = f"is killed by signal: {signal.strsignal(-code) or -code}." if code < 0 else ""
                return f"DataLoader worker (pid {pid}) {how or f'exited unexpectedly with exit code {code}.'}"
        if time.monotonic() > until:
            return ""
        time.sleep(_LOOK_SECONDS)


def _is_loaders(error: BaseException) -> bool:
    """True for an error that has passed through a DataLoader."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == _LOADER:
            return True
        trace = trace.tb_next
    return False


def _children() -> list[int]:
    """The children of this process, with those that have ended and were not waited for."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += [int(each) for each in path.read_text().split()]
    return found


def _status_of(pid: int) -> int:
    """The status of a child that has ended badly, or minus its signal; else 0. It is not reaped."""
    with contextlib.suppress(OSError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return 0
