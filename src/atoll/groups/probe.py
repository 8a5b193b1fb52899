"""The probe's queue (docs/grouping.md, "At the start of a run: the queue"): workers that finish their probe
batches at about the same time make a group.

Arrival decides when a group leaves the queue, and the measured speed who of the queue is in it; workers whose
speeds differ by no more than the tolerance count as equal, and go by rank. So that jitter does not decide
among equals, a full queue waits for whoever may still turn out to be as fast: until each probe under way has
taken longer, by the tolerance, than that of the group's slowest member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from atoll.core.errors import DeadlineError, UserError
from atoll.core.units import format_seconds
from atoll.groups.grouping import Grouping, sizes_of

TOLERANCE = 0.1  # the share by which speeds may differ and count as equal


@dataclass(frozen=True)
class Formed:
    """These workers, in order of rank, leave the queue as a group."""

    group: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class GivenUp:
    """The run begins without this worker, whose probe did not report in time."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Late:
    """A worker that is in no group of the queue's has finished its probe: it is to be placed beside them
    (`drift.Regrouper.handle_joined`)."""

    worker: int
    seconds_per_sample: float
    reason: str


Outcome: TypeAlias = Formed | GivenUp | Late


@dataclass
class ProbeState:
    """What a queue knows, as plain data: times in the caller's seconds, workers by rank."""

    started: float
    asked: int  # groups
    begun: dict[int, float]  # whose probe is under way -> since when
    queue: dict[int, float]  # who has reported, in order of arrival -> how long its probe took, in seconds
    seconds_per_sample: dict[int, float]  # of all that have reported
    formed: list[tuple[int, ...]] = field(default_factory=list)  # in the order in which they left
    left_out: dict[int, float] = field(default_factory=dict)  # given up, or come too late -> since when
    alone: bool = False  # nobody reported in time, and that was said


