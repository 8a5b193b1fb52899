"""The joint chooser: candidate groupings from measured speeds and links, scored by a function that is passed
in; the best is taken, with its reason.

Candidates: all in one ring; each alone; what the queue would make, for each number of groups; contiguous runs
in order of speed; sites; clusters of near workers; runs of speed within each site; then what a local search
finds from the best of these by merging, splitting, moving and swapping. For up to `EXHAUSTIVE` workers every
grouping is scored instead. No random numbers and no clock: the same input gives the same choice. The work
is bounded by the scores that are asked for, `MOST_SCORES`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from atoll.core.errors import UserError
from atoll.groups.candidates import (
    Order,
    all_groupings,
    by_site_and_speed,
    equal_runs,
    merges,
    neighbours,
    speed_runs,
    splits,
)
from atoll.groups.grouping import Grouping, show, sizes_of
from atoll.groups.links import Links, sites_grouping

MOST_WORKERS = 256
MOST_SCORES = 6_000
EXHAUSTIVE = 8  # workers: they have 4140 groupings
TOLERANCE = 0.02  # the share of samples/s that fewer groups may cost: measured figures are no better

_INSIDE = "by site, then speed"
_STARTS = 3  # candidates that the local search begins with


@dataclass(frozen=True)
class Score:
    """What a grouping is predicted to give; `limit` says in a few words what it is limited by."""

    samples_per_second: float
    limit: str = ""


ScoreFunction: TypeAlias = Callable[[Grouping], Score]


@dataclass(frozen=True)
class Measured:
    """What the probe has measured. `sites` may be empty; where it is and links are known, near workers are
    taken as sites. Raises UserError for no worker, for too many, and for a speed that is none."""

    speeds: Mapping[int, float]  # samples per second, of each worker by itself
    sites: Mapping[int, str] = field(default_factory=dict)
    links: Links | None = None
    name: Callable[[int], str] = str  # how the reason calls workers

    def __post_init__(self) -> None:
        if not 1 <= len(self.speeds) <= MOST_WORKERS:
            raise UserError(f"{len(self.speeds)} workers cannot be grouped; from 1 to {MOST_WORKERS} can")
        for worker, speed in self.speeds.items():
            if not 0 < speed < float("inf"):
                raise UserError(
                    f"worker {self.name(worker)} has a speed of {speed:g} samples/s, which is none"
                )
        if self.links is not None and set(self.links.workers) != set(self.speeds):
            raise UserError("the links are not those of the workers whose speeds are known")


@dataclass(frozen=True)
class Candidate:
    """A grouping with its score, and where it comes from: `by speed, 2 groups`."""

    grouping: Grouping
    score: Score
    origin: str


@dataclass(frozen=True)
class Choice:
    """What was chosen, beside what else there was. `by_speed` is the queue's grouping (of the best number of
    groups, unless it was asked for), `by_site` has one group for each site; None where that cannot be had."""

    grouping: Grouping
    score: Score
    reason: str
    runner_up: Candidate | None
    by_speed: Candidate | None
    by_site: Candidate | None
    scored: int  # groupings that were looked at


def computing(speeds: Mapping[int, float]) -> ScoreFunction:
    """Scores what groups give if sending takes no time: each as many times its slowest member as it has
    members. For as long as links, or what is sent, are not known."""
    return lambda grouping: Score(sum(len(group) * min(speeds[w] for w in group) for group in grouping))


def choose(
    measured: Measured,
    score: ScoreFunction,
    *,
    groups: int | None = None,
    tolerance: float = TOLERANCE,
    most: int = MOST_SCORES,
    exhaustive: int = EXHAUSTIVE,
) -> Choice:
    """The grouping that is predicted to give the most samples per second; with `groups`, of so many groups.

    Of those that come within `tolerance` of the most, the one with the fewest groups: what they would gain by
    running apart cannot be told from noise, and each more group makes updates staler. At most `most`
    groupings are looked at, and at most two for each worker beside. Raises UserError for a number of groups
    that cannot be.
    """
    if groups is not None:
        sizes_of(len(measured.speeds), groups)
    search = _Search(measured, score, groups, tolerance, most)
    by_speed = search.by_speed()
    by_site = search.by_site()
    if len(measured.speeds) <= exhaustive:
        search.look_at(all_groupings(search.order.workers), "of all groupings")
    else:
        search.look_at_candidates()
        search.climb()
        search.settle()
    return search.choice(by_speed, by_site)


class _Search:
    """The groupings scored so far. Everything goes by the workers' order of speed, so that other numbers for
    the same workers change nothing but the numbers."""

    def __init__(
        self, measured: Measured, score: ScoreFunction, groups: int | None, tolerance: float, most: int
    ) -> None:
        self.order = Order(measured.speeds, measured.sites)
        self._measured, self._score, self._groups = measured, score, groups
        self._tolerance, self._most, self._left = tolerance, most, most
        self._found: dict[Grouping, Candidate] = {}
        self._clusters = measured.links.clusterings() if measured.links is not None else []

    # -- what is looked at --------------------------------------------------------------------------------

    def by_speed(self) -> Candidate | None:
        """What the probe's queue makes of these speeds; of each number of groups from 2 to N - 1 the best."""
        count = len(self.order.workers)
        asked = [self._groups] if self._groups is not None else (range(2, count) if count > 2 else [count])
        found = [self._look(equal_runs(self.order.workers, groups), "by speed") for groups in asked]
        return self._preferred(found)

    def by_site(self) -> Candidate | None:
        """One group for each site, unless another number of groups is asked for."""
        sites = self._sites()
        return self._look(sites, "by site") if self._allowed(sites) else None

    def look_at(self, groupings: Iterable[Grouping], origin: str) -> list[Candidate]:
        """Score these, up to the bound, those that may not be chosen too."""
        return [self._look(grouping, origin) for grouping in itertools.islice(groupings, max(0, self._left))]

    def look_at_candidates(self) -> None:
        """What does not hang on the scores of others, each kind for a quarter of the bound at most; then the
        best runs of speed within each site, site after site."""
        workers, quarter = self.order.workers, self._left // 4
        self.look_at(
            [Grouping([workers]), Grouping([worker] for worker in workers)], "one ring, or each alone"
        )
        self.look_at(speed_runs(self.order, quarter, self._groups), "by speed")
        self.look_at(self._clusters, "by links")
        sites = self._sites()
        chosen = sites
        for site in self.order.runs(sites):
            options = by_site_and_speed(self.order, chosen, site, quarter // len(sites))
            found = self.look_at(options, "by site, then speed")
            chosen = min(found, key=_rank).grouping if found else chosen
        self._towards(sites)
        self._towards(chosen)

    def climb(self) -> None:
        """Local search from the best candidates, and from each worker alone: from there every grouping can be
        reached by merging. A quarter of the bound is kept for what follows."""
        alone = self._look(Grouping([worker] for worker in self.order.workers), "each alone")
        starts = self._ranked()[:_STARTS]
        if self._allowed(alone.grouping) and alone not in starts:
            starts.append(alone)
        for start in starts:
            here: Candidate | None = start
            while here is not None:
                here = self._better(here)

    def _better(self, here: Candidate) -> Candidate | None:
        """The first neighbour that is better than `here`; None: there is none, or the bound is near."""
        for grouping in neighbours(self.order, here.grouping, self._groups):
            if self._left <= self._most // 4:
                return None
            there = self._look(grouping, "by local search")
            if _rank(there) < _rank(here):
                return there
        return None

    def settle(self) -> None:
        """Merge groups of the best as long as that costs less than the tolerance."""
        settled: Candidate | None = None
        while self._groups is None and self._left > 0:
            chosen = self._preferred(self._ranked())
            if chosen is None or chosen == settled:
                return
            settled = chosen
            self.look_at(merges(self.order, chosen.grouping), "by merging")

    def _towards(self, grouping: Grouping) -> None:
        """From a grouping of another number of groups to the number asked for: the best merge or split, again
        and again, up to the bound."""
        while self._groups is not None and len(grouping) != self._groups:
            step = merges if len(grouping) > self._groups else splits
            found = self.look_at(step(self.order, grouping), "from the sites")
            if not found:
                return
            grouping = min(found, key=_rank).grouping

    def _sites(self) -> Grouping:
        """The sites; where they are not known, the most pronounced cluster of near workers."""
        if not self._measured.sites and self._clusters:
            return self._clusters[0]
        return sites_grouping(self._measured.sites, self.order.workers)

    def _look(self, grouping: Grouping, origin: str) -> Candidate:
        self._left -= 1
        found = self._found.get(grouping)
        if found is None:
            found = self._found[grouping] = Candidate(grouping, self._score(grouping), origin)
        return found

    def _allowed(self, grouping: Grouping) -> bool:
        return self._groups is None or len(grouping) == self._groups

    # -- what is chosen -----------------------------------------------------------------------------------

    def choice(self, by_speed: Candidate | None, by_site: Candidate | None) -> Choice:
        """The decision, from all that was looked at."""
        ranked = self._ranked()
        chosen = self._preferred(ranked)
        assert chosen is not None  # what the queue makes is always there
        runner_up = self._runner_up(chosen, ranked)
        reason = self._reason(chosen, ranked[0], runner_up, by_speed, by_site)
        return Choice(chosen.grouping, chosen.score, reason, runner_up, by_speed, by_site, len(self._found))

    def _ranked(self) -> list[Candidate]:
        """What may be chosen, the best first."""
        return sorted((each for each in self._found.values() if self._allowed(each.grouping)), key=_rank)

    def _preferred(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """Of those within the tolerance of the best, the one with the fewest groups."""
        ranked = sorted(candidates, key=_rank)
        least = ranked[0].score.samples_per_second * (1 - self._tolerance) if ranked else 0.0
        near = [each for each in ranked if each.score.samples_per_second >= least]
        return min(near, key=lambda each: len(each.grouping), default=None)

    def _runner_up(self, chosen: Candidate, ranked: list[Candidate]) -> Candidate | None:
        """The best that is another one in more than the names of like workers, and has no more groups; where
        there is none, with more."""
        shape = self.order.shape(chosen.grouping)
        others = (each for each in ranked if self.order.shape(each.grouping) != shape)
        fewer = [each for each in ranked if len(each.grouping) <= len(chosen.grouping)]
        return next((each for each in fewer if self.order.shape(each.grouping) != shape), next(others, None))

    def _reason(
        self,
        chosen: Candidate,
        best: Candidate,
        runner_up: Candidate | None,
        by_speed: Candidate | None,
        by_site: Candidate | None,
    ) -> str:
        limit = f", limited by {chosen.score.limit}" if chosen.score.limit else ""
        fewer = ""
        if _rank(best)[0] < _rank(chosen)[0]:
            fewer = (
                f"; {len(best.grouping)} groups would give {_figure(best)}, which is within "
                f"{self._tolerance:.0%}, and make updates staler"
            )
        first = f"{self._shown(chosen)} is predicted to give {_figure(chosen)} samples/s{limit}{fewer}."
        kinds = (("the runner-up", runner_up), ("speed alone", by_speed), ("site alone", by_site))
        others = [self._beside(kind, each, chosen) for kind, each in kinds if each is not None]
        return f"{first} Beside it: {', '.join(others)}." if others else first

    def _beside(self, kind: str, other: Candidate, chosen: Candidate) -> str:
        if other.grouping == chosen.grouping:
            return f"{kind} the same"
        return f"{kind} {_figure(other)} ({self._shown(other)})"

    def _shown(self, candidate: Candidate) -> str:
        return show(candidate.grouping, self._measured.name)


def _rank(candidate: Candidate) -> tuple[float, int]:
    """More samples first, then fewer groups; scores that differ by rounding alone are one. Of equals the one
    that was looked at first counts, and the order of looking is that of the workers' speeds."""
    return -float(f"{candidate.score.samples_per_second:.9e}"), len(candidate.grouping)


def _figure(candidate: Candidate) -> str:
    return f"{candidate.score.samples_per_second:.4g}"
