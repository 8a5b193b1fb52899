"""The wait, at the end of the process, for threads inside C++ code: a thread that is still there causes a
SIGABRT."""

from __future__ import annotations

import atexit
import threading
import time

_LAST_SECONDS = 10.0  # for all of these threads to end, before the process ends

_ending: list[threading.Thread] = []


@atexit.register
def _wait_for_ends() -> None:
    until = time.monotonic() + _LAST_SECONDS
    for thread in _ending:
        thread.join(max(0.0, until - time.monotonic()))


def see_off(thread: threading.Thread, seconds: float) -> None:
    """Wait up to `seconds` for a thread that uses c10d to end, and longer at the end of the process."""
    thread.join(seconds)
    _ending[:] = [each for each in (*_ending, thread) if each.is_alive()]
