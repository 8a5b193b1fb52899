"""The processes of a run without a server, on this machine: a hub that introduces, and a launch for each
node, which is its worker alone, or its workers under torchrun's agent."""

from __future__ import annotations

import math
import subprocess

from atoll.core.config import FIRST_VARIABLE, HUB_VARIABLE, RANK_VARIABLE, Config
from atoll.core.errors import GivenUpError
from atoll.core.events import Failed, Warned
from atoll.core.runclock import record_time
from atoll.launch.launcher import WorkerEnd, launcher_command, read_ends
from atoll.launch.processes import appended, start_process
from atoll.launch.rings import RingLaunch


class PeerLaunch(RingLaunch):
    """As `RingLaunch`, where the nodes themselves say who is left out: nobody is killed by the hub's
    judgement, and a hub that is gone for good is told of, and missed by nobody.

    A worker that was left out, and cannot come back by itself, or has lost a part of its node, ends with a
    status that says so: it is started again as one that was killed, and the others go on meanwhile. One that
    stands still (SIGSTOP) is left alone, for it may go on and come back; it is killed once others have ended,
    as is one that was started again and has not come in by then.

    With `groups.count`, each of so many nodes is a launch of several workers, its devices: where one of them
    dies, the agent stops the others, and the node is lost as one and comes back as one.
    """

    def _devices_of(self, config: Config) -> int:
        return config.run.workers // config.groups.count if config.groups.count else 1

    def _name_of(self, rank: int) -> str:
        return f"node {rank}" if self._devices > 1 else super()._name_of(rank)

    def _worker(self, rank: int) -> subprocess.Popen[bytes]:
        if self._devices == 1:
            return super()._worker(rank)
        node = {
            HUB_VARIABLE: self._address,
            RANK_VARIABLE: str(rank),
            FIRST_VARIABLE: str(self._lead(rank)),
        }
        with appended(self._directory.launcher_log) as log:
            return start_process(
                self._name_of(rank),
                launcher_command(self._devices, self._script),
                env={**self._environment, **node},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                umask=self._umask,
                start_new_session=True,
            )

    def _end_of(self, rank: int, code: int) -> WorkerEnd:
        """Of several workers, that of the one which made the others end."""
        lead = self._lead(rank)
        told = read_ends(self._directory.ends_of(lead)) if self._devices > 1 else []
        return told[0] if told else WorkerEnd(lead, self._workers[rank].pid, code)

    def _is_back(self, rank: int) -> None:
        self.losses.back(self._name_of(rank), self._now())

    def _take_decisions(self) -> None:
        """The hub only introduces: what it decides of the nodes' lives is no word of theirs."""
        for each in self._decisions.take():
            if each.what == "hub":
                self.losses.take(each, self._now())

    def _how_lost(self, rank: int, code: int) -> str:
        """By what the node's workers have said of it in this life: where one gives up, torchrun's agent kills
        another that stands still."""
        workers, began = range(self._lead(rank), self._lead(rank + 1)), self._excused.get(rank, -math.inf)
        failed = [each for worker in workers for each in self._said_by(worker) if isinstance(each, Failed)]
        said = [e for e in failed if e.exit_status == GivenUpError.exit_status and e.time > began]
        if said:
            return f"cannot go on ({min(said, key=lambda each: each.time).message})"
        return super()._how_lost(rank, code) if code < 0 else "was left out by the others"

    def _ends_given_up(self, rank: int) -> bool:
        ended = self._workers[rank].returncode == GivenUpError.exit_status
        if ended:
            self._given_up.add(rank)
        return ended

    def excuses(self, failure: Failed) -> bool:
        """Also of one that was left out, from when it says so: its process ends a moment later. Of a node
        that has lost a device the others' words are an echo, and how its launch ends says what was lost."""
        if self._devices > 1 and failure.echo:
            return True
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
        self._write(0, Warned(time=record_time(), worker=0, message=message))
        return ""
