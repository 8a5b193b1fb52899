"""The end of a service: SIGTERM and SIGINT as the request that it stop, and a quick exit."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def told_to_stop(
    stop: threading.Event | None = None,
    signals: Collection[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
) -> Iterator[threading.Event]:
    """Set `stop` (or a new event) on one of `signals` inside the `with` block; yields the event.

    Signals reach the main thread alone: on another thread nothing is installed.
    """
    stop = stop or threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(_signum: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {signum: signal.signal(signum, handle) for signum in signals}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def exit_quickly(status: int) -> NoReturn:
    """End the process with `status`, without Python's last collections of garbage, which take a second with
    torch imported. Exit handlers run."""
    gc.freeze()
    sys.exit(status)
