"""Predicted samples per second of a grouping of uneven workers on uneven links.

A group's period is its computing (a ring waits for its slowest member), its ring, and its exchange with the
server. Groups do not wait for one another, so the cluster's figure is the sum over groups of samples per
period. One group of all workers is the synchronous ring, which needs no server.

On equal nodes and links a group's period is its computing plus the time of the table in docs/planning.md: the
row "ring" for one group, the row "PS-HRA" for more (`tests/unit/test_throughput.py` checks it). On uneven
links, each step of a ring lasts as long as its slowest link; a ring goes site after site. A site's link and
the server's are shared: where groups together demand more than such a link carries, their sending is
stretched (`plan/contention.py`). Groups that meet at a link only by chance slow one another a little in
truth, but not in this model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.groups.chooser import Score
from atoll.groups.grouping import Grouping
from atoll.plan.cluster import Cluster
from atoll.plan.contention import Contention, Edge, GroupCost, Phase

# Resources that groups share, besides each site's links in each direction.
_SERVER_IN, _SERVER_OUT = "the server's link (in)", "the server's link (out)"
_SERVER_CPU = "the server's arithmetic"
_MOST_PERMUTED = 6  # most sites for which every order round a ring is tried


@dataclass(frozen=True)
class GroupPrediction:
    """One group's iteration, in seconds; `period` is the time from one to the next."""

    members: tuple[int, ...]
    compute: float
    ring: float
    exchange: float
    period: float


@dataclass(frozen=True)
class Prediction:
    """Predicted speed of a grouping. `limit` names a shared link that is full."""

    samples_per_second: float
    compute_only: float  # samples per second if sending took no time
    groups: tuple[GroupPrediction, ...]
    limit: str = ""


