"""What a worker's iterations take: seconds, those of them that it waited for others, and bytes sent."""

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

_NO_PHASES: dict[str, float] = {}  # of an iteration that has none


class Taken(msgspec.Struct, frozen=True, gc=False):
    """What one iteration took, all of it since the end of the one before: wall time until `at` (by
    perf_counter), and as part of that `waiting` for other workers, whose own parts are `phases`: "ring"
    inside this worker's group and "exchange" between groups, where these are two things. All in seconds."""

    at: float
    seconds: float
    waiting: float
    bytes_sent: int
    phases: dict[str, float]

    @property
    def computing(self) -> float:
        """The seconds that were no waiting."""
        return self.seconds - self.waiting


class Meter:
    """One worker's: `workers` and `state` are its session's, `service` and `group_ring` the same where the
    strategy has such."""

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
        """The next iteration begins now."""
        self._began, self._waited, self._sent = time.perf_counter(), self.seconds_waited, self._bytes_sent

    def stepped(self) -> Taken:
        """An iteration is over, and the next one begins."""
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

        On a CPU it is the thread's own: workers of a lab share cores, and what one loses to another is no
        computing of its own. On a GPU, what was begun there has ended when it is read.
        """
        return time.thread_time if self._device.type == "cpu" else self._seconds_on_device

    def _seconds_on_device(self) -> float:
        torch.accelerator.synchronize(self._device)
        return time.perf_counter() - self.seconds_waited

    @property
    def _bytes_sent(self) -> int:
        """Of gradients, in all."""
        sent = 0
        for prepared in self._state.prepared:
            sent += prepared.reducer.bytes_sent
        return sent

    def _phases(self, waiting: float) -> dict[str, float]:
        reducer = self._state.prepared[0].reducer
        exchange, reducer.exchange_seconds = reducer.exchange_seconds, 0.0
        return {"ring": max(0.0, waiting - exchange), "exchange": exchange}
