"""Gradients on their way off the device. A thread with a stream of its own copies them while backward goes
on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from atoll.core.errors import DeadlineError

_DEADLINE = 600.0  # seconds; even with the slowest disk there is room for a gradient in less


def wait_for(coming: Future[None] | None, what: str) -> None:
    """Wait until `coming` has ended, well or badly. Raises DeadlineError; `what` names it for people."""
    if coming is not None and not coming.done() and not wait([coming], timeout=_DEADLINE).done:
        raise DeadlineError(
            f"waited {_DEADLINE:.0f} s for {what}, which has not come: the disk of memory.disk is too slow "
            "or stands still"
        )


class Leaving:
    """Copies gradients one after another, in the order in which they came.

    Args:
        room: bytes that may be on their way beside the latest gradient; `carry` waits if there are more.

    Attributes:
        waited: seconds that `carry` has waited.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.waited = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="atoll-leaving")
        self._under_way: deque[tuple[Future[None], int]] = deque()
        self._nbytes = 0
        self._lock = threading.Lock()  # backwards may run on several threads
        self._streams: dict[torch.device, torch.Stream] = {}

    def carry(self, job: Callable[[], None], nbytes: int, device: torch.device) -> Future[None]:
        """Begin `job`, which copies `nbytes` off `device`, after the kernels that were queued there
        before."""
        with self._lock:
            while self._under_way and (self._nbytes > self.room or self._under_way[0][0].done()):
                earliest, size = self._under_way[0]
                began = time.perf_counter()
                wait_for(earliest, "room for a gradient on its way off the device")
                self.waited += time.perf_counter() - began
                self._under_way.popleft()
                self._nbytes -= size
            ready = None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()
            coming = self._thread.submit(self._carry, job, device, ready)
            self._under_way.append((coming, nbytes))
            self._nbytes += nbytes
            return coming

    def _carry(self, job: Callable[[], None], device: torch.device, ready: torch.Event | None) -> None:
        if ready is not None:
            stream = self._streams.setdefault(device, torch.Stream(device))
            stream.wait_event(ready)
            torch.accelerator.set_stream(stream)
        job()

    def then(self, job: Callable[[], None]) -> None:
        """Run `job` on the thread after all copies that are on their way; nobody waits for it."""
        self._thread.submit(job)

    def close(self) -> None:
        """End the thread, after the copies that are on their way."""
        self._thread.shutdown()
