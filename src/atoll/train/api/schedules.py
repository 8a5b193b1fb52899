"""A session's schedules: those driven by samples, and a watch on those that the script steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from atoll.core.errors import UserError
from atoll.train.api.prepared import Prepared
from atoll.train.api.records import Records
from atoll.train.api.schedule import SampleSchedule, ScheduleWatch
from atoll.train.api.schedulers import schedulers_of
from atoll.train.api.scriptmodel import ScriptModel
from atoll.train.api.stepset import StepSet
from atoll.train.checkpoint.resume import TrainingState
from atoll.train.members.workers import Workers


class Schedules:
    """The schedulers of `Session.schedule`, stepped as samples are consumed, and watches on the others.

    `together` is True if all workers make each step together. `counted()` returns the number of workers whose
    steps are compared.
    """

    def __init__(
        self,
        state: TrainingState,
        records: Records,
        workers: Workers,
        *,
        together: bool,
        counted: Callable[[], int],
    ) -> None:
        self._state, self._records, self._workers = state, records, workers
        self._together, self._counted = together, counted
        self._name = str(workers.place.name)
        self._watches: dict[int, ScheduleWatch] = {}  # by the optimizer's id

    def watch(self, prepared: Prepared) -> None:
        """Watch the schedulers that the script steps on this model's optimizers.

        Optimizers that step no model any more are watched no longer.
        """
        present = {id(optimizer) for each in self._state.prepared for optimizer in each.optimizers}
        self._watches = {key: watch for key, watch in self._watches.items() if key in present}
        for optimizer in prepared.optimizers:
            if id(optimizer) not in self._watches:  # the model may be prepared again
                watch = ScheduleWatch(optimizer, self._name, schedulers_of, self._records.warn_once)
                self._watches[id(optimizer)] = watch
                for schedule in self._state.schedules:
                    if schedule.optimizer is optimizer:
                        watch.let_go(schedule.scheduler)

    def add(self, scheduler: Any, total: float, steps: int | None) -> None:
        """Drive a scheduler by samples, as documented at `Session.schedule`."""
        optimizer = getattr(scheduler, "optimizer", None)
        model = next(
            (each for each in self._state.models if any(own is optimizer for own in each.optimizers)), None
        )
        if model is None or optimizer is None:
            raise UserError(
                "session.schedule: this scheduler's optimizer is not prepared; call "
                "session.prepare(model, optimizer) first"
            )
        if any(each.scheduler is scheduler for each in self._state.schedules):
            raise UserError(f"session.schedule: this {type(scheduler).__name__} is driven already")
        schedule = SampleSchedule(scheduler, optimizer, total, steps)
        self._state.schedules.append(schedule)
        self._watches[id(optimizer)].let_go(scheduler)
        model.samples.unknown = schedule.per_step / max(1, self._state.world)
        self._records.decided("schedule", schedule.describe(), "session.schedule: by all workers' samples")

    def follow_samples(self, optimizer: Optimizer, consumed: float) -> None:
        """Make the steps of this optimizer's schedules that are due by the samples consumed."""
        for schedule in self._state.schedules:
            if schedule.optimizer is optimizer:
                schedule.follow(consumed)

    def stepped(self, prepared: Prepared, model: ScriptModel, of: StepSet) -> None:
        """Make the steps due after this step of one of a model's optimizers, and warn of schedulers off
        course."""
        optimizer, consumed = of.optimizer, prepared.reducer.consumed
        if self._state.schedules:
            self.follow_samples(optimizer, consumed)
        watch = self._watches[id(optimizer)]
        if watch.has_schedulers():
            of_all = consumed if len(prepared.models) == 1 else 0.0  # else samples of other models are in it
            watch.stepped(of.own_samples, of_all, self._counted(), self._together)
        if self._state.schedules:
            self._see_ends(optimizer, consumed)
        if model.samples.guessed:
            samples = model.samples.unknown
            self._records.warn_once(
                "samples of a schedule",
                f"worker {self._name}: how many samples its batches have is not known, and "
                f"session.schedule counts {samples:g} for each: call the model itself with the batch first",
            )

    def _see_ends(self, optimizer: Optimizer, consumed: float) -> None:
        """Warn if training goes on past the end of a schedule that samples drive."""
        for schedule in self._state.schedules if self._workers.is_first else ():
            passed = schedule.passed(consumed) if schedule.optimizer is optimizer else ""
            if passed:
                self._records.warn_once("the end of a schedule by samples", passed)

    def follow(self) -> None:
        """Make the steps that are due by other workers' samples, if the script makes no optimizer step.

        Samples of an iteration whose optimizer step is yet to come do not count.
        """
        for prepared in self._state.prepared:
            if not (prepared.reducer.sums_samples and prepared.reducer.phase.reduced):
                for optimizer in prepared.optimizers:
                    self.follow_samples(optimizer, prepared.reducer.consumed)
