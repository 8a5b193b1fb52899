"""The groups of workers in a run: members, times, reasons, staleness, and use of time."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from atoll.core.events import AnyEvent, Logged, Regrouped, Started, StepDone
from atoll.core.units import format_seconds
from atoll.observe.summary import GroupingShown, GroupTotals, Staleness, Summary

GROUPS = "groups"  # `what` of the hub's decisions about groups
STALENESS = "staleness"  # name under which a session logs the staleness measured by the shards
_HUNDREDTHS = 2  # decimals kept of a staleness: few different values need little memory in a long run
_MOST_LINES = 4  # groups with a closing line
_ALONE = "each worker alone, while speeds are measured"


@dataclass
class _Group:
    """One group. Times are in seconds since the epoch."""

    number: int
    workers: tuple[int, ...]
    since: float = math.inf
    until: float = -math.inf
    steps: Counter[int] = field(default_factory=Counter)  # by worker
    samples: float = 0.0
    seconds: float = 0.0
    ring: float = 0.0
    exchange: float = 0.0
    other: float = 0.0
    staleness: Counter[float] = field(default_factory=Counter)

    def add(self, step: StepDone) -> None:
        self.since, self.until = min(self.since, step.time - step.seconds), max(self.until, step.time)
        exchange = step.phases.get("exchange", 0.0)
        # A worker alone has no ring to wait in.
        ring = step.phases.get("ring", 0.0) if len(self.workers) > 1 else 0.0
        self.steps[step.worker] += 1
        self.samples += step.samples
        self.seconds += step.seconds
        self.ring += ring
        self.exchange += exchange
        self.other += max(0.0, step.waiting - ring - exchange)

    def totals(self, first: float) -> GroupTotals:
        return GroupTotals(
            group=self.number,
            workers=list(self.workers),
            since=max(0.0, self.since - first),
            until=max(0.0, self.until - first),
            steps=max(self.steps.values()),
            samples=self.samples,
            seconds=self.seconds,
            ring=self.ring,
            exchange=self.exchange,
            other=self.other,
            staleness=_staleness(self.staleness),
        )


def _staleness(counts: Counter[float]) -> Staleness | None:
    if not counts:
        return None
    return Staleness(_quantile(counts, 0.5), _quantile(counts, 0.95), max(counts), counts.total())


def _quantile(counts: Counter[float], part: float) -> float:
    """Return the least value that a share `part` of all values does not exceed."""
    reached, values = 0, sorted(counts)
    for value in values:
        reached += counts[value]
        if reached >= part * counts.total():
            return value
    return values[-1]


class GroupRecords:
    """Finds a run's groups from its events; a run in which no worker moved has none.

    A worker is alone until its first Regrouped. An event of an iteration counts for the worker's group at
    that iteration, however late the event comes.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, tuple[int, ...]], _Group] = {}
        self._moves: dict[int, list[tuple[int, _Group]]] = {}  # by worker: (last iteration before, new group)
        self._regrouped: list[Regrouped] = []
        self._latest: dict[int, float] = {}  # time of each worker's latest step, seconds since the epoch

    def take(self, event: AnyEvent) -> None:
        """Take an event of a worker; events that do not concern groups are ignored."""
        if isinstance(event, Started):
            self._moves[event.worker] = []
        elif isinstance(event, Regrouped):
            self._move(event)
        elif isinstance(event, StepDone):
            self._latest[event.worker] = event.time
            self._group_of(event.worker, event.iteration).add(event)
        elif isinstance(event, Logged):
            value = event.values.get(STALENESS)
            if value is not None:
                stale = self._group_of(event.worker, event.iteration).staleness
                stale[round(value, _HUNDREDTHS)] += 1

    def _move(self, event: Regrouped) -> None:
        moves = self._moves.setdefault(event.worker, [])
        while moves and moves[-1][0] >= event.iteration:  # a loaded checkpoint repeats these iterations
            moves.pop()
        moves.append((event.iteration, self._group(event.group, tuple(sorted(event.workers)))))
        self._regrouped.append(event)

    def _group(self, number: int, workers: tuple[int, ...]) -> _Group:
        return self._groups.setdefault((number, workers), _Group(number, workers))

    def _group_of(self, worker: int, iteration: int) -> _Group:
        """Return the worker's group at this iteration."""
        moves = self._moves.get(worker, [])
        place = bisect.bisect_left(moves, iteration, key=lambda move: move[0])
        return moves[place - 1][1] if place else self._group(worker, (worker,))

    def shown(self, first: float) -> tuple[list[GroupingShown], list[GroupTotals]]:
        """Return the groupings in order of time, and each group's totals.

        `first` is the time of the run's start, in seconds since the epoch.
        """
        if not self._regrouped:
            return [], []
        active = [group for group in self._groups.values() if group.steps]
        totals = [
            group.totals(first) for group in sorted(active, key=lambda group: (group.since, group.workers))
        ]
        return self._groupings(first), totals

    def _groupings(self, first: float) -> list[GroupingShown]:
        workers = sorted({*self._latest, *(event.worker for event in self._regrouped)})
        alone = [[worker] for worker in workers if self._group(worker, (worker,)).steps]
        found = [GroupingShown(0, 0.0, alone, _ALONE)] if alone else []
        for grouping in sorted({event.grouping for event in self._regrouped}):
            moves = [event for event in self._regrouped if event.grouping == grouping]
            since = min(event.time for event in moves)
            reason = next((event.reason for event in moves if event.reason), "")
            found.append(GroupingShown(grouping, max(0.0, since - first), self._at(grouping, since), reason))
        return found

    def _at(self, grouping: int, since: float) -> list[list[int]]:
        """Return the groups after all moves of decision `grouping`, which began at `since`.

        A worker that was gone by then is in no group.
        """
        where: dict[int, tuple[int, ...]] = {}
        moved = {event.worker: event for event in self._regrouped if event.grouping <= grouping}
        for worker in {*self._latest, *moved}:
            event = moved.get(worker)
            if self._latest.get(worker, -math.inf) > since or (event and event.grouping == grouping):
                where[worker] = (event.group, *sorted(event.workers)) if event else (worker, worker)
        groups: dict[tuple[int, ...], list[int]] = {}
        for worker in sorted(where):
            groups.setdefault(where[worker], []).append(worker)
        return sorted(groups.values())


