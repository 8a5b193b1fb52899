"""The processes of a run in which workers form a ring by a hub, on this machine."""

from __future__ import annotations

import math
import time

from atoll.core.events import StepDone
from atoll.launch.served import ServedLaunch
from atoll.observe.journal import JournalReader

_LOOK_SECONDS = 0.5  # between looks whether those who were started again train


class RingLaunch(ServedLaunch):
    """As `ServedLaunch`, where nothing but the workers themselves holds the model: one that was started
    again, and has not come in when the others have finished, would wait for them, and is ended."""

    def _start(self) -> None:
        self._returning: dict[int, JournalReader] = {}  # those started again, until they train
        self._over: set[int] = set()  # and those who came too late
        self._look_at = 0.0  # monotonic
        super()._start()

    def poll(self) -> int | None:
        """As `ServedLaunch.poll`."""
        now = time.monotonic()
        if self._returning and now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            self._see_who_is_back()
        return super().poll()

    def _see_who_is_back(self) -> None:
        for rank, reader in list(self._returning.items()):
            if any(isinstance(event, StepDone) for event in reader.read()):
                del self._returning[rank]
                self._is_back(rank)
        going = {rank for rank, worker in enumerate(self._workers) if worker.poll() is None}
        if not any(worker.returncode == 0 for worker in self._workers) or going - self._returning.keys():
            return
        for rank in going - self._over:
            self._over.add(rank)
            self._excused[rank] = math.inf
            message = f"{self._name_of(rank)} was started again, and the others have finished without it"
            self._warn(rank, message)
            self._workers[rank].kill()

    def _is_back(self, rank: int) -> None:
        """A worker that was started again trains."""

    def _starts_again(self, rank: int, how: str) -> bool:
        if rank in self._over or not super()._starts_again(rank, how):
            return False
        reader = self._returning[rank] = JournalReader(self._directory.journal(self._lead(rank)))
        for _ in reader.read():  # what its last life has left
            pass
        return True
