"""SIGTERM and SIGINT as the request that a service stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType


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
