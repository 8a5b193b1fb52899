"""Deaths of a DataLoader's processes: found as the cause of an error, and kept from interrupting other code.

A DataLoader sets a handler of SIGCHLD that raises a RuntimeError in the main thread, at any place, when one
of its processes dies. If a worker is just reporting its first error, that would hide the error. Or the broken
connection to the process first raises another error in the script, which names neither process nor cause.
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
_MOST_TRIES = 100  # a try fails if a child dies at that very moment


def ignore_child_deaths() -> object:
    """Ignore the deaths of children from now on; returns the former handler.

    On another than the main thread, where no handler runs, it does nothing and returns None.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    for _ in range(_MOST_TRIES):
        with contextlib.suppress(RuntimeError):  # raised by the handler for a child that has just died
            return signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return None


@contextlib.contextmanager
def child_deaths_ignored() -> Iterator[None]:
    """Ignore the deaths of children inside the `with` block."""
    handler = ignore_child_deaths()
    try:
        yield
    finally:
        if callable(handler):
            signal.signal(signal.SIGCHLD, handler)


def death_behind(error: BaseException) -> str:
    """Return torch's line on the death of a DataLoader's process that caused `error`; "" for other causes.

    torch raises that line itself, unless the connection to the process breaks first.
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
    """Return this process's children, including those that have ended and were not waited for."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += [int(each) for each in path.read_text().split()]
    return found


def _status_of(pid: int) -> int:
    """Return the status of a child that has failed, or minus its signal; else 0. Does not reap the child."""
    with contextlib.suppress(OSError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return 0
