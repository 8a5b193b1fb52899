"""The processes of a run without a server, on this machine: a hub that introduces, and each node's worker
on its own."""

from __future__ import annotations

import math
import time

from atoll.core.errors import GivenUpError
from atoll.core.events import Started, StepDone, Warned
from atoll.launch.served import ServedLaunch


class PeerLaunch(ServedLaunch):
    """As `ServedLaunch`, where the nodes themselves say who is left out: nobody is killed by the hub's
    judgement, and a hub that is gone for good is told of, and missed by nobody.

    A worker that was left out, and cannot come back by itself, ends with a status that says so: it is started
    again as one that was killed, and the others go on meanwhile. One that stands still (SIGSTOP) is left
    alone, for it may go on and come back; it is killed once others have ended.
    """

    given_up = "was left out by the others"

    def _start(self) -> None:
        self._over: set[int] = set()  # workers that came back when the others had finished
        super()._start()

    def poll(self) -> int | None:
        """As `ServedLaunch.poll`; whoever still wants to come back when the others have finished is ended."""
        for rank in self._too_late():
            self._over.add(rank)
            self._excused[rank] = math.inf
            message = f"worker {rank} was started again, and the others have finished without it"
            self._write(rank, Warned(time=time.time(), worker=rank, message=message))
            self._workers[rank].kill()
        return super().poll()

    def _too_late(self) -> list[int]:
        """Workers that were started again and have not entered the run, where all others have ended."""
        going = [rank for rank, worker in enumerate(self._workers) if worker.poll() is None]
        over = any(worker.returncode == 0 for worker in self._workers)
        if not over or any(not self.life_of(rank) or self._has_entered(rank) for rank in going):
            return []
        return [rank for rank in going if rank not in self._over]

    def _has_entered(self, rank: int) -> bool:
        """Whether a worker takes part again since it was started again."""
        said = list(self._said_by(rank))
        starts = [index for index, event in enumerate(said) if isinstance(event, Started)]
        later = said[starts[self.life_of(rank)] :] if len(starts) > self.life_of(rank) else []
        return any(isinstance(event, StepDone) for event in later)

    def _starts_again(self, rank: int, how: str) -> bool:
        return rank not in self._over and super()._starts_again(rank, how)

    def _see_to_given_up(self, who: str) -> None:
        """The hub only introduces."""

    def _ends_given_up(self, rank: int) -> bool:
        ended = self._workers[rank].returncode == GivenUpError.exit_status
        if ended:
            self._given_up.add(rank)
        return ended

    def _end_standstill(self) -> None:
        if any(worker.poll() is not None for worker in self._workers):
            super()._end_standstill()

    def _lost_service(self) -> str:
        code = self._services["hub"].poll()
        if code is None or "hub" in self._left_halves or self._stopping:
            return ""
        if code < 0 and self._serves_again("hub", f"was killed by signal {-code}"):
            return ""
        if not self._has_begun():  # the nodes do not know one another yet
            return "hub"
        self._left_halves.add("hub")
        often = f", {self._restarts['hub'] + 1} times by now" if self._restarts["hub"] else ""
        message = f"the hub ended with status {code}{often}; the nodes know one another, and go on without it"
        self._write(0, Warned(time=time.time(), worker=0, message=message))
        return ""
