"""Shares of a group's members in each chunk. Source: docs/memory.md, "Members"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

# Elements: parts begin at multiples. Vector kernels advance by so many or fewer, so each element of a part is
# computed as in the whole chunk: in the vector loop, or in its remainder.
UNIT = 64
Groups: TypeAlias = "tuple[tuple[int, ...], ...]"  # groups of members; each member is in one of them


class Share(msgspec.Struct, frozen=True):
    """A member of a group that shares a model: `rank` of `count`.

    Args:
            apart: for a chunk group's feature, the groups of members that share its chunks; each group has
            its own chunks. All members share the other chunks.
        replicas: groups of members that each hold a replica of the whole model; empty: all members hold one.
    """

    rank: int
    count: int
    apart: dict[str, Groups] = {}
    replicas: Groups = ()

    def groups_of(self, feature: str) -> Groups:
        """Return the groups of members that share chunks of this feature, each its own chunks."""
        return self.apart.get(feature, (tuple(range(self.count)),))

    def group_of(self, feature: str, member: int) -> int:
        """Return the index of this member's group."""
        return next(i for i, group in enumerate(self.groups_of(feature)) if member in group)

    def holders_of(self, feature: str) -> tuple[int, ...]:
        """Return the members, this one included, that together hold this member's chunks of the feature."""
        if self.replicas:
            return next(group for group in self.replicas if self.rank in group)
        return self.groups_of(feature)[self.group_of(feature, self.rank)]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Elements `begin` to `end` of a chunk, which `member` holds."""

    member: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def overlap(self, begin: int, end: int) -> tuple[int, int]:
        """Return the bounds of the common elements with `begin` to `end`; empty unless the first is below the
        second."""
        return max(self.begin, begin), min(self.end, end)


class Holding(msgspec.Struct, frozen=True):
    """Distribution of each chunk's elements over the members: values and optimizer state.

    A member has at most one part of a chunk.

    Args:
        groups: `groups[i]` are the members that share chunk i, ascending; its gradients are summed over them.
            parts: `parts[i]` tile the elements of chunk i (`Chunk.extent`) in order; none is empty, and a
            member may have none.
            replicas: holdings of all replicas of the model, this one included, in the order of their groups.
            Sums then continue over the holders of the same elements in the other groups.
    """

    groups: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[Part, ...], ...]
    replicas: tuple[Holding, ...] = ()

    @property
    def of_replicas(self) -> tuple[Holding, ...]:
        """Holdings of all replicas, at least one."""
        return self.replicas or (self,)

    def members_of(self, chunk: int) -> tuple[int, ...]:
        """Return the members that share this chunk."""
        return self.groups[chunk]

    def part(self, chunk: int, member: int) -> tuple[int, int]:
        """Return the bounds of the member's elements of the chunk; (0, 0) if it has none."""
        for part in self.parts[chunk]:
            if part.member == member:
                return part.begin, part.end
        return 0, 0

    def arriving(self, chunk: int) -> int:
        """Return the elements of room for a chunk's values, or its gradients' sum, to arrive at a member.

        Equal on all members.
        """
        extent = self.parts[chunk][-1].end
        if any(len(replica.parts[chunk]) == 1 for replica in self.of_replicas):
            return extent  # the gradients come in rounds
        return max(extent, self._summed_at_once(chunk))

    def summed_in_rounds_of(self, chunk: int, room: int) -> int:
        """Return the chunk's elements that are summed at once, with `room` elements for arrivals.

        All of the chunk if there is room for the gradients that then come to each member. Equal on all
        members.
        """
        if self._summed_at_once(chunk) <= room:
            return self.parts[chunk][-1].end
        return room // max(self._gradients_to(replica, chunk) for replica in self.of_replicas)

    def _summed_at_once(self, chunk: int) -> int:
        """Return the most elements that come to any member if the whole chunk is summed at once."""
        return max(
            self._gradients_to(replica, chunk) * max(part.numel for part in replica.parts[chunk])
            for replica in self.of_replicas
        )

    def _gradients_to(self, replica: Holding, chunk: int) -> int:
        """Return the gradients of its part that come to a member at once.

        One from each member of its group, itself included; then one from each other group.
        """
        return max(len(replica.groups[chunk]), len(self.of_replicas) - 1)


def split_evenly(extents: Sequence[int], groups: Sequence[Sequence[int]]) -> Holding:
    """Split each chunk evenly over the members of its group (symmetric sharding).

    Shares differ by at most one `UNIT`. A chunk without elements belongs to its group's first member.

    Args:
        extents: number of elements of each chunk.
        groups: members that share each chunk.
    """
    parts = []
    for extent, group in zip(extents, groups, strict=True):
        units, count = -(-extent // UNIT), len(group)
        bounds = [min(units * i // count * UNIT, extent) for i in range(count + 1)]
        of_members = zip(group, bounds, bounds[1:], strict=False)
        own = tuple(Part(member, begin, end) for member, begin, end in of_members if end > begin)
        parts.append(own or (Part(group[0], 0, 0),))
    return Holding(tuple(map(tuple, groups)), tuple(parts))


def deal_whole(
    extents: Sequence[int],
    nbytes: Sequence[int],
    groups: Sequence[Sequence[int]],
    seconds: Sequence[float] = (),
) -> Holding:
    """Give each chunk to one member of its group (asymmetric sharding), as `owners_of` does."""
    owners = owners_of(nbytes, groups, seconds)
    parts = tuple((Part(owner, 0, extent),) for owner, extent in zip(owners, extents, strict=True))
    return Holding(tuple(map(tuple, groups)), parts)


def owners_of(
    nbytes: Sequence[int], groups: Sequence[Sequence[int]], seconds: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return the owner of each chunk, a member of its group.

    The largest chunk comes first; each goes to the member that then has the least of this group's chunks: the
    fewest bytes, or, with `seconds`, the smallest part of all bytes or of all seconds, whichever part is
    larger. Equal sizes give equal owners everywhere. By bytes no member gets more than the mean plus one
    chunk.

    Args:
        nbytes: each chunk's size at home.
        seconds: how long each chunk's step takes; empty: as its bytes.
    """
    sizes: list[tuple[float, ...]] = [(size,) for size in nbytes]
    if seconds and sum(seconds) > 0:
        sizes = [
            (size / max(sum(nbytes), 1), took / sum(seconds))
            for size, took in zip(nbytes, seconds, strict=True)
        ]
    owners = [0] * len(nbytes)
    loads: dict[tuple[tuple[int, ...], int], tuple[float, ...]] = {}  # by group and member
    for chunk in sorted(range(len(nbytes)), key=lambda chunk: (-max(sizes[chunk]), chunk)):
        group = tuple(groups[chunk])
        then = {
            member: tuple(map(sum, zip(loads.get((group, member), (0, 0)), sizes[chunk], strict=False)))
            for member in group
        }
        owner = min(group, key=lambda member: (max(then[member]), member))
        owners[chunk] = owner
        loads[group, owner] = then[owner]
    return tuple(owners)
