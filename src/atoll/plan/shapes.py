"""What a ring, a set of rings or a tree costs over links that differ: the score that `atoll.rings` chooses
by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.plan import cost
from atoll.rings import Ring, Rings, Shape, Tree

Rows = Sequence[Sequence[float]]


def score(
    *, bandwidths: Rows, latencies: Rows | None = None, size: float, compute: float = 0.0
) -> Callable[[Shape], float]:
    """A function from a shape to the seconds in which it sums `size` bytes of each member and gives all the
    result.

    `bandwidths[i][j]` in bytes/s and `latencies[i][j]` in seconds (0 without them) are of the link from
    member i to member j; `compute` is seconds for each byte that is added up.
    """

    def seconds(shape: Shape) -> float:
        if isinstance(shape, Ring):
            return ring_seconds(shape, size=size, compute=compute)
        if isinstance(shape, Rings):
            return rings_seconds(shape, latencies=latencies, size=size, compute=compute)
        return tree_seconds(shape, bandwidths=bandwidths, latencies=latencies, size=size, compute=compute)

    return seconds


def ring_seconds(ring: Ring, *, size: float, compute: float) -> float:
    """The ring of the table, with its slowest link's bandwidth and its links' mean latency.

    Not the greatest latency: a message that waits for a long link has short ones before and behind it, and
    each lap goes over every link once. The slowest link carries 2(N - 1) pieces, one after another.
    """
    members = len(ring.members)
    if members == 1:
        return 0.0
    return cost.ring(
        nodes=members, size=size, bandwidth=ring.slowest, latency=ring.latency / members, compute=compute
    )


def rings_seconds(rings: Rings, *, latencies: Rows | None, size: float, compute: float) -> float:
    """All rings at once, each with its share of the data: they are as one ring of their bandwidth together,
    and as late as the one with the greatest mean latency.
    """
    members = len(rings.rings[0].members)
    late = max(_lap(ring.members, latencies) / members for ring in rings.rings)
    return cost.ring(nodes=members, size=size, bandwidth=rings.bandwidth, latency=late, compute=compute)


def tree_seconds(
    tree: Tree, *, bandwidths: Rows, latencies: Rows | None, size: float, compute: float
) -> float:
    """Up to the root and down again, all data in one piece.

    A member sends to its children one after another, S/B seconds for each, and takes from them one after
    another; of a link, the slower direction counts. One device with n - 1 children is S4's `one_device`.
    """
    down = [0.0] * len(tree.parents)  # from when a member has the result until all below have it
    up = [0.0] * len(tree.parents)  # from the beginning until a member has the sum of all below and itself
    for member in reversed(tree.downwards):
        busy = 0.0
        for child in tree.children[member]:
            busy += size / min(bandwidths[member][child], bandwidths[child][member])
            down[member] = max(down[member], busy + _late(latencies, member, child) + down[child])
        taken = 0.0
        for child in reversed(tree.children[member]):  # those with the most below them are done last
            carried = size / min(bandwidths[member][child], bandwidths[child][member])
            taken = max(taken, up[child] + _late(latencies, child, member)) + carried + size * compute
        up[member] = taken
    return up[tree.root] + down[tree.root]


def _late(latencies: Rows | None, source: int, target: int) -> float:
    return 0.0 if latencies is None else latencies[source][target]


def _lap(members: Sequence[int], latencies: Rows | None) -> float:
    return sum(
        _late(latencies, one, other) for one, other in zip(members, (*members[1:], members[0]), strict=True)
    )
