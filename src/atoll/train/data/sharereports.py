"""The workers' reports on their speed, which travel with each iteration, and the shares that follow.

At iteration i each worker reports the seconds and samples of its forward and backward, up to the moment at
which its last gradients leave, and how many ticks its loader was given. Worker 0 hears all of it, and may
choose other parts. It reports them at iteration i + 1, and they hold from the first tick that no loader was
given by then. So all workers deal alike, whatever their processors compute, and no message is added: on a
ring reports lie in the workers' agreement, at shards in commits and in the log's answer. Source:
docs/shares.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from atoll.core.errors import RunError
from atoll.groups.shares import Floats, ShareChange, ShareChooser, Whole
from atoll.train.data.shares import ShareSchedule

_OWN = 5  # values of a worker's report: seconds, samples, given ticks, epoch + 1, cap
_FIELDS = _OWN + 1  # on a ring also each worker's part, as worker 0 has chosen it
_FEW = 16  # workers that a decision lists one by one


class SharedBatches(Protocol):
    """The batches that follow shares: those that a sampler deals (`train/data/sampler.py`: BatchesSampler),
    or that a group leases (`train/data/groupshares.py`: GroupShares).

    Attributes:
        given: the ticks given in this deal.
    """

    given: int

    @property
    def world(self) -> int:
        """The number of members."""

    @property
    def epoch(self) -> int:
        """The epoch under way."""

    def under_way(self) -> tuple[int, float]:
        """Return the ticks that backwards have used in this iteration, and their samples."""


class ShareReports:
    """This worker's report on each iteration, and what follows from all workers' reports."""

    def __init__(
        self,
        *,
        by_speed: bool,
        waited: Callable[[], float],
        chosen: Callable[[str, str, ShareChange], None],
        name_of: Callable[[int], int],
        settle: Callable[[], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Report nothing until there are batches to `follow`.

        Args:
            by_speed: True if parts follow speeds; else only the caps that workers find.
            waited: returns the seconds that this worker has waited for others so far.
            chosen: records a choice: in words, the reason, and what changes.
            name_of: returns a worker's name, given its rank.
            settle: returns once the device has finished what was begun on it; None: nothing is.
            clock: the time, in seconds; None: time.perf_counter.
        """
        self._by_speed, self._waited, self._chosen = by_speed, waited, chosen
        self._name_of, self._settle, self._clock = name_of, settle, clock
        self._sampler: SharedBatches | None = None
        self._cap = 0  # the most samples that this worker's memory holds, once it has found out
        self._is_odd = False  # True in an iteration whose seconds tell nothing of the worker's speed
        self.forget()

    def follow(self, sampler: SharedBatches, schedule: ShareSchedule, total: int) -> None:
        """Report on the batches of `sampler`, of `total` samples, and change its `schedule`."""
        self._sampler, self._schedule, self._total = sampler, schedule, total
        self.forget()

    def lower(self, cap: int) -> None:
        """Report from now on that this worker's memory holds `cap` samples. It has computed some again."""
        self._cap, self._is_odd = cap, True

    def forget(self) -> None:
        """Begin anew: the members have changed, or a checkpoint was loaded."""
        self._chooser: ShareChooser | None = None
        self._choice: ShareChange | None = None  # made by this worker, and not reported yet
        self._mark: float | None = None  # the end of the iteration before
        self._taken: float | None = None  # seconds of this iteration, once its last gradients leave

    def report(self) -> list[float]:
        """Return this worker's report: its seconds, samples, given ticks, epoch + 1 and cap, then all
        workers' parts if it has chosen others. Empty: there are no batches to report on."""
        sampler = self._sampler
        if sampler is None:
            return []
        if self._taken is None:
            if self._settle is not None:
                self._settle()
            self._taken = 0.0 if self._mark is None else self._now() - self._mark
        ticks, samples = sampler.under_way()
        known = bool(ticks) and not self._is_odd
        own = [max(0.0, self._taken / ticks), samples / ticks] if known else [0.0, 0.0]
        chosen = [] if self._choice is None else map(float, self._choice.parts)
        return [*own, float(sampler.given), float(sampler.epoch + 1), float(self._cap), *chosen]

    def said(self, rank: int, world: int) -> list[float]:
        """Return this worker's report for a ring; the sum of all workers' reports has each in its place."""
        vector = [0.0] * (_FIELDS * world)
        if self._sampler is not None and self._sampler.world == world:
            own = self.report()
            vector[rank : _OWN * world : world] = own[:_OWN]
            if own[_OWN:]:
                vector[_OWN * world :] = own[_OWN:]
        return vector

    def heard(self, reports: Sequence[float], rank: int) -> None:
        """Take the sum of all workers' reports for a ring, on an iteration that is whole.

        Raises RunError if this worker's loader was given batches while the reports were on their way.
        """
        fields = np.array(reports).reshape(_FIELDS, -1)
        self._take(fields[:_OWN], fields[_OWN].astype(np.int64), rank == 0)

    def heard_each(self, reports: Mapping[int, Sequence[float]], worker: int) -> None:
        """Take each worker's report, by its number, as `worker`. See `heard`."""
        each = [reports[name] for name in sorted(reports)]
        fields = np.array([report[:_OWN] for report in each]).reshape(-1, _OWN).T
        parts = np.array(each[0][_OWN:] if each else [], dtype=np.int64)
        self._take(fields, parts, bool(each) and worker == min(reports))

    def _take(self, fields: Floats, parts: Whole, is_first: bool) -> None:
        """Take the workers' values, (_OWN, workers), and the parts that worker 0 has chosen, if any."""
        self._mark, self._taken, self._is_odd = self._now(), None, False
        world, sampler = fields.shape[1], self._sampler
        if sampler is None or sampler.world != world or world < 2:
            return
        # A worker that has just entered may be in the next epoch's deal already: then the choice is reported
        # once more.
        if parts.any() and len(set(fields[3])) == 1:
            tick = int(fields[2].max())
            if sampler.given > tick:
                raise RunError(
                    "sync.shares: batches were fetched during backward, by another thread than the training "
                    "loop's, so workers cannot agree on shares; let the loop fetch its batches, or set "
                    "sync.shares to even"
                )
            self._schedule.change(tick, parts)
            self._choice = None
        if is_first:
            self._choose(fields[0], fields[1], fields[4].astype(np.int64))

    def _choose(self, seconds: Floats, samples: Floats, caps: Whole) -> None:
        """Choose other parts if that pays, or caps ask for it; they are reported with the next iteration."""
        if self._chooser is None:
            self._chooser = ShareChooser(
                len(seconds),
                self._total,
                least=self._schedule.least,
                most=self._schedule.caps,
                parts=self._schedule.latest,
                by_speed=self._by_speed,
            )
        change = self._chooser.observe(seconds, samples)
        change = self._chooser.cap(caps) or change
        if change is None:
            return
        self._choice = change
        if change.capped >= 0:
            reason = f"worker {self._name_of(change.capped)} has no memory for more"
            if change.held < self._total:
                reason += f"; all caps hold {change.held} samples, and larger parts are computed in pieces"
        else:
            reason = (
                f"worker {self._name_of(change.slowest)} would finish after {change.before:.3g} s, and now "
                f"the last one does after {change.after:.3g} s"
            )
        if change.waits_for >= 0:
            name = self._name_of(change.waits_for)
            reason += f"; worker {name} takes longer than the others even for {self._schedule.least} samples"
        self._chosen(f"{_in_words(change.parts)} of {self._total} samples", reason, change)

    def _now(self) -> float:
        """Return the time, without that spent waiting for others."""
        return (self._clock or time.perf_counter)() - self._waited()


def _in_words(parts: Whole) -> str:
    """Return the parts of a few workers, or the least and the most of many."""
    if len(parts) <= _FEW:
        return ", ".join(map(str, parts.tolist()))
    return f"{parts.min()} to {parts.max()} each"


def workers_in_words(names: Sequence[int]) -> str:
    """Return the names of a few workers, or the number of many."""
    if len(names) <= _FEW:
        return f"workers {', '.join(map(str, names))}"
    return f"{len(names)} workers"
