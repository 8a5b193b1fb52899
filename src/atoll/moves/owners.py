"""Which member of a group owns which chunk, where each belongs to one member whole. Source: S2, part 4."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec


class Share(msgspec.Struct, frozen=True):
    """A member of a group that shares a model: `rank` of `count`."""

    rank: int
    count: int


def owners_of(nbytes: Sequence[int], members: int) -> tuple[int, ...]:
    """For each chunk the member that owns it: the largest first, each to who has least so far, by the bytes
    that a chunk takes at home. The same sizes give the same owners everywhere.

    No member gets more than the mean and one chunk.
    """
    owners = [0] * len(nbytes)
    loads = [(0, member) for member in range(members)]
    for chunk in sorted(range(len(nbytes)), key=lambda chunk: (-nbytes[chunk], chunk)):
        load, owners[chunk] = heapq.heappop(loads)
        heapq.heappush(loads, (load + nbytes[chunk], owners[chunk]))
    return tuple(owners)