class Throughput:
    """Predict groupings of a cluster's workers, numbered in the file's order.

    A group's cost is cached, so further groupings with that group are cheap.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        links = [pair for one, other in cluster.between_sites for pair in ((one, other), (other, one))]
        self._things = [_SERVER_IN, _SERVER_OUT, _SERVER_CPU, *(self._link_name(*pair) for pair in links)]
        self._numbers = {name: number for number, name in enumerate(self._things, start=1)}
        self._costs: dict[tuple[tuple[int, ...], bool], GroupCost] = {}
        self._orders: dict[tuple[tuple[int, ...], float], list[int]] = {}

    @property
    def ceiling(self) -> float:
        """Samples per second without any waiting: the sum of speeds."""
        return sum(worker.speed for worker in self.cluster.workers)

    def synchronous(self) -> Prediction:
        """Predict one ring of all workers."""
        return self.predict(Grouping([range(len(self.cluster.workers))]))

    def compute_only(self, grouping: Grouping) -> Score:
        """Return the samples per second if sending took no time."""
        return Score(sum(self._computing(group) for group in grouping))

    def score(self, grouping: Grouping) -> Score:
        """Return the samples per second, communication included."""
        prediction = self.predict(grouping)
        return Score(prediction.samples_per_second, prediction.limit)

    def predict(self, grouping: Grouping) -> Prediction:
        """Predict a grouping, group by group."""
        costs = [self._cost(group, served=len(grouping) > 1) for group in grouping]
        together = Contention(costs, len(self._things), bool(self.cluster.pipeline))
        stretch = together.stretch()
        rings, exchanges = together.parts(stretch)
        groups = tuple(
            GroupPrediction(members, cost.compute, float(cost.adding + ring), float(exchange), float(period))
            for members, cost, ring, exchange, period in zip(
                grouping, costs, rings, exchanges, together.periods(stretch), strict=True
            )
        )
        total = sum(cost.samples / group.period for cost, group in zip(costs, groups, strict=True))
        fullest = int(stretch.argmax())
        return Prediction(
            samples_per_second=total,
            compute_only=sum(self._computing(group) for group in grouping),
            groups=groups,
            limit=self._things[fullest - 1] if stretch[fullest] > 1 else "",
        )

    def _computing(self, group: Sequence[int]) -> float:
        """Return the samples per second of a group that only computes."""
        speeds = [self.cluster.workers[member].speed for member in group]
        return sum(speeds) if self.cluster.work == "speed" else len(speeds) * min(speeds)

    # -- a group's phases ---------------------------------------------------------------------------------

    def _cost(self, group: tuple[int, ...], served: bool) -> GroupCost:
        if (group, served) not in self._costs:
            self._costs[group, served] = self._work_out(group, served)
        return self._costs[group, served]

    def _work_out(self, group: tuple[int, ...], served: bool) -> GroupCost:
        cluster, count = self.cluster, len(group)
        samples, size = count * cluster.batch, cluster.bytes
        share = size / count
        steps = self._around(group, share)
        ring: list[Phase] = []
        exchange: list[Phase] = []
        by_members = served and cluster.uplink == "members"
        if count > 1:  # reduce-scatter, and all-gather of the sum; by members, of the new parameters, later
            ring.append(Phase(count - 1 if by_members else 2 * (count - 1), steps))
        if served:
            applied = Phase(1, (Edge(0.0, size * cluster.compute, self._numbers[_SERVER_CPU]),))
            up, down = self._uplinks(group, by_members, up=True), self._uplinks(group, by_members, up=False)
            exchange += [*up, applied, *down]
            if count > 1 and by_members:
                exchange.append(Phase(count - 1, steps))
            elif count > 1:  # the broadcast
                exchange.append(Phase(1, self._around(group, size)))
        adding = (count - 1) * share * cluster.compute
        return GroupCost(samples, samples / self._computing(group), adding, ring, exchange)

    def _around(self, group: Sequence[int], size: float) -> tuple[Edge, ...]:
        """Return the links of a ring, site after site, in which each member sends `size` bytes to the
        next."""
        cluster = self.cluster
        by_site: dict[int, list[int]] = {}
        for member in group:
            by_site.setdefault(cluster.workers[member].site, []).append(member)
        sites = tuple(sorted(by_site))
        if (sites, size) not in self._orders:
            self._orders[sites, size] = self._site_order(sites, size)
        order = [member for site in self._orders[sites, size] for member in by_site[site]]
        edges: set[Edge] = set()
        for one, other in zip(order, [*order[1:], order[0]], strict=True):
            if one == other:
                break  # a ring of one has no links
            pipe = cluster.pipe(one, other)
            edges.add(Edge(pipe.latency, size / pipe.bandwidth))
            here, there = cluster.workers[one].site, cluster.workers[other].site
            if here != there and (min(one, other), max(one, other)) not in cluster.between_workers:
                path = cluster.path(here, there)
                edges.add(Edge(path.latency, size / path.bandwidth, self._link(here, there)))
        return _slowest(edges)

    def _site_order(self, sites: Sequence[int], size: float) -> list[int]:
        """Return the order of sites whose slowest link is fastest; of many sites, each is followed by the
        nearest left."""
        first, *others = sites
        if len(sites) <= 3:
            return [first, *others]
        if len(sites) > _MOST_PERMUTED:
            order = [first]
            while others:
                nearest = min(others, key=lambda site: (self._step(order[-1], site, size), site))
                others.remove(nearest)
                order.append(nearest)
            return order
        ways = ([first, *way] for way in itertools.permutations(others))
        return min(
            ways,
            key=lambda way: max(
                self._step(one, other, size) for one, other in zip(way, [*way[1:], way[0]], strict=True)
            ),
        )

    def _step(self, one: int, other: int, size: float) -> float:
        path = self.cluster.path(one, other)
        return path.latency + size / path.bandwidth

    def _uplinks(self, group: Sequence[int], by_members: bool, up: bool) -> list[Phase]:
        """Return the phases to the server (`up`) or back.

        By members, each sends its share at once. By the leader, which is drawn anew each time, the whole goes
        over each member's link equally often.
        """
        cluster, size = self.cluster, float(self.cluster.bytes)
        own = self._numbers[_SERVER_IN if up else _SERVER_OUT]
        share = size / len(group) if by_members else size
        ways: dict[tuple[int, float], int] = {}  # site and bandwidth -> members
        for member in group:
            worker = cluster.workers[member]
            ways[worker.site, worker.bandwidth] = ways.get((worker.site, worker.bandwidth), 0) + 1
        at_site: dict[int, int] = {}
        for (site, _), members in ways.items():
            at_site[site] = at_site.get(site, 0) + members
        phases: list[Phase] = []
        together: set[Edge] = set()
        for (site, bandwidth), members in ways.items():
            path = cluster.path(site, cluster.server_site)
            edges = {
                Edge(path.latency, share / bandwidth),
                Edge(path.latency, size / cluster.server.bandwidth, own),
            }
            if site != cluster.server_site:
                link = self._link(*((site, cluster.server_site) if up else (cluster.server_site, site)))
                sent = share * at_site[site] if by_members else size
                edges.add(Edge(path.latency, sent / path.bandwidth, link))
            together |= edges
            phases.append(Phase(members / len(group), _slowest(edges)))
        return [Phase(1, _slowest(together))] if by_members else phases

    def _link(self, one: int, other: int) -> int:
        return self._numbers[self._link_name(one, other)]

    def _link_name(self, one: int, other: int) -> str:
        return f"the link {self.cluster.sites[one].name} -> {self.cluster.sites[other].name}"


def _slowest(edges: set[Edge]) -> tuple[Edge, ...]:
    """Return the edges that may be the slowest: for each shared resource, none that another edge
    dominates."""
    kept: list[Edge] = []
    for edge in sorted(edges, key=lambda edge: (edge.shared, -edge.latency, -edge.sending)):
        if not any(
            other.shared == edge.shared and other.latency >= edge.latency and other.sending >= edge.sending
            for other in kept
        ):
            kept.append(edge)
    return tuple(kept)