class ProbeQueue:
    """The queue of a run's start: N workers, `groups` groups. Times are in the caller's seconds.

    A worker whose probe takes longer than `patience` seconds is given up: the run begins without it. In a
    ring it would hold up the others, and nobody knows for how long; its samples go to the others meanwhile.
    Should it report after all, it enters as one that comes late does. Who comes in the first `patience`
    seconds is in the queue as if it had been there from the start, with as long for its own probe.

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
            raise UserError(f"patience {patience:g} s must be above 0, and tolerance {tolerance:g} not below")
        self._patience, self._tolerance, self._name = patience, tolerance, name
        self._state = ProbeState(now, groups, begun, {}, {})
        self._outcomes: list[Outcome] = []  # since the last poll

    @property
    def over(self) -> bool:
        """Whether each worker is in a group, or given up."""
        return not self._state.begun and not self._state.queue

    @property
    def awaited(self) -> list[int]:
        """The workers that have not reported and are not given up, in order of rank."""
        return sorted(self._state.begun)

    @property
    def seconds_per_sample(self) -> dict[int, float]:
        """What was measured, by worker."""
        return dict(self._state.seconds_per_sample)

    def grouping(self) -> Grouping:
        """The groups so far, of the workers that still live."""
        return Grouping(self._state.formed)

    def state(self) -> ProbeState:
        """All that a restart must not lose, for `restore`; what no poll has told yet is told by the next."""
        state = self._state
        return ProbeState(
            state.started,
            state.asked,
            dict(state.begun),
            dict(state.queue),
            dict(state.seconds_per_sample),
            list(state.formed),
            dict(state.left_out),
            state.alone,
        )

    def restore(self, state: ProbeState) -> None:
        """Be as `state` says."""
        self._state, self._outcomes = state, []

    # -- what happens -------------------------------------------------------------------------------------

    def handle_begun(self, now: float, worker: int) -> None:
        """A worker that was not there begins its probe."""
        state = self._state
        if (
            worker in state.begun
            or worker in state.queue
            or worker in state.left_out
            or self._group_of(worker)
        ):
            return
        if self.over or now >= state.started + self._patience:
            state.left_out[worker] = now
        else:
            state.begun[worker] = now

    def handle_probed(self, now: float, worker: int, seconds_per_sample: float) -> None:
        """A worker has finished its probe batches. Said twice, it counts once. Raises UserError for a time
        that is none, and for a worker of whom no probe is known."""
        if not (math.isfinite(seconds_per_sample) and seconds_per_sample > 0):
            raise UserError(
                f"worker {self._name(worker)} says that its probe took {seconds_per_sample:g} s a sample: "
                "that is no time"
            )
        state = self._state
        if worker in state.seconds_per_sample:
            return
        if worker in state.begun:
            state.queue[worker] = max(0.0, now - state.begun.pop(worker))
        elif worker in state.left_out:
            since = format_seconds(now - state.started)
            reason = (
                f"worker {self._name(worker)} finished its probe {since} after the start, when the groups "
                "were made"
            )
            self._outcomes.append(Late(worker, seconds_per_sample, reason))
        else:
            raise UserError(f"worker {self._name(worker)} reports a probe that it has not begun")
        state.seconds_per_sample[worker] = seconds_per_sample

    def handle_left(self, now: float, worker: int) -> None:  # noqa: ARG002
        """A worker died or said goodbye: those that remain make the groups, fewer if they are too few."""
        state = self._state
        for known in (state.begun, state.queue, state.left_out, state.seconds_per_sample):
            known.pop(worker, None)
        state.formed = [rest for group in state.formed if (rest := tuple(w for w in group if w != worker))]
        self._outcomes = [
            each for each in self._outcomes if not (isinstance(each, Late) and each.worker == worker)
        ]

    # -- what follows -------------------------------------------------------------------------------------

    def poll(self, now: float) -> list[Outcome]:
        """What has come of it by `now`, in order. Raises DeadlineError, once, where nobody has reported in
        time: there is nothing to make groups by."""
        self._give_up(now)
        while (group := self._next_group(now)) is not None:
            self._form(group)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def next_deadline(self) -> float | None:
        """When `poll` may next have outcomes, if nothing happens before."""
        if self._outcomes:
            return self._state.started
        moments = [begun + self._patience for begun in self._state.begun.values()]
        group = self._candidates()
        if group:
            moments.append(self._settled(group))
        return min(moments, default=None)

    def _give_up(self, now: float) -> None:
        state = self._state
        for worker, begun in sorted(state.begun.items()):
            if now >= begun + self._patience:
                del state.begun[worker]
                state.left_out[worker] = now
                span = format_seconds(self._patience)
                reason = (
                    f"the run begins without worker {self._name(worker)}: its probe did not end within "
                    f"{span}, and in a group it would hold up the others; it enters if it reports"
                )
                self._outcomes.append(GivenUp(worker, reason))
        if self.over and state.left_out and not state.formed and not state.alone:
            state.alone = True
            names = ", ".join(self._name(worker) for worker in sorted(state.left_out)[:8])
            raise DeadlineError(
                f"no worker has ended its probe within {format_seconds(self._patience)} (waited for workers "
                f"{names}): its batches take longer than the probe may"
            )

    def _candidates(self) -> tuple[int, ...]:
        """Who would leave the queue next, as far as is known; empty while the queue does not hold enough."""
        state = self._state
        remaining = len(state.begun) + len(state.queue)
        if not remaining:
            return ()
        groups = max(1, min(state.asked - len(state.formed), remaining))
        size = sizes_of(remaining, groups)[0]
        return tuple(self._in_order()[:size]) if len(state.queue) >= size else ()

    def _in_order(self) -> list[int]:
        """The queue by speed, and by rank where speeds count as equal to the fastest of them."""
        times = self._state.seconds_per_sample
        ordered: list[int] = []
        rest = sorted(self._state.queue, key=lambda worker: (times[worker], worker))
        while rest:
            alike = [worker for worker in rest if times[worker] <= times[rest[0]] * (1 + self._tolerance)]
            ordered += sorted(alike)
            rest = rest[len(alike) :]
        return ordered

    def _settled(self, group: tuple[int, ...]) -> float:
        """When nobody whose probe is under way can be as fast as the slowest of `group` any more."""
        longest = max(self._state.queue[worker] for worker in group) * (1 + self._tolerance)
        return max((begun + longest for begun in self._state.begun.values()), default=-math.inf)

    def _next_group(self, now: float) -> tuple[int, ...] | None:
        group = self._candidates()
        return group if group and now >= self._settled(group) else None

    def _form(self, group: tuple[int, ...]) -> None:
        state = self._state
        for worker in group:
            del state.queue[worker]
        group = tuple(sorted(group))
        state.formed.append(group)
        speeds = sorted(1 / state.seconds_per_sample[worker] for worker in group)
        which = ", ".join(self._name(worker) for worker in group)
        range_ = f"{speeds[0]:.4g}" if speeds[0] == speeds[-1] else f"{speeds[0]:.4g} to {speeds[-1]:.4g}"
        behind = len(state.begun) + len(state.queue)
        rest = f"; {behind} behind {'it' if len(group) == 1 else 'them'} in the queue" if behind else ""
        reason = (
            f"{which}: {range_} samples/s by their probe, group {len(state.formed)} of {state.asked}{rest}"
        )
        self._outcomes.append(Formed(group, reason))

    def _group_of(self, worker: int) -> bool:
        return any(worker in group for group in self._state.formed)
