"""Which workers shared a ring when, why, how stale their contributions were, and where their time went."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from atoll.core.events import AnyEvent, Decided, Logged, Regrouped, Started, StepDone
from atoll.core.units import format_seconds
from atoll.observe.summary import GroupingShown, GroupTotals, Staleness, Summary

GROUPS = "groups"  # what a decision of the hub is about that says who is in which group
STALENESS = "staleness"  # the name under which a session logs what the shards measured of its contribution
_HUNDREDTHS = (
    2  # decimals that are kept of a staleness, so that a long run's need no more room than a short one's
)
_MOST_LINES = 4  # groups that get a line of their own at the end of a run
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
        ring = (
            step.phases.get("ring", 0.0) if len(self.workers) > 1 else 0.0
        )  # else it waited for something else
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
    """The least value that at least a `part` of all does not exceed."""
    reached, values = 0, sorted(counts)
    for value in values:
        reached += counts[value]
        if reached >= part * counts.total():
            return value
    return values[-1]


class GroupRecords:
    """Takes a run's events and works out its groups; a run in which no worker moved has none.

    A worker is alone until it says that it has moved. What it tells of an iteration belongs to the group that
    it was in then, however late it is told.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, tuple[int, ...]], _Group] = {}
        self._moves: dict[
            int, list[tuple[int, _Group]]
        ] = {}  # of each worker: (after which iteration, where to)
        self._told: list[Regrouped] = []
        self._decided: list[Decided] = []
        self._latest: dict[int, float] = {}  # each worker's latest step, seconds since the epoch

    def take(self, event: AnyEvent) -> None:
        """Take an event of a worker, or the hub's decision on groups; others are none of its business."""
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
        elif isinstance(event, Decided) and event.what == GROUPS:
            self._decided.append(event)

    def _move(self, event: Regrouped) -> None:
        moves = self._moves.setdefault(event.worker, [])
        while (
            moves and moves[-1][0] >= event.iteration
        ):  # a checkpoint was loaded: it goes through them again
            moves.pop()
        moves.append((event.iteration, self._group(event.group, tuple(sorted(event.workers)))))
        self._told.append(event)

    def _group(self, number: int, workers: tuple[int, ...]) -> _Group:
        return self._groups.setdefault((number, workers), _Group(number, workers))

    def _group_of(self, worker: int, iteration: int) -> _Group:
        """The group in which the worker made this iteration."""
        moves = self._moves.get(worker, [])
        place = bisect.bisect_left(moves, iteration, key=lambda move: move[0])
        return moves[place - 1][1] if place else self._group(worker, (worker,))

    def shown(self, first: float) -> tuple[list[GroupingShown], list[GroupTotals]]:
        """Who was with whom, in order of time, and what each group did. The run began at `first`, in seconds
        since the epoch."""
        if not self._told:
            return [], []
        made = [group for group in self._groups.values() if group.steps]
        totals = [
            group.totals(first) for group in sorted(made, key=lambda group: (group.since, group.workers))
        ]
        return self._groupings(first), totals

    def _groupings(self, first: float) -> list[GroupingShown]:
        workers = sorted({*self._latest, *(event.worker for event in self._told)})
        alone = [[worker] for worker in workers if self._group(worker, (worker,)).steps]
        found = [GroupingShown(0, 0.0, alone, _ALONE)] if alone else []
        for grouping in sorted({event.grouping for event in self._told}):
            told = [event for event in self._told if event.grouping == grouping]
            since = min(event.time for event in told)
            reason = next((event.reason for event in told if event.reason), "") or self._reason(since)
            found.append(GroupingShown(grouping, max(0.0, since - first), self._at(grouping, since), reason))
        return found

    def _at(self, grouping: int, since: float) -> list[list[int]]:
        """Who was with whom once all had moved that moved in `grouping`, from `since` on. A worker that was
        gone by then is in no group."""
        where: dict[int, tuple[int, ...]] = {}
        moved = {event.worker: event for event in self._told if event.grouping <= grouping}
        for worker in {*self._latest, *moved}:
            event = moved.get(worker)
            if self._latest.get(worker, -math.inf) > since or (event and event.grouping == grouping):
                where[worker] = (event.group, *sorted(event.workers)) if event else (worker, worker)
        groups: dict[tuple[int, ...], list[int]] = {}
        for worker in sorted(where):
            groups.setdefault(where[worker], []).append(worker)
        return sorted(groups.values())

    def _reason(self, since: float) -> str:
        """Of the hub's latest decision before that; why it made no groups is told under the same name."""
        made = [
            event for event in self._decided if event.choice.startswith("workers ") and event.time <= since
        ]
        return made[-1].reason if made else ""


def group_lines(summary: Summary) -> list[str]:
    """What a person wants to know at the end of a run with groups: who, since when, why, how stale, and where
    the time went. None for other runs."""
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
    """The groups that workers were in last."""
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
    """Why there are the groups that there are last: of each decision that made one of them."""
    latest = groupings[-1].groups
    reasons: list[str] = []
    for before, after in pairwise([GroupingShown(0, 0.0, [], ""), *groupings]):
        made = [group for group in after.groups if group not in before.groups and len(group) > 1]
        if any(group in latest for group in made) and after.reason and after.reason not in reasons:
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
