"""Several rings at once that share no link, and how much of the data goes round each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.core.errors import UserError
from atoll.rings.matrices import Matrix, Names, checked
from atoll.rings.search import Search

WORK = 400_000  # places on paths that the search may try; then the best set so far is taken
_A_RING = WORK // 200  # on all the rings of one width over what is left at one time
_ROTATIONS = 100  # links that rotations look at, for one place tried
_MOST_LINKS, _MOST_RINGS = 1000, 200  # between two members; in a set


@dataclass(frozen=True)
class Share:
    """One ring of a set: its members in order, how many links it takes between neighbours, and its part of
    the data, from 0 to 1."""

    members: tuple[int, ...]
    links: int
    share: float


@dataclass(frozen=True)
class Rings:
    """Rings that share no link. `links` is how many each member sends over at once, over all rings together,
    and `bandwidth` what these carry, bytes/s; no set of rings has more than `bound` links. `work` is how many
    places on paths were tried."""

    rings: tuple[Share, ...]
    links: int
    bandwidth: float
    bound: int
    work: int

    @property
    def proved(self) -> bool:
        """Whether no set could send over more links at once."""
        return self.links == self.bound


def disjoint(
    links: Sequence[Sequence[int]] | Matrix, *, bandwidth: float, names: Sequence[str] | None = None
) -> Rings:
    """The set of rings through all members that share no link and use the most links at once.

    `links[i][j]` is the number of links between members i and j, the same from i to j and from j to i; each
    carries `bandwidth` bytes/s each way at once, and a ring that takes w links between neighbours is w times
    as fast as one that takes one. Data is shared in that proportion, so that all rings are done together.
    Rings of many links are preferred to more rings of few. Messages may go both ways round each: a part of
    the data each way, on the other direction of the same links.

    Within `WORK` all sets are tried, until one is as good as any can be; where it does not suffice, `proved`
    may be False. Each ring begins with member 0 and goes on to the lower of its neighbours. Raises UserError
    for a matrix that is not square, not symmetric or holds anything but whole numbers, and where no ring goes
    through all members.
    """
    matrix = checked("links", links, names)
    called = Names(names, len(matrix))
    _check_counts(matrix, called)
    if not np.isfinite(bandwidth) or bandwidth <= 0:
        raise UserError(f"bandwidth = {bandwidth}: must be bytes/s of one link, above 0")
    if len(matrix) < 3:
        raise UserError(f"{len(matrix)} members make no set of rings: there must be three or more")
    counts: list[list[int]] = matrix.astype(int).tolist()
    packing = _Packing(counts)
    packing.search([], 0)
    if not packing.best:
        fewest = min(range(len(counts)), key=lambda member: (sum(map(bool, counts[member])), member))
        neighbours = sum(map(bool, counts[fewest]))
        raise UserError(
            f"no ring through all {len(counts)} members was found; {called.of(fewest)} has the fewest "
            f"neighbours, {neighbours}"
        )
    taken = packing.best_links
    shares = (Share(ring, wide, wide / taken) for ring, wide in _merged(packing.best))
    bound = packing.bound if packing.left_out or packing.worked >= WORK else taken  # all sets were tried
    return Rings(tuple(shares), taken, taken * bandwidth, bound, packing.worked)


def _check_counts(matrix: Matrix, called: Names) -> None:
    for wrong, why in (
        (matrix != np.floor(matrix), "must be a whole number of links"),
        (matrix != matrix.T, "must be the same number the other way"),
        (matrix > _MOST_LINKS, "must be a number of links, not a bandwidth"),
    ):
        if wrong.any():
            source, target = (int(index) for index in np.argwhere(wrong)[0])
            number = f"{matrix[source, target]:g}"
            raise UserError(f"links: from {called.of(source)} to {called.of(target)}: {number}: {why}")


def _merged(rings: Sequence[tuple[tuple[int, ...], int]]) -> list[tuple[tuple[int, ...], int]]:
    """Equal rings as one, the widest first."""
    wide: dict[tuple[int, ...], int] = {}
    for members, links in rings:
        wide[members] = wide.get(members, 0) + links
    return sorted(wide.items(), key=lambda ring: (-ring[1], ring[0]))


class _Packing:
    """Rings taken out of what is left of the links, the widest first, and put back where that led nowhere."""

    def __init__(self, left: list[list[int]]) -> None:
        self.left = left
        self.best: list[tuple[tuple[int, ...], int]] = []
        self.best_links = 0
        self.worked = 0
        self.left_out = False  # whether there are sets that were not tried
        self.bound = self._room()  # each ring goes over each member by two links

    def _room(self) -> int:
        return min(sum(row) for row in self.left) // 2

    @property
    def _over(self) -> bool:
        return self.best_links == self.bound or self.worked >= WORK

    def search(self, taken: list[tuple[tuple[int, ...], int]], links: int) -> None:
        if links > self.best_links:
            self.best, self.best_links = list(taken), links
        # Rings come in falling width, so that one set is not tried in every order.
        widest = min(max(map(max, self.left)), self._room(), taken[-1][1] if taken else self.bound)
        for wide in range(widest, 0, -1):
            for ring in self._rings(wide):
                if self._over or links + self._room() <= self.best_links:
                    return
                if len(taken) == _MOST_RINGS:
                    self.left_out = True
                    return
                self._take(ring, wide)
                self.search([*taken, (ring, wide)], links + wide)
                self._take(ring, -wide)

    def _take(self, ring: tuple[int, ...], wide: int) -> None:
        for one, other in zip(ring, (*ring[1:], ring[0]), strict=True):
            self.left[one][other] -= wide
            self.left[other][one] -= wide

    def _rings(self, wide: int) -> Iterator[tuple[int, ...]]:
        """Every ring over links of which `wide` are left, from member 0 on, lower neighbours first.

        A path goes on to neighbours that have the fewest others to go on to: they are the first to be cut
        off.
        """
        n = len(self.left)
        near = [[other for other in range(n) if row[other] >= wide] for row in self.left]
        if any(len(each) < 2 for each in near):
            return
        path, seen = [0], [False] * n
        seen[0] = True
        ahead = [iter(near[0])]
        tried = found = 0
        while path:
            if tried >= _A_RING or self.worked >= WORK:
                self.left_out = True
                yield from [] if found else self._rotated(wide)
                return
            member = next(ahead[-1], None)
            if member is None:
                ahead.pop()
                seen[path.pop()] = False
                continue
            if seen[member]:
                continue
            tried += 1
            self.worked += 1
            if len(path) == n - 1:
                if self.left[member][0] >= wide and path[1] < member:
                    found += 1
                    yield (*path, member)
                continue
            path.append(member)
            seen[member] = True
            open_ = [other for other in near[member] if not seen[other]]
            open_.sort(key=lambda other: sum(not seen[third] for third in near[other]))
            ahead.append(iter(open_))

    def _rotated(self, wide: int) -> list[tuple[int, ...]]:
        """At most one ring over links of which `wide` are left, by rotations: where links are many it is
        found soon, and a path that is only prolonged may be stuck.
        """
        if self.worked >= WORK:
            return []
        links = np.array(self.left) >= wide
        search = Search(links.astype(np.float64), symmetric=True)
        ring = search.repaired(search.greedy(), links, _ROTATIONS * (WORK - self.worked))
        self.worked += search.worked // _ROTATIONS
        if ring is None:
            return []
        members = [int(member) for member in np.roll(ring, -int(ring.argmin()))]
        return [tuple(min(members, [0, *reversed(members[1:])]))]
