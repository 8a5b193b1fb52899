"""Workers whose scripts are short lists of steps and calls, and the log that they wait at: for any order of
what they say, with deaths, and with the log started again from its state.

The log's two parts are as shard 0 keeps them: one for meetings, one for iterations.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from atoll.core.stands import call, end, gradients
from atoll.store.entries import StepWithMean
from atoll.store.log import CommitLog
from atoll.store.outcomes import Outcome
from atoll.store.waits import deadlock
from atoll.wire import messages
from atoll.wire.messages import WorkerStand

STEP = "step"  # any other word of a script is a call, by its name
Script: TypeAlias = Sequence[str]


@dataclass
class Scripted:
    """A worker: where its script is, and what it waits for ("" while it computes)."""

    worker: int
    incarnation: int
    script: list[str]
    at: int = 0  # words of the script that are over
    waits: str = ""  # "meeting", "mean", "step", "ending"
    steps: int = 0
    meetings: int = 0
    over: bool = False
    met: list[str] = field(default_factory=list)  # what each of its meetings was for, at the others


class ScriptWorld:
    """`scripts[w]` is worker w's. Under `bsp` a session ends with a meeting of all, else each by itself."""

    def __init__(self, rng: random.Random, consistency: str, scripts: Sequence[Script]) -> None:
        self.rng, self.consistency = rng, consistency
        count = len(scripts)
        self.meetings = CommitLog.begin("asp", 0, count, 1)
        self.log = CommitLog.begin(consistency, 1, count, 1)
        self.workers = {w: Scripted(w, w + 1, list(script)) for w, script in enumerate(scripts)}
        self.fences: list[tuple[int, int]] = []
        self.mismatch = ""
        self._handle = 0
        for each in self.workers.values():
            for log in (self.meetings, self.log):
                self._take(log.handle_join(each.worker, each.incarnation))

    def run(self, deaths: int = 0, restarts: int = 0) -> None:
        """Until nobody can go on, or the run has ended for all."""
        events = 0
        while not self.mismatch:
            free = [each for each in self.workers.values() if not each.waits and not each.over]
            if not free and not self.fences:
                return
            events += 1
            assert events < 10_000
            if deaths and len(self.workers) > 1 and self.rng.random() < 0.05:
                deaths -= 1
                self._kill(self.rng.choice(list(self.workers)))
            elif restarts and self.rng.random() < 0.1:
                restarts -= 1
                self._restart()
            elif self.fences and (not free or self.rng.random() < 0.2):
                worker, incarnation = self.fences.pop()
                for log in (self.meetings, self.log):
                    self._take(log.handle_fence(worker, incarnation))
            elif free:
                self._go_on(self.rng.choice(free))
            self._look()

    @property
    def stuck(self) -> list[Scripted]:
        """Who waits in vain."""
        return [each for each in self.workers.values() if not each.over]

    # -- scripts ------------------------------------------------------------------------------------------

    def _go_on(self, each: Scripted) -> None:
        word = each.script[each.at] if each.at < len(each.script) else "end"
        if word == STEP and self.consistency != "bsp":
            self._commit(each, None)
            each.at, each.steps = each.at + 1, each.steps + 1
        elif word == STEP:
            each.waits = "mean"
            self._say(each)
        elif word == "end" and self.consistency != "bsp":
            each.waits = "ending"
            self._say(each)
        else:
            each.waits = "meeting"
            self._say(each)

    def _say(self, each: Scripted) -> None:
        """What it waits for an answer to; said again where the log was started again."""
        if each.waits == "mean":
            self._commit(each, self._stand(each))
        elif each.waits == "step":
            said = messages.Step(
                incarnation=each.incarnation,
                iteration=each.steps,
                scale=1.0,
                hyperparameters=[],
                stand=self._stand(each),
            )
            self._take(self.log.handle_step(each.worker, said))
        elif each.waits == "ending":
            self._take(self.meetings.handle_end(each.worker, each.incarnation, self._stand(each)))
        elif each.waits == "meeting":
            self._handle += 1
            stand = self._stand(each)
            what = str(stand.stand)
            self._take(
                self.meetings.handle_meet(
                    each.worker, each.incarnation, each.meetings, what, self._handle, stand
                )
            )

    def _commit(self, each: Scripted, stand: WorkerStand | None) -> None:
        self._take(self.log.handle_staged(0, each.worker, each.incarnation, each.steps))
        commit = messages.Commit(incarnation=each.incarnation, iteration=each.steps, weight=1.0, stand=stand)
        self._take(self.log.handle_commit(each.worker, commit))

    def _stand(self, each: Scripted) -> WorkerStand:
        if each.waits in ("mean", "step"):
            stand = gradients(each.steps, "train.py:1")
        elif each.at == len(each.script):
            stand = end(each.steps if self.consistency == "bsp" else 0, "train.py:9")
        else:
            stand = call(f"session.{each.script[each.at]}", "train.py:5")
        return WorkerStand(each.worker, stand)

    # -- what comes of it ---------------------------------------------------------------------------------

    def _take(self, outcome: Outcome) -> None:
        assert not outcome.refused, outcome.refused
        if outcome.mismatch:
            self.mismatch = self.mismatch or outcome.mismatch
        for reply in outcome.replies:
            each = self._live(reply.worker, reply.incarnation)
            if each is None:
                continue
            if isinstance(reply.message, messages.Ended):
                each.over, each.waits = True, ""
                self.fences.append((each.worker, each.incarnation))
            elif each.waits == "mean" and reply.message.iteration == each.steps:  # type: ignore[union-attr]
                each.waits = "step"
                self._say(each)
        for entry in outcome.entries:
            if isinstance(entry, StepWithMean):
                for each in self.workers.values():
                    if each.waits == "step" and each.steps == entry.iteration:
                        each.waits, each.at, each.steps = "", each.at + 1, each.steps + 1
        for meeting in outcome.met:
            for worker, incarnation in zip(meeting.workers, meeting.incarnations, strict=True):
                each = self._live(worker, incarnation)
                if each is not None and each.waits == "meeting" and each.meetings == meeting.number:
                    each.met.append(meeting.what)
                    each.waits, each.meetings = "", each.meetings + 1
                    each.over = each.at == len(each.script)
                    each.at += 1

    def _live(self, worker: int, incarnation: int) -> Scripted | None:
        each = self.workers.get(worker)
        return each if each is not None and each.incarnation == incarnation else None

    def _look(self) -> None:
        meeting = self.meetings.meeting_waits()
        if meeting.stands and not self.mismatch:
            self.mismatch = deadlock(meeting, self.log.iteration_waits())

    def _kill(self, worker: int) -> None:
        gone = self.workers.pop(worker)
        if not gone.over:
            self.fences.append((worker, gone.incarnation))

    def _restart(self) -> None:
        """From a journal's state; who waits says again what has no answer."""
        for name in ("meetings", "log"):
            kept = msgspec.msgpack.encode(getattr(self, name))
            setattr(self, name, (msgspec.msgpack.decode(kept, type=CommitLog)))
        for each in list(self.workers.values()):
            self._say(each)
