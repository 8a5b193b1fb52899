"""Candidate groupings for the chooser."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from atoll.groups.grouping import Grouping, sizes_of

_MOST_WHOLE = 12  # most workers for which all contiguous runs are listed: 2048
_MOST_PAIRS = 64  # most groups for which all pairs are tried for a merge; else neighbours in speed


class SpeedOrder:
    """Workers from the fastest to the slowest; equal ones by site and number."""

    def __init__(self, speeds: Mapping[int, float], sites: Mapping[int, str]) -> None:
        self.workers = sorted(speeds, key=lambda worker: (-speeds[worker], sites.get(worker, ""), worker))
        self._place = {worker: place for place, worker in enumerate(self.workers)}
        self._speeds, self._sites = speeds, sites

    def sort(self, workers: Sequence[int]) -> list[int]:
        """Return these workers from the fastest to the slowest."""
        return sorted(workers, key=self._place.__getitem__)

    def runs(self, grouping: Grouping) -> list[list[int]]:
        """Return the groups by their fastest members, each from the fastest to the slowest."""
        return sorted((self.sort(group) for group in grouping), key=lambda run: self._place[run[0]])

    def shape(self, grouping: Grouping) -> list[list[tuple[float, str]]]:
        """Return the grouping with speed and site in place of each worker's number."""
        return sorted(
            sorted((self._speeds[worker], self._sites.get(worker, "")) for worker in group)
            for group in grouping
        )

    def gap(self, faster: int, slower: int) -> float:
        """Return how many times as fast one worker is as another."""
        return self._speeds[faster] / self._speeds[slower]


def all_groupings(workers: Sequence[int]) -> Iterator[Grouping]:
    """Yield every grouping of the workers: 1, 2, 5, 15, 52, 203, 877, 4140 for 1 to 8 workers."""
    for groups in _all(list(workers)):
        yield Grouping(groups)


def _all(workers: list[int]) -> Iterator[list[list[int]]]:
    if not workers:
        yield []
        return
    *others, last = workers
    for groups in _all(others):
        for index in range(len(groups)):
            yield [[*group, last] if place == index else group for place, group in enumerate(groups)]
        yield [*groups, [last]]


def equal_runs(ordered: Sequence[int], groups: int) -> Grouping:
    """Return runs of the order with sizes as equal as possible, longer ones first; the queue's grouping."""
    ends = list(itertools.accumulate(sizes_of(len(ordered), groups), initial=0))
    return Grouping(ordered[start:end] for start, end in itertools.pairwise(ends))


def cut(ordered: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    """Return the order cut before each of these places, ascending."""
    return [ordered[start:end] for start, end in itertools.pairwise([0, *cuts, len(ordered)])]


def speed_runs(order: SpeedOrder, most: int, groups: int | None = None) -> Iterator[Grouping]:
    """Yield contiguous runs of the order of speed: all of them for few workers, else those of `_runs`."""
    for runs in _runs(order, order.workers, most, groups):
        yield Grouping(runs)


def by_site_and_speed(
    order: SpeedOrder, base: Grouping, site: Sequence[int], most: int
) -> Iterator[Grouping]:
    """Yield `base` with the workers of `site` cut into runs of speed instead."""
    others = [group for group in base if not set(group) & set(site)]
    for runs in _runs(order, order.sort(site), most, None):
        yield Grouping([*others, *runs])


def _runs(
    order: SpeedOrder, ordered: Sequence[int], most: int, groups: int | None
) -> Iterator[list[Sequence[int]]]:
    """Yield up to `most` ways to cut the order.

    All ways for few workers; else cuts at the greatest gaps in speed, equal runs of each number, and one cut
    at each place.
    """
    count = len(ordered)
    if count <= _MOST_WHOLE and 2 ** (count - 1) <= most:
        numbers = range(count) if groups is None else [groups - 1]
        for cuts in numbers:
            for places in itertools.combinations(range(1, count), cuts):
                yield cut(ordered, places)
        return
    yield from itertools.islice(_some_runs(order, ordered), most)


def _some_runs(order: SpeedOrder, ordered: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    count = len(ordered)
    gaps = sorted(range(1, count), key=lambda place: (-order.gap(ordered[place - 1], ordered[place]), place))
    for cuts in range(count):
        yield cut(ordered, sorted(gaps[:cuts]))
    for number in range(2, count):
        ends = itertools.accumulate(sizes_of(count, number)[:-1])
        yield cut(ordered, list(ends))
    for place in range(1, count):
        yield cut(ordered, [place])


def neighbours(order: SpeedOrder, grouping: Grouping, groups: int | None = None) -> Iterator[Grouping]:
    """Yield the groupings one merge, split, move or swap away, in this order.

    With `groups` only those with an equal number of groups.
    """
    if groups is None:
        yield from merges(order, grouping)
        yield from splits(order, grouping)
    runs = order.runs(grouping)
    yield from _moves(runs, groups is None)
    yield from _swaps(runs)


def merges(order: SpeedOrder, grouping: Grouping) -> Iterator[Grouping]:
    """Yield the grouping with two groups merged: any two, or of many groups those that are near in speed."""
    runs = order.runs(grouping)
    count = len(runs)
    pairs = (
        itertools.combinations(range(count), 2)
        if count <= _MOST_PAIRS
        else ((place, place + step) for step in (1, 2, 3) for place in range(count - step))
    )
    for first, second in pairs:
        rest = [run for place, run in enumerate(runs) if place not in (first, second)]
        yield Grouping([*rest, runs[first] + runs[second]])


def splits(order: SpeedOrder, grouping: Grouping) -> Iterator[Grouping]:
    """Yield the grouping with a group cut in two, its faster and its slower members."""
    runs = order.runs(grouping)
    for place, run in enumerate(runs):
        rest = runs[:place] + runs[place + 1 :]
        for at in range(1, len(run)):
            yield Grouping([*rest, run[:at], run[at:]])


def _moves(runs: list[list[int]], alone_too: bool) -> Iterator[Grouping]:
    for place, run in enumerate(runs):
        if len(run) == 1:
            continue  # to move its only member is a merge, which a fixed number of groups forbids
        for worker in run:
            left = [other for other in run if other != worker]
            for target, other in enumerate(runs):
                if target != place:
                    rest = [each for at, each in enumerate(runs) if at not in (place, target)]
                    yield Grouping([*rest, left, [*other, worker]])
            if alone_too:
                yield Grouping([*runs[:place], *runs[place + 1 :], left, [worker]])


def _swaps(runs: list[list[int]]) -> Iterator[Grouping]:
    for first, second in itertools.combinations(range(len(runs)), 2):
        rest = [run for place, run in enumerate(runs) if place not in (first, second)]
        for one, other in itertools.product(runs[first], runs[second]):
            left = [worker for worker in runs[first] if worker != one]
            right = [worker for worker in runs[second] if worker != other]
            yield Grouping([*rest, [*left, other], [*right, one]])
