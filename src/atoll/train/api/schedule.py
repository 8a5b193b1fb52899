"""Learning-rate schedules: one driven by the samples of all workers, and a watch on those that a script
steps.

`SampleSchedule` serves `session.schedule`. `ScheduleWatch` warns if a scheduler that the script steps departs
from the progress of the run.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from atoll.core.errors import UserError
from atoll.core.scriptline import at_script_line, script_line
from atoll.tensors.torch_compat import milestones_of, schedulers_in

WAY_OUT = (
    "drive it by the samples of all workers: session.schedule(scheduler, total=epochs * len(dataset)) in "
    "place of scheduler.step()"
)
_RATES_APART = 0.1  # deviation from the workers' mean rate of iterations that is reported
_RATES_AFTER = 20  # iterations before a rate is compared
_PAST = 1.01  # multiple of a schedule's samples beyond which training past its end is reported


def length_of(scheduler: LRScheduler) -> int | None:
    """Return the number of steps after which a scheduler is at its end, or None without such an end.

    A warm-up (a LinearLR or ConstantLR that does not decline) has no end: training goes on after it.
    """
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max)
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps)
    if isinstance(scheduler, PolynomialLR):
        return int(scheduler.total_iters)
    if isinstance(scheduler, LinearLR) and scheduler.end_factor < scheduler.start_factor:
        return int(scheduler.total_iters)
    if isinstance(scheduler, SequentialLR):
        last = length_of(schedulers_in(scheduler)[-1])
        return None if last is None else int(milestones_of(scheduler)[-1]) + last
    if isinstance(scheduler, ChainedScheduler):
        warm_ups = (LinearLR, ConstantLR)
        lengths = [
            int(each.total_iters) if isinstance(each, warm_ups) else length_of(each)
            for each in schedulers_in(scheduler)
        ]
        known = [each for each in lengths if each is not None]
        only_warm_ups = all(isinstance(each, warm_ups) for each in schedulers_in(scheduler))
        return max(known) if len(known) == len(lengths) and not only_warm_ups else None
    return None


def position_of(scheduler: LRScheduler) -> int:
    """Return the number of steps that a scheduler has made."""
    if isinstance(scheduler, ChainedScheduler):
        return position_of(schedulers_in(scheduler)[-1])
    return int(scheduler.last_epoch)


def _computes_by_function(scheduler: LRScheduler) -> bool:
    """True if the rates come from functions of the script, which no checkpoint holds."""
    parts = schedulers_in(scheduler)
    return isinstance(scheduler, (LambdaLR, MultiplicativeLR)) or any(map(_computes_by_function, parts))


class SampleSchedule:
    """A torch scheduler that is stepped by the samples that all workers have consumed.

    After `consumed` of `total` samples the scheduler has made floor(steps * consumed / total) steps, `steps`
    at most.

    The constructor raises UserError for a scheduler that samples cannot drive. `follow` raises UserError if
    the script has stepped the scheduler too.
    """

    def __init__(self, scheduler: Any, optimizer: Optimizer, total: float, steps: int | None) -> None:
        self.scheduler, self.optimizer, self.total = scheduler, optimizer, total
        self.name = name = type(scheduler).__name__
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UserError(
                "session.schedule: ReduceLROnPlateau follows a loss, not samples; give it the loss of all "
                "workers: scheduler.step(session.reduce(loss))"
            )
        if not isinstance(scheduler, LRScheduler):
            raise UserError(f"session.schedule: a {name} is no scheduler of torch.optim.lr_scheduler")
        if not (isinstance(total, (int, float)) and 0 < total < math.inf):
            raise UserError(
                f"session.schedule(total={total!r}): the samples of the whole run, such as "
                "epochs * len(dataset)"
            )
        own = length_of(scheduler)
        if steps is None and own is None:
            raise UserError(
                f"session.schedule: {name} has no length of its own; say how many steps it makes in the "
                "whole run: steps=epochs * len(loader), or steps=epochs for one step an epoch"
            )
        self.steps: int = own if steps is None else steps  # type: ignore[assignment]  # checked above
        if type(self.steps) is not int or self.steps < 1:
            raise UserError(f"session.schedule(steps={steps!r}): a number of steps is at least 1")
        self._made = position_of(scheduler)

    @property
    def per_step(self) -> float:
        """The number of samples for one step of the schedule."""
        return self.total / self.steps

    @property
    def samples_made(self) -> float:
        """The number of samples for the steps made so far."""
        return self._made * self.per_step

    def describe(self) -> str:
        return f"{self.name}: {self.steps} steps over {self.total:g} samples"

    def follow(self, consumed: float) -> None:
        """Make the steps that are due once all workers have consumed `consumed` samples."""
        if position_of(self.scheduler) != self._made:
            raise UserError(
                f"{at_script_line(f'the script has stepped its {self.name}', script_line())}, which "
                "session.schedule steps after each optimizer.step(): leave out scheduler.step()"
            )
        due = min(self.steps, math.floor(self.steps * Fraction(consumed) / Fraction(self.total)))
        for _ in range(self._made, due):
            self.scheduler.step()
        self._made = max(self._made, due)

    def passed(self, consumed: float) -> str:
        """Return a warning if training goes on past the schedule's end, else an empty string.

        A small excess is tolerated, because the last batches of an epoch may be filled up.
        """
        if consumed <= _PAST * self.total:
            return ""
        return (
            f"session.schedule: all workers have consumed {consumed:g} samples, and total={self.total:g}: "
            f"the {self.name} stays at its end; total is the samples of the whole run, such as "
            "epochs * len(dataset)"
        )

    def state(self) -> dict[str, int]:
        """Return this schedule's own part of a checkpoint. The scheduler's state is saved beside it."""
        return {"steps": self.steps}

    def loaded(self, state: Mapping[str, int] | None) -> None:
        """Continue from a scheduler whose state was just loaded.

        `state` is the schedule's part of the checkpoint, or None in a checkpoint without one. The loaded
        scheduler counts in steps of the saved run, whose number of workers may have been another. A scheduler
        whose rates come from functions of the script counts in steps of this run.
        """
        self._made = position_of(self.scheduler)
        if state is not None and not _computes_by_function(self.scheduler):
            self.steps = state["steps"]


class ScheduleWatch:
    """A watch on the schedulers that a script itself steps on one optimizer, with warnings of mistakes.

    Args:
        optimizer: the watched optimizer.
        worker: this worker's name.
        find: returns the schedulers that drive an optimizer; slow.
        tell: `tell(subject, line)` prints a line once for each subject.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        worker: str,
        find: Callable[[Optimizer], list[Any]],
        tell: Callable[[str, str], None],
    ) -> None:
        self._optimizer, self._worker, self._find, self._tell = optimizer, worker, find, tell
        self._watched: list[weakref.ref[LRScheduler]] | None = None
        self._driven: list[Any] = []  # schedulers that samples drive
        self._workers = 0  # the number of workers when the watch began
        self._own, self._own_steps, self._base = 0.0, 0, -1.0

    def has_schedulers(self) -> bool:
        """True if a scheduler may drive the optimizer, by its param groups."""
        if self._watched is not None:
            return True
        return any("initial_lr" in group for group in self._optimizer.param_groups)

    def stepped(self, samples: float, consumed: float, workers: int, together: bool) -> None:
        """Check the schedulers after an optimizer step.

        Args:
            samples: this worker's samples in the step.
            consumed: the samples of all workers so far.
            workers: the number of workers.
            together: True if all workers make each step together, False if each goes at its own pace.
        """
        if self._watched is None:
            if not self.has_schedulers():
                return
            found = self._find(self._optimizer)
            self._watched = [
                weakref.ref(each)
                for each in found
                if not isinstance(each, ReduceLROnPlateau)
                and not any(each is driven for driven in self._driven)
            ]
            self._workers = workers
        there = [each for each in (held() for held in self._watched) if each is not None]
        if not there:
            return
        for scheduler in there:
            self._see_end(scheduler)
        if together:
            self._see_workers(there[0], workers)
        else:
            self._see_rate(there[0], samples, consumed, workers)

    def let_go(self, scheduler: Any) -> None:
        """Stop watching a scheduler that `session.schedule` drives."""
        self._driven.append(scheduler)
        if self._watched is not None:
            self._watched = [each for each in self._watched if each() is not scheduler]

    def _see_end(self, scheduler: LRScheduler) -> None:
        length = length_of(scheduler)
        if length is not None and position_of(scheduler) > length:
            name = type(scheduler).__name__
            where = at_script_line(f"worker {self._worker}: {name}", script_line())
            self._tell(
                f"the end of {name}",
                f"{where} is past its end, step {length}: its rates mean nothing from here on; {WAY_OUT}",
            )

    def _see_workers(self, scheduler: LRScheduler, workers: int) -> None:
        if workers != self._workers:
            name = type(scheduler).__name__
            self._tell(
                "a schedule by iterations among other workers",
                f"{name} counts iterations, and the run has {workers} workers now, not {self._workers}: an "
                f"epoch takes more or fewer of them than it was made for; {WAY_OUT}",
            )
            self._workers = workers

    def _see_rate(self, scheduler: LRScheduler, samples: float, consumed: float, workers: int) -> None:
        if self._base < 0:
            self._base = consumed
            return
        self._own, self._own_steps = self._own + samples, self._own_steps + 1
        others = consumed - self._base
        if self._own_steps < _RATES_AFTER or others <= 0:
            return
        share = self._own * workers / others
        if abs(share - 1) > _RATES_APART:
            name = type(scheduler).__name__
            self._tell(
                "a schedule by iterations at another rate",
                f"worker {self._worker} makes {share:.2f} times the iterations of the workers' mean, and "
                f"{name} counts its own: workers step with rates of different times; {WAY_OUT}",
            )
