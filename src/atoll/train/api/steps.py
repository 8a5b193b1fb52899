"""The session's acts around each optimizer step."""

from __future__ import annotations

from atoll.core import events
from atoll.train.api.collectives import Collectives
from atoll.train.api.compose import Runtime
from atoll.train.api.maskcheck import MaskCheck
from atoll.train.api.prepared import Prepared
from atoll.train.api.schedules import Schedules
from atoll.train.api.scriptmodel import ScriptModel
from atoll.train.api.stepset import StepSet
from atoll.train.gradients.backward import BackwardEnd


class Steps:
    """The count of a session's iterations, at the step of its first model, and the records of them."""

    def __init__(
        self,
        runtime: Runtime,
        collectives: Collectives,
        schedules: Schedules,
        masks: MaskCheck,
        backward: BackwardEnd,
        strategy: str,
    ) -> None:
        """Take the session's objects. `strategy` is the name of the run's strategy."""
        self._runtime, self._collectives, self._schedules = runtime, collectives, schedules
        self._masks, self._backward, self._name = masks, backward, strategy
        self._state, self._records, self._meter = runtime.state, runtime.records, runtime.meter
        self._pace, self._member = runtime.pace, runtime.member
        self._told_of_buffers = self._is_checked = False

    def begins(self, of: StepSet, consumed: float) -> None:
        """Step the optimizer's schedules before its step, by samples of others that have become known since
        the last one.

        This is not called if the iteration's own samples are counted already, since this step's parameters do
        not include them yet.
        """
        self._schedules.follow_samples(of.optimizer, consumed)

    def skipped(self, reason: str) -> None:
        """Record that the policy on NaN and infinities has skipped this iteration, or this worker's part of
        it."""
        left_out = ""
        if not self._runtime.strategy.skips_together:
            names = [str(name) for name in self._runtime.contributor()]
            left_out = f"worker{'s' * (len(names) > 1)} {' and '.join(names)}"
        self._records.emit(events.Skipped, iteration=self._state.iteration, reason=reason, left_out=left_out)

    def stepped(self, prepared: Prepared, model: ScriptModel, of: StepSet) -> None:
        """Follow an optimizer step. A step of the first model's first optimizer ends the iteration."""
        state, samples = self._state, of.own_samples
        self._backward.settle()  # for the optimizer's computing
        self._schedules.stepped(prepared, model, of)
        if self._state.copies.buffers == "rank 0" and not self._runtime.strategy.shares_buffers:
            self._look_at_buffers(prepared)
        if of is not state.prepared[0].sets[0]:
            return
        state.iteration += 1
        if self._member is not None and not self._is_checked:  # workers may come late
            self._is_checked = True
            state.check_givable()
        state.resumed_random = None
        if self._masks.is_due:
            with self._collectives.call("the first optimizer.step()"):
                self._masks.look()
        taken = self._meter.stepped()
        if self._pace is not None:
            self._pace.stepped(taken.computing, samples)
        if self._member is not None:
            self._member.stepped(state.iteration, samples, self._pace)
        if self._records.kept:
            runtime = self._runtime
            counted = prepared.reducer.consumed if prepared.counts_all else None
            self._records.stepped(taken, samples, runtime.figures(), runtime.staleness(), counted)

    def _look_at_buffers(self, prepared: Prepared) -> None:
        """Warn once that each worker keeps its own buffers, under a strategy that does not share them."""
        buffers = prepared.buffers
        if self._told_of_buffers or not self._runtime.workers.is_first or self._state.world == 1:
            return
        if buffers.changed or any(buffers.said()):
            self._told_of_buffers = True
            self._records.warn_once(
                "buffers",
                f"training changes the model's buffers ({buffers.changed}, for one), and under strategy "
                f"{self._name!r} each worker has its own until session.barrier() or session.save(), where "
                "all take worker 0's: call session.barrier() before an evaluation",
            )
