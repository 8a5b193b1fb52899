"""A link of a given rate between the device's memory and the host's, where both are the same CPU's memory.

    with slow_link(to_device=2e8, to_host=2e8):
        fitted = atoll.memory.fit(model, optimizer, memory=memory)  # measures these rates
        ...

Each direction is a line of its own, as over PCIe, and carries one copy at a time, which takes its bytes over
the rate. The thread that copies sleeps for as long: a link of its own takes nothing from the cores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from atoll.memory import copies


class SlowLine:
    """One direction: copies go one after another, `rate` bytes a second, which may be changed."""

    def __init__(self, copy: Callable[..., None], rate: float) -> None:
        self.rate = rate
        self._copy, self._lock = copy, threading.Lock()
        self._free = 0.0  # when the line has carried what it was given

    def __call__(self, target: Tensor, source: Tensor, **options: bool) -> None:
        with self._lock:
            self._free = until = max(self._free, time.perf_counter()) + source.nbytes / self.rate
        self._copy(target, source, **options)
        while (left := until - time.perf_counter()) > 0:
            time.sleep(left)


@contextmanager
def slow_link(to_device: float, to_host: float) -> Iterator[tuple[SlowLine, SlowLine]]:
    """Within it all of the memory engine's copies go over a link of these rates, in bytes/s; the lines to the
    device and to the host."""
    there = SlowLine(copies.to_device, to_device)
    back = SlowLine(copies.to_host, to_host)
    with (
        mock.patch.object(copies, "to_device", there),
        mock.patch.object(copies, "to_host", back),
        mock.patch.object(copies, "is_needless", return_value=False),
    ):
        yield there, back
