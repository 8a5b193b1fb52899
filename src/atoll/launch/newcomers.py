"""Workers that were started again, until they make a step."""

from __future__ import annotations

import time

from atoll.core.events import StepDone
from atoll.launch.workers import WorkerLaunches
from atoll.observe.journal import JournalReader
from atoll.observe.rundir import RunDirectory

_LOOK_SECONDS = 0.5  # between looks at their journals


class Newcomers:
    """Launches of workers that were started again and have made no step since, by rank."""

    def __init__(self, directory: RunDirectory, workers: WorkerLaunches) -> None:
        self._directory, self._workers = directory, workers
        self._entering: dict[int, JournalReader] = {}
        self._returning: set[int] = set()  # those whose first step was not reported
        self._next_look = 0.0  # monotonic
        self.late: set[int] = set()  # those that the others have finished without

    def enter(self, rank: int) -> None:
        """Watch the journal of a launch's first worker from here on."""
        reader = self._entering[rank] = JournalReader(self._directory.journal(self._workers.lead(rank)))
        for _ in reader.read():  # from its last life
            pass
        self._returning.add(rank)

    def has_stepped(self, rank: int) -> bool:
        """False if a launch was started again and has made no step since."""
        reader = self._entering.get(rank)
        if reader is not None and any(isinstance(event, StepDone) for event in reader.read()):
            del self._entering[rank]
        return rank not in self._entering

    def take(self) -> tuple[list[int], list[int]]:
        """Return the launches that train now, and those that have not come in when the others have
        finished; only new ones, and at most every half second."""
        now = time.monotonic()
        if not self._returning or now < self._next_look:
            return [], []
        self._next_look = now + _LOOK_SECONDS
        back = [rank for rank in self._returning if self.has_stepped(rank)]
        self._returning.difference_update(back)
        codes = self._workers.codes()
        going = {rank for rank, code in enumerate(codes) if code is None}
        if 0 not in codes or going - self._returning:
            return back, []
        late = sorted(going - self.late)
        self.late.update(late)
        return back, late
