"""Order of a ring's members: each machine once, the slowest link as fast as possible, few long links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.rings.exact import Matrix, best_cycle

EXACT = 12  # most machines for an exact search; with more it is heuristic
TOLERANCE = 0.3  # relative: a slowest link within this of the best counts as equal, since figures scatter
MARGIN = 1.1  # least speed-up over the order of ranks for another order to be used

Order = tuple[int, ...]  # members, each of which sends to the next one, and the last to the first
Way = tuple[int, int]  # two machines, the lower first


@dataclass(frozen=True)
class LinkSpeed:
    """One link: its bandwidth in bytes/s, and its latency in seconds one way."""

    bandwidth: float
    latency: float


class Topology:
    """Machines of a ring's members, and the links between the machines.

    Args:
        machines: of each member, by rank; numbered from 0 in the order of their first ranks.
            links: measured figures between two machines. A missing link counts as the slowest and the latest
            of these; without any, all links are equal.
    """

    def __init__(self, machines: Sequence[int], links: Mapping[Way, LinkSpeed] | None = None) -> None:
        self.machines, self.links = tuple(machines), dict(links or {})
        self.count = max(machines) + 1
        known = list(self.links.values()) or [LinkSpeed(1.0, 1.0)]
        shape = (self.count, self.count)
        self._bandwidths = np.full(shape, min(each.bandwidth for each in known))
        self._latencies = np.full(shape, max(each.latency for each in known))
        for (one, other), figures in self.links.items():
            self._bandwidths[one, other] = self._bandwidths[other, one] = figures.bandwidth
            self._latencies[one, other] = self._latencies[other, one] = figures.latency
        np.fill_diagonal(self._latencies, 0.0)

    @property
    def natural(self) -> Order:
        """The order of ranks."""
        return tuple(range(len(self.machines)))

    def crossings(self, order: Order) -> Counter[Way]:
        """Count how often a ring's links go from one machine to another, in either direction."""
        return Counter((min(way), max(way)) for way in self._ways(order))

    def slowest(self, order: Order) -> float:
        """Return the bandwidth of a ring's slowest link, in bytes/s. Members of a machine share its links."""
        loads = Counter(self._ways(order))
        return min((float(self._bandwidths[way]) / load for way, load in loads.items()), default=np.inf)

    def lap(self, order: Order, message: float) -> float:
        """Return the seconds in which a message of so many bytes goes once round an idle ring."""
        return float(sum(self._costs(message)[way] for way in self._ways(order)))

    def gain(self, order: Order, message: float) -> float:
        """Return how many times as fast as the order of ranks this order is at best, by the figures."""
        natural = self.natural
        fewer = self.lap(natural, message) / (self.lap(order, message) or 1.0)
        return max(fewer, self.slowest(order) / self.slowest(natural))

    def _ways(self, order: Order) -> list[tuple[int, int]]:
        at = [self.machines[member] for member in order]
        return [way for way in zip(at, at[1:] + at[:1], strict=True) if way[0] != way[1]]

    def _costs(self, message: float) -> Matrix:
        costs = self._latencies + message / self._bandwidths
        np.fill_diagonal(costs, 0.0)
        return costs

    def best(self, message: float) -> Order:
        """Return the order whose slowest link is fastest; of equal ones the one with the shortest lap.

        It visits each machine once, and the members of a machine by rank, from member 0 on.
        """
        costs = self._costs(message)
        ring = self._exactly(costs) if self.count <= EXACT else _searched(costs)
        back = [ring[0], *reversed(ring[1:])]
        ring = min(ring, back)  # both directions have the same figures: take one always
        return tuple(member for machine in ring for member, at in enumerate(self.machines) if at == machine)

    def _exactly(self, costs: Matrix) -> list[int]:
        if self.count <= 3:  # there is only one ring
            return list(range(self.count))
        fastest = best_cycle(_without_diagonal(self._bandwidths), np.minimum)
        slowest = min(self._bandwidths[way] for way in zip(fastest, fastest[1:] + fastest[:1], strict=True))
        admitted = np.where(self._bandwidths >= slowest * (1 - TOLERANCE), -costs, -np.inf)
        return best_cycle(_without_diagonal(admitted), np.add)


def _without_diagonal(weights: Matrix) -> Matrix:
    weights = weights.copy()
    np.fill_diagonal(weights, -np.inf)
    return weights


def _searched(costs: Matrix) -> list[int]:
    """Return a short cycle through many machines: nearest neighbour, improved by 2-opt (Croes, 1958).

    Costs are squared, since the slowest link sets a ring's pace.
    """
    squares = costs**2
    ring, left = [0], set(range(1, len(costs)))
    while left:
        ring.append(min(left, key=lambda machine: (squares[ring[-1], machine], machine)))
        left.remove(ring[-1])
    order = np.array(ring)
    least = 1e-9 * float(squares.sum())
    while True:
        following = np.roll(order, -1)
        here = squares[order, following]
        # Change of the sum if the places after i, up to j, are reversed.
        changes = squares[np.ix_(order, order)] + squares[np.ix_(following, following)]
        changes -= here[:, None] + here[None, :]
        np.fill_diagonal(changes, 0.0)
        at = int(changes.argmin())
        if changes.flat[at] >= -least:
            return [int(machine) for machine in order]
        i, j = sorted(divmod(at, len(order)))
        order[i + 1 : j + 1] = order[i + 1 : j + 1][::-1].copy()


def is_same_ring(one: Order, other: Order) -> bool:
    """True where two orders join each member to the same two others."""
    at = other.index(one[0])
    turned = other[at:] + other[:at]
    return one in (turned, (turned[0], *reversed(turned[1:])))


def rounds(count: int) -> list[list[Way]]:
    """Return all pairs of `count` machines in rounds; in a round no machine is in two pairs.

    The circle method: one machine stays, the others move on by a place each round.
    """
    circle: list[int] = list(range(count + count % 2))  # the last may be nobody
    found = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found
