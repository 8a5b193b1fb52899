"""The probe's queue: workers that finish their probe batches at about the same time form a group.

Arrival decides when a group leaves the queue, and the measured speeds decide its members. Workers whose
speeds differ by no more than the tolerance count as equal, and go by rank. So that jitter does not decide
among equals, a full queue waits for workers that may still turn out as fast: until each running probe has
taken longer, by the tolerance, than that of the group's slowest member. Source: docs/grouping.md, "At the
start of a run: the queue".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from atoll.core.errors import DeadlineError, UserError
from atoll.core.units import format_seconds
from atoll.groups.grouping import sizes_of

TOLERANCE = 0.1  # share by which equal speeds may differ


@dataclass(frozen=True)
class Formed:
    """A group of workers, in order of rank, leaves the queue."""

    group: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class GivenUp:
    """The run begins without this worker, whose probe did not report in time."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Late:
    """A worker outside the queue's groups has finished its probe, and is to be placed beside them.

    `drift.Regrouper.handle_joined` places it.
    """

    worker: int
    seconds_per_sample: float
    reason: str


ProbeEvent: TypeAlias = Formed | GivenUp | Late


class ProbeQueue:
    """The queue at a run's start: N workers, `groups` groups. Times are in the caller's seconds.

    A worker whose probe takes longer than `patience` seconds is given up, because it would hold up a ring for
    an unknown time; the others take its samples. If it reports later, it enters as a late worker. A worker
    that joins within the first `patience` seconds is in the queue like the others, with as long for its
    probe.

    Attributes:
        begun: the start of each running probe, by worker.
        queue: the seconds of the probe, by worker that has reported and is in no group.
        seconds_per_sample: of all workers that have reported.
        formed: the groups, in the order of leaving.
        left_out: since when a worker is given up, or too late.

    Raises UserError for no group, and for more groups than workers.
    """

    def __init__(
        self,
        now: float,
        workers: Iterable[int],
        groups: int,
        *,
        patience: float,
        tolerance: float = TOLERANCE,
        name: Callable[[int], str] = str,
    ) -> None:
        begun = dict.fromkeys(sorted(workers), now)
        sizes_of(len(begun), groups)
        if not (patience > 0 and tolerance >= 0):
            raise UserError(f"patience {patience:g} s must be above 0, and tolerance {tolerance:g} 0 or more")
        self._patience, self._tolerance, self._name = patience, tolerance, name
        self._started, self._asked = now, groups
        self.begun = begun
        self.queue: dict[int, float] = {}
        self.seconds_per_sample: dict[int, float] = {}
        self.formed: list[tuple[int, ...]] = []
        self.left_out: dict[int, float] = {}
        self._is_told = False  # DeadlineError was raised: no worker reported in time
        self._outcomes: list[ProbeEvent] = []  # since the last poll

    @property
    def over(self) -> bool:
        """True if each worker is in a group, or given up."""
        return not self.begun and not self.queue

    # -- events -------------------------------------------------------------------------------------------

    def handle_begun(self, now: float, worker: int) -> None:
        """A new worker begins its probe."""
        if worker in self.begun or worker in self.queue or worker in self.left_out or self._group_of(worker):
            return
        if self.over or now >= self._started + self._patience:
            self.left_out[worker] = now
        else:
            self.begun[worker] = now

    def handle_probed(self, now: float, worker: int, seconds_per_sample: float) -> None:
        """A worker has finished its probe batches; a repeated report has no effect.

        Raises UserError for an impossible time, and for a worker without a probe.
        """
        if not (math.isfinite(seconds_per_sample) and seconds_per_sample > 0):
            raise UserError(
                f"worker {self._name(worker)} reports {seconds_per_sample:g} s a sample; "
                "it must be finite and above 0"
            )
        if worker in self.seconds_per_sample:
            return
        if worker in self.begun:
            self.queue[worker] = max(0.0, now - self.begun.pop(worker))
        elif worker in self.left_out:
            since = format_seconds(now - self._started)
            reason = (
                f"worker {self._name(worker)} finished its probe {since} after the start, when the groups "
                "were made"
            )
            self._outcomes.append(Late(worker, seconds_per_sample, reason))
        else:
            raise UserError(f"worker {self._name(worker)} reports a probe that it has not begun")
        self.seconds_per_sample[worker] = seconds_per_sample

    def handle_left(self, now: float, worker: int) -> None:  # noqa: ARG002
        """A worker died or left: the others form the groups, fewer if they are too few."""
        for known in (self.begun, self.queue, self.left_out, self.seconds_per_sample):
            known.pop(worker, None)
        self.formed = [rest for group in self.formed if (rest := tuple(w for w in group if w != worker))]
        self._outcomes = [
            each for each in self._outcomes if not (isinstance(each, Late) and each.worker == worker)
        ]

    # -- decisions ----------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[ProbeEvent]:
        """Return the outcomes up to `now`, in order.

        Raises DeadlineError, once, if no worker reported in time: then there is nothing to form groups by.
        """
        self._give_up(now)
        while (group := self._next_group(now)) is not None:
            self._form(group)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def next_deadline(self) -> float | None:
        """Return when `poll` may next have outcomes without other events; None for never."""
        if self._outcomes:
            return self._started
        moments = [begun + self._patience for begun in self.begun.values()]
        group = self._candidates()
        if group:
            moments.append(self._settled(group))
        return min(moments, default=None)

    def _give_up(self, now: float) -> None:
        for worker, begun in sorted(self.begun.items()):
            if now >= begun + self._patience:
                del self.begun[worker]
                self.left_out[worker] = now
                span = format_seconds(self._patience)
                reason = (
                    f"the run begins without worker {self._name(worker)}: its probe did not end within "
                    f"{span}, and in a group it would hold up the others; it enters if it reports"
                )
                self._outcomes.append(GivenUp(worker, reason))
        if self.over and self.left_out and not self.formed and not self._is_told:
            self._is_told = True
            names = ", ".join(self._name(worker) for worker in sorted(self.left_out)[:8])
            raise DeadlineError(
                f"no worker has ended its probe within {format_seconds(self._patience)} (waited for workers "
                f"{names}): its batches take longer than the probe may"
            )

    def _candidates(self) -> tuple[int, ...]:
        """Return the workers that would leave the queue next; empty while it holds too few."""
        remaining = len(self.begun) + len(self.queue)
        if not remaining:
            return ()
        groups = max(1, min(self._asked - len(self.formed), remaining))
        size = sizes_of(remaining, groups)[0]
        return tuple(self._in_order()[:size]) if len(self.queue) >= size else ()

    def _in_order(self) -> list[int]:
        """Return the queue by speed, and by rank among speeds that count as equal to their fastest."""
        times = self.seconds_per_sample
        ordered: list[int] = []
        rest = sorted(self.queue, key=lambda worker: (times[worker], worker))
        while rest:
            equals = [worker for worker in rest if times[worker] <= times[rest[0]] * (1 + self._tolerance)]
            ordered += sorted(equals)
            rest = rest[len(equals) :]
        return ordered

    def _settled(self, group: tuple[int, ...]) -> float:
        """Return when no worker with a running probe can be as fast as the slowest of `group` any more."""
        longest = max(self.queue[worker] for worker in group) * (1 + self._tolerance)
        return max((begun + longest for begun in self.begun.values()), default=-math.inf)

    def _next_group(self, now: float) -> tuple[int, ...] | None:
        group = self._candidates()
        return group if group and now >= self._settled(group) else None

    def _form(self, group: tuple[int, ...]) -> None:
        for worker in group:
            del self.queue[worker]
        group = tuple(sorted(group))
        self.formed.append(group)
        speeds = sorted(1 / self.seconds_per_sample[worker] for worker in group)
        which = ", ".join(self._name(worker) for worker in group)
        range_ = f"{speeds[0]:.4g}" if speeds[0] == speeds[-1] else f"{speeds[0]:.4g} to {speeds[-1]:.4g}"
        behind = len(self.begun) + len(self.queue)
        rest = f"; {behind} behind {'it' if len(group) == 1 else 'them'} in the queue" if behind else ""
        reason = (
            f"{which}: {range_} samples/s by their probe, group {len(self.formed)} of {self._asked}{rest}"
        )
        self._outcomes.append(Formed(group, reason))

    def _group_of(self, worker: int) -> bool:
        return any(worker in group for group in self.formed)
