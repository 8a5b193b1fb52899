"""The order of members round a ring: the one whose slowest link is fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import UserError
from atoll.rings import bounds, exact
from atoll.rings.matrices import Matrix, Names, check_connected, checked
from atoll.rings.search import Search

EXACT = 14  # members up to which the ring is the best there is; beyond, it is searched for


class NoRingError(UserError):
    """No ring through all members was found; says why."""


@dataclass(frozen=True)
class Ring:
    """A cyclic order of members: each sends to the next one, the last to the first.

    `slowest` and `bound` are in bytes/s: the slowest link that the ring goes over, and what no ring's
    slowest link exceeds; where they are equal nothing better can be found. A ring of one has no link, and
    both are infinite. `total` is the sum of its links' bandwidths, `latency` that of their latencies (0 where
    none were given). `work` is how many links were looked at to find it.
    """

    members: tuple[int, ...]
    slowest: float
    bound: float
    total: float
    latency: float
    work: int

    @property
    def links(self) -> list[tuple[int, int]]:
        """Who sends to whom; with two members, each to the other."""
        following = (*self.members[1:], self.members[0])
        return list(zip(self.members, following, strict=True)) if len(self.members) > 1 else []

    @property
    def proved(self) -> bool:
        return self.slowest == self.bound


def order(
    bandwidths: Sequence[Sequence[float]] | Matrix,
    *,
    latencies: Sequence[Sequence[float]] | Matrix | None = None,
    both_ways: bool = False,
    tolerance: float = 0.0,
    names: Sequence[str] | None = None,
) -> Ring:
    """The ring of all members whose slowest link is fastest (the bottleneck travelling salesman problem).

    `bandwidths[i][j]` are the bytes/s from member i to member j, 0 where there is no link; the diagonal is
    ignored. The ring goes one way, each member sending to its next, so that of a link whose two directions
    differ only one counts, and the order says which. With `both_ways` messages go round both ways at once
    (a part of the data each way), and a link counts with the slower of its directions.

    Among the rings with the same slowest link it is the one with the greatest sum of bandwidths, which
    crosses slow links as few times as it can; with `latencies` (seconds, the same shape) the one with the
    least sum of these. `tolerance`: links slower than the best bottleneck by up to this share of it are
    admitted in that choice, since measured bandwidths scatter.

    Up to 14 members the ring is the best one; beyond that a good one, from a bounded search (256 members:
    about a second). It begins with member 0; where both ways round are alike, it goes on to the lower
    neighbour.

    Raises UserError for a matrix that is not square or holds negative or missing numbers, for members that no
    link joins to the others; NoRingError (a UserError) where no ring through all members was found.
    """
    matrix = checked("bandwidths", bandwidths, names)
    called = Names(names, len(matrix))
    delays = None if latencies is None else checked("latencies", latencies, names)
    if delays is not None and len(delays) != len(matrix):
        raise UserError(f"latencies of {len(delays)} members, and bandwidths of {len(matrix)}")
    if not 0 <= tolerance < 1:
        raise UserError(f"tolerance = {tolerance}: must be a share, from 0 to below 1")
    if both_ways:
        matrix = np.minimum(matrix, matrix.T)
        delays = None if delays is None else np.maximum(delays, delays.T)
    if len(matrix) == 1:
        return Ring((0,), np.inf, np.inf, 0.0, 0.0, 0)
    check_connected(np.maximum(matrix, matrix.T), called)
    members, most, work, least = _found(matrix, delays, tolerance)
    ring = _ring(_from_the_first(members, matrix, delays, least), matrix, delays, most, work)
    if not ring.slowest:
        raise NoRingError(_no_ring(matrix, most, called))
    return ring


def _found(matrix: Matrix, delays: Matrix | None, tolerance: float) -> tuple[list[int], float, int, float]:
    """A ring's members, its bound, the work, and how slow its links may be; where its slowest link is 0,
    there is none or none was found.

    Members are sorted by what can be seen without their numbers, so that these matter to ties alone.
    """
    ranked = _ranked(matrix)
    weights = matrix[np.ix_(ranked, ranked)]
    costs = (-weights if delays is None else delays[np.ix_(ranked, ranked)]).copy()
    if len(weights) <= EXACT:
        ring, most, work = _exactly(weights, costs, tolerance)
        slowest = most
    else:
        search = Search(weights, symmetric=bool((weights == weights.T).all()))
        found, most = search.fastest()
        slowest = search.slowest(found)
        if slowest:
            found = search.cheapest(found, costs, weights >= slowest * (1 - tolerance))
        ring, work = found.tolist(), search.worked
    return [int(ranked[member]) for member in ring], most, work, slowest * (1 - tolerance)


def _exactly(weights: Matrix, costs: Matrix, tolerance: float) -> tuple[list[int], float, int]:
    slowest, ring = exact.best_cycle(np.where(weights > 0, weights, -np.inf), np.minimum)
    if not ring:
        return list(range(len(weights))), 0.0, exact.work(len(weights))
    allowed = weights >= slowest * (1 - tolerance)
    _, ring = exact.best_cycle(np.where(allowed, -costs, -np.inf), np.add)
    return ring, slowest, 2 * exact.work(len(weights))


def _ranked(matrix: Matrix) -> NDArray[np.int64]:
    """The members, those with the fastest links first; equal ones in the order given."""
    profile = np.hstack([-np.sort(-matrix, axis=1), -np.sort(-matrix, axis=0).T])
    ranked: NDArray[np.int64] = np.lexsort(-profile.T[::-1])
    return ranked


def _from_the_first(members: list[int], matrix: Matrix, delays: Matrix | None, least: float) -> list[int]:
    """The same ring from member 0 on; the other way round if that is better, or as good and begins lower.
    Links of `least` are fast enough."""
    at = members.index(0)
    forwards = members[at:] + members[:at]
    backwards = [forwards[0], *reversed(forwards[1:])]

    def merit(ring: list[int]) -> tuple[float, float, float]:
        made = _ring(ring, matrix, delays, 0.0, 0)
        rest = made.total if delays is None else -made.latency
        return min(made.slowest, least), rest, made.slowest

    one, other = merit(forwards), merit(backwards)
    if np.allclose(one, other, rtol=1e-12):
        return min(forwards, backwards)
    return max((one, forwards), (other, backwards))[1]


def _ring(members: list[int], matrix: Matrix, delays: Matrix | None, most: float, work: int) -> Ring:
    following = members[1:] + members[:1]
    links = matrix[members, following]
    late = 0.0 if delays is None else float(delays[members, following].sum())
    slowest = float(links.min())
    if len(members) == 2:
        most = slowest
    return Ring(tuple(members), slowest, max(most, slowest), float(links.sum()), late, work)


def _no_ring(matrix: Matrix, most: float, called: Names) -> str:
    """Why there is none, as far as it can be said."""
    for member in range(len(matrix)):
        neighbours = np.flatnonzero((matrix[member] > 0) | (matrix[:, member] > 0))
        if len(neighbours) == 1 and len(matrix) > 2:
            return (
                f"no ring goes through all members: {called.of(member)} has a link with "
                f"{called.of(int(neighbours[0]))} alone"
            )
    cutting = bounds.cuts(np.maximum(matrix, matrix.T) > 0)
    if cutting:
        return f"no ring goes through all members: without {called.of(cutting[0])} the others would be apart"
    if most == 0:
        return "no ring goes through all members: too few links, or too many that go one way only"
    return f"no ring through all {len(matrix)} members was found in the work that the search may take"
