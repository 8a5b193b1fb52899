"""The processes of a run without a server, on this machine: a hub that introduces, and each node's worker
on its own."""

from __future__ import annotations

import time

from atoll.core.errors import GivenUpError
from atoll.core.events import Failed, Warned
from atoll.launch.rings import RingLaunch


class PeerLaunch(RingLaunch):
    """As `RingLaunch`, where the nodes themselves say who is left out: nobody is killed by the hub's
    judgement, and a hub that is gone for good is told of, and missed by nobody.

    A worker that was left out, and cannot come back by itself, ends with a status that says so: it is started
    again as one that was killed, and the others go on meanwhile. One that stands still (SIGSTOP) is left
    alone, for it may go on and come back; it is killed once others have ended, as is one that was started
    again and has not come in by then.
    """

    given_up = "was left out by the others"

    def _is_back(self, rank: int) -> None:
        self.losses.back(f"worker {rank}", self._now())

    def _take_decisions(self) -> None:
        """The hub only introduces: what it decides of the nodes' lives is no word of theirs."""
        for each in self._decisions.take():
            if each.what == "hub":
                self.losses.take(each, self._now())

    def _ends_given_up(self, rank: int) -> bool:
        ended = self._workers[rank].returncode == GivenUpError.exit_status
        if ended:
            self._given_up.add(rank)
        return ended

    def excuses(self, failure: Failed) -> bool:
        """Also of one that was left out, from when it says so: its process ends a moment later."""
        left_out = failure.exit_status == GivenUpError.exit_status and not failure.traceback
        return left_out or super().excuses(failure)

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
