"""The joint chooser: scores candidate groupings by speeds and links, and takes the best, with a reason.

Candidates: one ring; each alone; the queue's groups, for each number of groups; contiguous runs in order of
speed; sites; clusters of near workers; runs of speed within each site; then the results of a local search
that merges, splits, moves and swaps from the best of these. For up to `EXHAUSTIVE` workers every grouping is
scored instead. Deterministic: no random numbers, no clock. At most about `MOST_SCORES` groupings are scored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from atoll.core.errors import UserError
from atoll.groups.candidates import (
    SpeedOrder,
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
TOLERANCE = 0.02  # share of samples/s that fewer groups may cost: measurements are no better

_INSIDE = "by site, then speed"
_STARTS = 3  # starting points of the local search


@dataclass(frozen=True)
class Score:
    """Predicted speed of a grouping. `limit` names its bottleneck in a few words."""

    samples_per_second: float
    limit: str = ""


ScoreFunction: TypeAlias = Callable[[Grouping], Score]


@dataclass(frozen=True)
class ProbeMeasurements:
    """Measurements of the probe.

    Without `sites`, clusters of near workers serve as sites if links are known. Raises UserError for no
    workers, too many, or an impossible speed.
    """

    speeds: Mapping[int, float]  # samples per second of each worker alone
    sites: Mapping[int, str] = field(default_factory=dict)
    links: Links | None = None
    name: Callable[[int], str] = str  # names of workers in the reason

    def __post_init__(self) -> None:
        if not 1 <= len(self.speeds) <= MOST_WORKERS:
            raise UserError(f"{len(self.speeds)} workers cannot be grouped; from 1 to {MOST_WORKERS} can")
        for worker, speed in self.speeds.items():
            if not 0 < speed < float("inf"):
                raise UserError(
                    f"worker {self.name(worker)} has a speed of {speed:g} samples/s; "
                    "it must be finite and above 0"
                )
        if self.links is not None and set(self.links.workers) != set(self.speeds):
            raise UserError("links and speeds are of different workers")


@dataclass(frozen=True)
class Candidate:
    """A grouping with its score and origin, such as `by speed`."""

    grouping: Grouping
    score: Score
    origin: str


@dataclass(frozen=True)
class Choice:
    """The chosen grouping, and alternatives.

    `by_speed` is the queue's grouping (with the best number of groups, unless one was requested); `by_site`
    has one group for each site. None if impossible.
    """

    grouping: Grouping
    score: Score
    reason: str
    runner_up: Candidate | None
    by_speed: Candidate | None
    by_site: Candidate | None
    scored: int  # number of groupings scored


def computing(speeds: Mapping[int, float], *, by_speed: bool = False) -> ScoreFunction:
    """Return a score function that ignores sending, for unknown links or an unknown size.

    A group counts as its slowest member's speed times its number of members; `by_speed`: as the sum of its
    members' speeds, since each has a part of the group's batch by its speed.
    """
    if by_speed:  # summed alike in any order, or the last bit would choose among groupings
        return lambda grouping: Score(math.fsum(speeds[worker] for group in grouping for worker in group))
    return lambda grouping: Score(sum(len(group) * min(speeds[w] for w in group) for group in grouping))


def choose(
    measured: ProbeMeasurements,
    score: ScoreFunction,
    *,
    groups: int | None = None,
    tolerance: float = TOLERANCE,
    most: int = MOST_SCORES,
    exhaustive: int = EXHAUSTIVE,
) -> Choice:
    """Return the grouping predicted to give the most samples per second; with `groups`, of that many groups.

    Of the groupings within `tolerance` of the most, the one with the fewest groups: a smaller gain cannot be
    told from noise, and each further group makes updates staler. About `most` groupings are scored, plus at
    most two for each worker. Raises UserError for an impossible number of groups.
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
    """Groupings scored so far.

    All loops follow the workers' order of speed, so renumbering workers changes only the numbers.
    """

    def __init__(
        self,
        measured: ProbeMeasurements,
        score: ScoreFunction,
        groups: int | None,
        tolerance: float,
        most: int,
    ) -> None:
        self.order = SpeedOrder(measured.speeds, measured.sites)
        self._measured, self._score, self._groups = measured, score, groups
        self._tolerance, self._most, self._left = tolerance, most, most
        self._found: dict[Grouping, Candidate] = {}
        self._clusters = measured.links.clusterings() if measured.links is not None else []

    # -- scoring ------------------------------------------------------------------------------------------

    def by_speed(self) -> Candidate | None:
        """Return the queue's grouping of these speeds: the best of 2 to N - 1 groups, or of the requested
        number."""
        count = len(self.order.workers)
        asked = [self._groups] if self._groups is not None else (range(2, count) if count > 2 else [count])
        found = [self._look(equal_runs(self.order.workers, groups), "by speed") for groups in asked]
        return self._preferred(found)

    def by_site(self) -> Candidate | None:
        """Return one group for each site; None if another number of groups is requested."""
        sites = self._sites()
        return self._look(sites, "by site") if self._allowed(sites) else None

    def look_at(self, groupings: Iterable[Grouping], origin: str) -> list[Candidate]:
        """Score these groupings, up to the bound, even those that may not be chosen."""
        return [self._look(grouping, origin) for grouping in itertools.islice(groupings, max(0, self._left))]

    def look_at_candidates(self) -> None:
        """Score the candidates that do not depend on other scores, then the best runs of speed in each site.

        Runs of speed may use a quarter of the bound, and so may the runs within sites.
        """
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
        """Search locally from the best candidates, and from each worker alone.

        Every grouping can be reached from the latter by merging. A quarter of the bound is kept for later.
        """
        alone = self._look(Grouping([worker] for worker in self.order.workers), "each alone")
        starts = self._ranked()[:_STARTS]
        if self._allowed(alone.grouping) and alone not in starts:
            starts.append(alone)
        for start in starts:
            here: Candidate | None = start
            while here is not None:
                here = self._better(here)

    def _better(self, here: Candidate) -> Candidate | None:
        """Return the first neighbour better than `here`; None if there is none, or the bound is near."""
        for grouping in neighbours(self.order, here.grouping, self._groups):
            if self._left <= self._most // 4:
                return None
            there = self._look(grouping, "by local search")
            if _rank(there) < _rank(here):
                return there
        return None

    def settle(self) -> None:
        """Merge groups of the best grouping as long as that costs less than the tolerance."""
        settled: Candidate | None = None
        while self._groups is None and self._left > 0:
            chosen = self._preferred(self._ranked())
            if chosen is None or chosen == settled:
                return
            settled = chosen
            self.look_at(merges(self.order, chosen.grouping), "by merging")

    def _towards(self, grouping: Grouping) -> None:
        """Take the best merge or split repeatedly until the grouping has the requested number of groups."""
        while self._groups is not None and len(grouping) != self._groups:
            step = merges if len(grouping) > self._groups else splits
            found = self.look_at(step(self.order, grouping), "from the sites")
            if not found:
                return
            grouping = min(found, key=_rank).grouping

    def _sites(self) -> Grouping:
        """Return the sites, or if unknown the most pronounced clusters of near workers."""
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

    # -- choosing -----------------------------------------------------------------------------------------

    def choice(self, by_speed: Candidate | None, by_site: Candidate | None) -> Choice:
        """Return the decision among all groupings scored."""
        ranked = self._ranked()
        chosen = self._preferred(ranked)
        assert chosen is not None  # the queue's grouping always exists
        runner_up = self._runner_up(chosen, ranked)
        reason = self._reason(chosen, ranked[0], runner_up, by_speed, by_site)
        return Choice(chosen.grouping, chosen.score, reason, runner_up, by_speed, by_site, len(self._found))

    def _ranked(self) -> list[Candidate]:
        """Return the groupings that may be chosen, the best first."""
        return sorted((each for each in self._found.values() if self._allowed(each.grouping)), key=_rank)

    def _preferred(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """Return the candidate with the fewest groups among those within the tolerance of the best."""
        ranked = sorted(candidates, key=_rank)
        least = ranked[0].score.samples_per_second * (1 - self._tolerance) if ranked else 0.0
        near = [each for each in ranked if each.score.samples_per_second >= least]
        return min(near, key=lambda each: len(each.grouping), default=None)

    def _runner_up(self, chosen: Candidate, ranked: list[Candidate]) -> Candidate | None:
        """Return the best candidate that differs in more than the names of equal workers.

        One with no more groups than the chosen one, or if there is none, with more.
        """
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
    """Return the sort key: more samples first, then fewer groups; rounding is ignored.

    Of equal candidates the first one scored counts, and scoring follows the workers' order of speed.
    """
    return -float(f"{candidate.score.samples_per_second:.9e}"), len(candidate.grouping)


def _figure(candidate: Candidate) -> str:
    return f"{candidate.score.samples_per_second:.4g}"
