"""A tree over the fastest links: what is left where no ring goes, and better for small messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.core.errors import UserError
from atoll.rings.matrices import Matrix, Names, check_connected, checked


@dataclass(frozen=True)
class Tree:
    """Sums go up to `root`, the result comes down again; every link is used both ways.

    `parents[i]` is the member above member i, -1 for the root. `children[i]` are those below it, in the order
    in which it sends to them: those with the most steps below them first. `steps`: how many one after another
    a message takes down to all, where a member sends to one child at a time. `slowest` and `total` are
    bytes/s: of its slowest link, and of all together; no tree exceeds either.
    """

    root: int
    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    steps: int
    slowest: float
    total: float

    @property
    def links(self) -> list[tuple[int, int]]:
        """Each link, from the upper member to the lower."""
        return [(parent, member) for member, parent in enumerate(self.parents) if parent >= 0]

    @property
    def downwards(self) -> list[int]:
        """All members, each after the one above it."""
        found = [self.root]
        for member in found:
            found.extend(self.children[member])
        return found


def tree(
    bandwidths: Sequence[Sequence[float]] | Matrix,
    *,
    latencies: Sequence[Sequence[float]] | Matrix | None = None,
    score: Callable[[Tree], float] | None = None,
    names: Sequence[str] | None = None,
) -> Tree:
    """The maximum spanning tree: of all trees, that with the greatest sum of bandwidths and the fastest
    slowest link.

    The matrices are those of `order`; as a tree's link is used both ways, it counts with the slower
    direction. Among links of one bandwidth the tree takes the one over which a message comes soonest, by the
    count of steps (equal links all over make a binomial tree), or, with `latencies`, by the seconds from the
    root. `score` gives a tree's cost, lower is better: it chooses between these two; without it, the first is
    taken.

    Raises UserError as `order` does, but for the ring that there is not.
    """
    matrix = checked("bandwidths", bandwidths, names)
    delays = None if latencies is None else checked("latencies", latencies, names)
    if delays is not None and len(delays) != len(matrix):
        raise UserError(f"latencies of {len(delays)} members, and bandwidths of {len(matrix)}")
    both = np.minimum(matrix, matrix.T)
    check_connected(both, Names(names, len(matrix)))
    found = [_rooted(_spanning(both, None), both)]
    if delays is not None and score is not None:
        found.append(_rooted(_spanning(both, np.maximum(delays, delays.T)), both))
    return min(found, key=score) if score is not None else found[0]


def _spanning(both: Matrix, delays: Matrix | None) -> list[int]:
    """The member above each (Prim's algorithm), from the member with the most bandwidth on."""
    n = len(both)
    root = int(both.sum(axis=1).argmax())
    parents = [-1] * n
    inside = [root]
    outside = [member for member in range(n) if member != root]
    joined = np.zeros(n)  # when a message from the root has come: in steps, or in seconds
    sent = np.zeros(n)  # to how many a member has sent it
    while outside:
        links = both[np.ix_(inside, outside)]
        when = (joined[inside] + sent[inside] + 1)[:, None] + np.zeros(len(outside))
        if delays is not None:
            when = joined[inside][:, None] + delays[np.ix_(inside, outside)]
        place = int(np.where(links == links.max(), when, np.inf).argmin())
        row, column = divmod(place, len(outside))
        parent, member = inside[row], outside[column]
        parents[member] = parent
        joined[member] = when[row, column]
        sent[parent] += 1
        inside.append(member)
        outside.remove(member)
    return parents


def _rooted(parents: list[int], both: Matrix) -> Tree:
    """The tree with the root that takes the fewest steps: the one it has, or one in the middle of its longest
    path.
    """
    near: list[list[int]] = [[] for _ in parents]
    for member, parent in enumerate(parents):
        if parent >= 0:
            near[member].append(parent)
            near[parent].append(member)
    path = _farthest(near, _farthest(near, 0)[-1])
    middle = {path[(len(path) - 1) // 2], path[len(path) // 2]}
    roots = [parents.index(-1), *sorted(middle)]
    return min((_hung(near, root, both) for root in roots), key=lambda tree: tree.steps)


def _farthest(near: list[list[int]], start: int) -> list[int]:
    """A path from `start` to a member with the most links between."""
    above = {start: -1}
    queue = [start]
    for member in queue:
        for other in near[member]:
            if other not in above:
                above[other] = member
                queue.append(other)
    path = [queue[-1]]
    while above[path[-1]] >= 0:
        path.append(above[path[-1]])
    return path[::-1]


def _hung(near: list[list[int]], root: int, both: Matrix) -> Tree:
    parents = [-1] * len(near)
    downwards = [root]
    for member in downwards:
        for other in near[member]:
            if other != parents[member]:
                parents[other] = member
                downwards.append(other)
    children: list[tuple[int, ...]] = [()] * len(near)
    steps = [0] * len(near)  # from here down to all below
    for member in reversed(downwards):
        below = [other for other in near[member] if other != parents[member]]
        children[member] = tuple(sorted(below, key=lambda other: (-steps[other], other)))
        steps[member] = max((at + steps[other] for at, other in enumerate(children[member], 1)), default=0)
    links = [float(both[parent, member]) for member, parent in enumerate(parents) if parent >= 0]
    return Tree(root, tuple(parents), tuple(children), steps[root], min(links, default=np.inf), sum(links))
