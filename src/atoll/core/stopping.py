"""How a service is told to stop: by SIGTERM or SIGINT."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def told_to_stop(stop: threading.Event | None = None) -> Iterator[threading.Event]:
    """Have SIGTERM and SIGINT set `stop` (or a new event). A thread beside the main one gets no signals."""
    stop = stop or threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(_signum: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
