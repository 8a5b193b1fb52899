"""The workers' reports on their speed, which travel with each iteration, and the shares that follow.

At iteration i each worker reports the seconds and samples of its forward and backward, up to the moment at
which its last gradients leave, and how many ticks its loader was given. Worker 0 hears all of it, and may
choose other parts. It reports them at iteration i + 1, and they hold from the first tick that no loader was
given by then. So all workers deal alike, whatever their processors compute, and no message is added. Source:
docs/shares.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from atoll.core.errors import RunError
from atoll.groups.shares import Floats, ShareChange, ShareChooser, Whole
from atoll.train.data.shares import ShareSchedule

# Of each worker: seconds, samples, given ticks, epoch + 1, and its part as worker 0 has chosen it.
_FIELDS = 5
_FEW = 16  # workers whose parts a decision lists one by one


class SharedBatches(Protocol):
    """The sampler that deals by shares (`train/data/sampler.py`: BatchesSampler).

    Attributes:
        given: the ticks given in this deal.
        world: the number of members.
    """

    given: int
    world: int

    @property
    def epoch(self) -> int:
        """The epoch under way."""

    def under_way(self) -> tuple[int, int]:
        """Return the ticks that backwards have used in this iteration, and their samples."""


class ShareReports:
    """This worker's report on each iteration, and what follows from all workers' reports."""

    def __init__(
        self,
        *,
        least: int,
        most: int,
        waited: Callable[[], float],
        decided: Callable[[str, str, str], None],
        name_of: Callable[[int], int],
        settle: Callable[[], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Report nothing until there are batches to `follow`.

        Args:
            least: the least samples of a worker that gets any.
            most: the most samples of a worker; 0: no limit.
            waited: returns the seconds that this worker has waited for others so far.
            decided: records a decision: its subject, the choice, and the reason.
            name_of: returns a worker's name, given its rank.
            settle: returns once the device has finished what was begun on it; None: nothing is.
            clock: the time, in seconds; None: time.perf_counter.
        """
        self._least, self._most, self._waited, self._decided = least, most, waited, decided
        self._name_of, self._settle, self._clock = name_of, settle, clock
        self._sampler: SharedBatches | None = None
        self.forget()

    def follow(self, sampler: SharedBatches, schedule: ShareSchedule, total: int) -> None:
        """Report on the batches of `sampler`, of `total` samples, and change its `schedule`."""
        self._sampler, self._schedule, self._total = sampler, schedule, total
        self.forget()

    def forget(self) -> None:
        """Begin anew: the members have changed, or a checkpoint was loaded."""
        self._chooser: ShareChooser | None = None
        self._choice: ShareChange | None = None  # made by this worker, and not reported yet
        self._mark: float | None = None  # the end of the iteration before
        self._taken: float | None = None  # seconds of this iteration, once its last gradients leave

    def said(self, rank: int, world: int) -> list[float]:
        """Return this worker's report; the sum of all workers' reports has each in its place."""
        report = [0.0] * (_FIELDS * world)
        sampler = self._sampler
        if sampler is None or sampler.world != world:
            return report
        if self._taken is None:
            if self._settle is not None:
                self._settle()
            self._taken = 0.0 if self._mark is None else self._now() - self._mark
        ticks, samples = sampler.under_way()
        if ticks:
            report[rank] = max(0.0, self._taken / ticks)
            report[world + rank] = samples / ticks
        report[2 * world + rank] = float(sampler.given)
        report[3 * world + rank] = float(sampler.epoch + 1)
        if self._choice is not None:
            report[4 * world :] = map(float, self._choice.parts)
        return report

    def heard(self, reports: Sequence[float], rank: int) -> None:
        """Take the sum of all workers' reports on an iteration that is whole.

        Raises RunError if this worker's loader was given batches while the reports were on their way.
        """
        self._mark, self._taken = self._now(), None
        world, sampler = len(reports) // _FIELDS, self._sampler
        if sampler is None or sampler.world != world or world < 2:
            return
        parts = np.array(reports[4 * world :], dtype=np.int64)
        # A worker that has just entered may be in the next epoch's deal already: then the choice is reported
        # once more.
        if parts.any() and len(set(reports[3 * world : 4 * world])) == 1:
            tick = int(max(reports[2 * world : 3 * world]))
            if sampler.given > tick:
                raise RunError(
                    "sync.shares: batches were fetched during backward, by another thread than the training "
                    "loop's, so workers cannot agree on shares; let the loop fetch its batches, or set "
                    "sync.shares to even"
                )
            self._schedule.change(tick, parts)
            self._choice = None
        if rank == 0:
            self._choose(np.array(reports[:world]), np.array(reports[world : 2 * world]))

    def _choose(self, seconds: Floats, samples: Floats) -> None:
        """Choose other parts if that pays; they are reported with the next iteration."""
        if self._chooser is None:
            self._chooser = ShareChooser(len(seconds), self._total, least=self._least, most=self._most)
        change = self._chooser.observe(seconds, samples)
        if change is None:
            return
        self._choice = change
        reason = (
            f"worker {self._name_of(change.slowest)} would finish after {change.before:.3g} s, and now the "
            f"last one does after {change.after:.3g} s"
        )
        if change.waits_for >= 0:
            name = self._name_of(change.waits_for)
            reason += f"; worker {name} takes longer than the others even for {self._least} samples"
        self._decided("shares", f"{_in_words(change.parts)} of {self._total} samples", reason)

    def _now(self) -> float:
        """Return the time, without that spent waiting for others."""
        return (self._clock or time.perf_counter)() - self._waited()


def _in_words(parts: Whole) -> str:
    """Return the parts of a few workers, or the least and the most of many."""
    if len(parts) <= _FEW:
        return ", ".join(map(str, parts.tolist()))
    return f"{parts.min()} to {parts.max()} each"
