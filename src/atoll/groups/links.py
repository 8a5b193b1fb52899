"""Measured links between workers, and clusters of near workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atoll.core.errors import UserError
from atoll.groups.grouping import Grouping

Matrix = npt.NDArray[np.float64]

_MOST_CLUSTERINGS = 6  # of each kind of matrix
_NO_GAP = 2.0  # factor: links whose bandwidths or latencies differ by less are of one kind


@dataclass(frozen=True)
class Links:
    """Links between `workers`: row i, column j is from the i-th to the j-th. The diagonal is ignored.

    `Links.of` checks the matrices.
    """

    workers: tuple[int, ...]
    bandwidth: Matrix  # (N, N) bytes per second, above 0; infinity where it limits nothing
    latency: Matrix  # (N, N) seconds one way, from 0 on

    @staticmethod
    def of(
        workers: Sequence[int],
        bandwidth: Sequence[Sequence[float]] | Matrix,
        latency: Sequence[Sequence[float]] | Matrix,
        name: Callable[[int], str] = str,
    ) -> Links:
        """Return checked links. Raises UserError, one line.

        The matrices must be square and of the right size, without a missing (NaN) or impossible bandwidth or
        latency.
        """
        return Links(
            tuple(workers),
            _checked(workers, bandwidth, "bandwidth", name),
            _checked(workers, latency, "latency", name),
        )

    def of_these(self, workers: Sequence[int]) -> Links | None:
        """Return the links of these workers alone; None if one of them has none here."""
        place = {worker: index for index, worker in enumerate(self.workers)}
        if not place.keys() >= set(workers):
            return None
        chosen = np.ix_([place[worker] for worker in workers], [place[worker] for worker in workers])
        return Links(tuple(workers), self.bandwidth[chosen], self.latency[chosen])

    def clusterings(self) -> list[Grouping]:
        """Return groupings of near workers, the most pronounced first; at most a dozen.

        Workers are joined link by link, best first (single linkage), once by bandwidth and once by latency. A
        grouping is taken where the next link is worse by a factor of 2 or more, for the greatest factors.
        """
        found: dict[Grouping, float] = {}
        for cost in (
            1 / np.minimum(self.bandwidth, self.bandwidth.T),
            np.maximum(self.latency, self.latency.T),
        ):
            for gap, grouping in _linkage(self.workers, cost)[:_MOST_CLUSTERINGS]:
                found[grouping] = max(gap, found.get(grouping, 0.0))
        return sorted(found, key=lambda grouping: (-found[grouping], grouping.groups))


def sites_grouping(sites: Mapping[int, str], workers: Sequence[int]) -> Grouping:
    """Return one group for each site; workers without a site form one group."""
    by_site: dict[str, list[int]] = {}
    for worker in workers:
        by_site.setdefault(sites.get(worker, ""), []).append(worker)
    return Grouping(by_site.values())


def _linkage(workers: Sequence[int], cost: Matrix) -> list[tuple[float, Grouping]]:
    """Return groupings, each with the factor by which the next link costs more, the greatest first."""
    order = np.argsort(cost, axis=None, kind="stable")
    root = list(range(len(workers)))
    merges: list[tuple[float, int, int]] = []
    for flat in order:
        row, column = divmod(int(flat), len(workers))
        first, second = _find(root, row), _find(root, column)
        if row != column and first != second:
            root[max(first, second)] = min(first, second)
            merges.append((float(cost[row, column]), row, column))
    gaps: list[tuple[float, int]] = []
    for index in range(1, len(merges)):
        before, after = merges[index - 1][0], merges[index][0]
        factor = after / before if before else (np.inf if after else 1.0)
        if factor >= _NO_GAP:
            gaps.append((float(factor), index))
    gaps.sort(key=lambda gap: (-gap[0], gap[1]))
    return [(gap, _joined(workers, merges[:count])) for gap, count in gaps]


def _joined(workers: Sequence[int], merges: Sequence[tuple[float, int, int]]) -> Grouping:
    root = list(range(len(workers)))
    for _, row, column in merges:
        first, second = _find(root, row), _find(root, column)
        root[max(first, second)] = min(first, second)
    groups: dict[int, list[int]] = {}
    for index, worker in enumerate(workers):
        groups.setdefault(_find(root, index), []).append(worker)
    return Grouping(groups.values())


def _find(root: list[int], index: int) -> int:
    while root[index] != index:
        root[index] = root[root[index]]
        index = root[index]
    return index


def _checked(
    workers: Sequence[int],
    rows: Sequence[Sequence[float]] | Matrix,
    what: str,
    name: Callable[[int], str],
) -> Matrix:
    count = len(workers)
    if len(rows) != count:
        raise UserError(f"{what}: {len(rows)} rows for {count} workers; the matrix has one for each")
    for worker, row in zip(workers, rows, strict=True):
        if len(row) != count:
            raise UserError(
                f"{what}: the row of worker {name(worker)} has {len(row)} numbers; a matrix of {count} "
                f"workers is square, {count} in each row"
            )
    matrix = np.array(rows, dtype=np.float64).reshape(count, count)
    least = np.finfo(np.float64).tiny if what == "bandwidth" else 0.0
    most = np.inf if what == "bandwidth" else np.finfo(np.float64).max
    wrong = ~((matrix >= least) & (matrix <= most))
    np.fill_diagonal(wrong, False)
    if wrong.any():
        row, column = (int(at) for at in np.argwhere(wrong)[0])
        given = float(matrix[row, column])
        link = f"{what}: the link from worker {name(workers[row])} to worker {name(workers[column])}"
        if np.isnan(given):
            raise UserError(f"{link} is missing; each two workers need one")
        unit = "bytes/s above 0" if what == "bandwidth" else "seconds, 0 or more"
        raise UserError(f"{link} is {given:g}; a {what} is a number of {unit}")
    np.fill_diagonal(matrix, np.inf if what == "bandwidth" else 0.0)
    return matrix