def group_lines(summary: Summary) -> list[str]:
    """Return the closing lines on groups: members, time, reason, staleness and use of time; else none."""
    if not summary.groupings:
        return []
    lines = [_grouping_line(summary)]
    groups = summary.each_group
    shown = sorted(_latest(summary), key=lambda group: -group.seconds)[:_MOST_LINES]
    lines += [_group_line(group) for group in sorted(shown, key=lambda group: group.workers)]
    whole = sum(group.seconds for group in groups)
    if len(shown) < len(groups) and whole > 0:
        part = 1 - sum(group.seconds for group in shown) / whole
        lines.append(f"groups: {len(groups) - len(shown)} more, in {part:.0%} of the time: see summary.json")
    return lines


def _latest(summary: Summary) -> list[GroupTotals]:
    """Return the last groups of the workers."""
    latest: dict[int, GroupTotals] = {}
    for group in sorted(summary.each_group, key=lambda group: group.since):
        latest.update(dict.fromkeys(group.workers, group))
    there = {worker for group in summary.groupings[-1].groups for worker in group}
    return [
        group
        for group in summary.each_group
        if any(latest[worker] is group for worker in there if worker in latest)
    ]


def _grouping_line(summary: Summary) -> str:
    last, changes = summary.groupings[-1], len(summary.groupings) - 1
    who = " | ".join(" ".join(map(str, group)) for group in last.groups)
    changed = f", the last of {changes} changes" if changes > 1 else ""
    reasons = "; ".join(_reasons(summary.groupings)) or "no reason was given"
    return f"groups: {who} since {format_seconds(last.since)}{changed}: {reasons}"


def _reasons(groupings: Sequence[GroupingShown]) -> list[str]:
    """Return the reasons of the decisions that formed one of the last groups."""
    latest = groupings[-1].groups
    reasons: list[str] = []
    for before, after in pairwise([GroupingShown(0, 0.0, [], ""), *groupings]):
        formed = [group for group in after.groups if group not in before.groups and len(group) > 1]
        if any(group in latest for group in formed) and after.reason and after.reason not in reasons:
            reasons.append(after.reason)
    return reasons


def _group_line(group: GroupTotals) -> str:
    who = (
        f"group {' '.join(map(str, group.workers))}"
        if len(group.workers) > 1
        else f"{group.workers[0]} alone"
    )
    span = f"{format_seconds(group.since)} to {format_seconds(group.until)}"
    facts = [f"{who}, {span}: {group.steps:,} steps of {group.samples:,.0f} samples"]
    if (stale := group.staleness) is not None:
        facts.append(f"staleness {stale.median:g}, 95% at most {stale.p95:g}, most {stale.most:g}")
    if group.seconds > 0:
        parts = {
            "computing": group.computing,
            "ring": group.ring,
            "exchange": group.exchange,
            "other": group.other,
        }
        facts.append(", ".join(f"{name} {seconds / group.seconds:.0%}" for name, seconds in parts.items()))
    return " · ".join(facts)
