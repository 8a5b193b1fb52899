"""Measurements of a worker's iterations: their seconds, the seconds spent waiting for others, and bytes
sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from atoll.train.checkpoint.resume import TrainingState
from atoll.train.group.rounds import Ring
from atoll.train.members.workers import Workers
from atoll.train.sync.service import Service

_NO_PHASES: dict[str, float] = {}  # for an iteration without phases


class Taken(msgspec.Struct, frozen=True, gc=False):
    """The measurements of one iteration, each since the end of the iteration before.

    Attributes:
        at: the time at the end of the iteration, by time.perf_counter, in seconds.
        seconds: the wall time.
        waiting: the seconds of it spent waiting for other workers.
        bytes_sent: the bytes of gradients sent.
        phases: the parts of `waiting`, in seconds: "ring" inside this worker's group and "exchange" between
            groups; empty without a group's ring.
    """

    at: float
    seconds: float
    waiting: float
    bytes_sent: int
    phases: dict[str, float]

    @property
    def computing(self) -> float:
        """The seconds that were not spent waiting."""
        return self.seconds - self.waiting


class Meter:
    """The measurements of one worker.

    `workers` and `state` belong to the session. So do `service` and `group_ring`, if the strategy has them.
    """

    def __init__(
        self,
        device: torch.device,
        workers: Workers,
        state: TrainingState,
        service: Service | None = None,
        group_ring: Ring | None = None,
    ) -> None:
        self._device, self._state, self._group_ring = device, state, group_ring
        self._waits: list[Any] = [workers] if service is None else [service.shards, service.hub]
        if group_ring is not None:
            self._waits.append(group_ring)
        self.begin()

    def begin(self) -> None:
        """Begin the next iteration now."""
        self._began, self._waited, self._sent = time.perf_counter(), self.seconds_waited, self._bytes_sent

    def stepped(self) -> Taken:
        """End an iteration, begin the next one, and return the measurements."""
        began, waited, sent = self._began, self._waited, self._sent
        self.begin()
        waiting = self._waited - waited
        phases = self._phases(waiting) if self._group_ring is not None else _NO_PHASES
        return Taken(self._began, self._began - began, waiting, self._sent - sent, phases)

    @property
    def seconds_waited(self) -> float:
        """Total seconds that this worker has waited for others, for any reason."""
        seconds = 0.0
        for each in self._waits:
            seconds += each.seconds_waited
        for each in self._state.tiers:
            seconds += each.seconds_waited
        return seconds

    @property
    def computing_clock(self) -> Callable[[], float]:
        """A clock, in seconds, that stands still while this worker waits for others.

        On a CPU it is the thread's CPU time: workers of a lab share cores, and time lost to another worker is
        not this one's computing. On a GPU, reading the clock waits for the work begun there.
        """
        return time.thread_time if self._device.type == "cpu" else self._seconds_on_device

    def _seconds_on_device(self) -> float:
        torch.accelerator.synchronize(self._device)
        return time.perf_counter() - self.seconds_waited

    @property
    def _bytes_sent(self) -> int:
        """The bytes of gradients sent so far."""
        sent = 0
        for prepared in self._state.prepared:
            sent += prepared.reducer.bytes_sent
        return sent

    def _phases(self, waiting: float) -> dict[str, float]:
        reducer = self._state.prepared[0].reducer
        exchange, reducer.exchange_seconds = reducer.exchange_seconds, 0.0
        return {"ring": max(0.0, waiting - exchange), "exchange": exchange}
