"""Which member of a group holds which part of each chunk. Source: docs/memory.md, "Members"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

# Elements of which a part begins on a multiple. Vector kernels go by so many or fewer, so that each element
# of a part is computed as it is within the whole chunk: by vectors, or by what finishes a loop.
UNIT = 64


Groups: TypeAlias = "tuple[tuple[int, ...], ...]"  # that share like chunks: each member is in one of them


class Share(msgspec.Struct, frozen=True):
    """A member of a group that shares a model: `rank` of `count`.

    `apart` says of chunk groups, by their feature, which members share them: those of one name are other
    chunks in each of these groups. All members share the rest. `replicas` are the groups of members that
    each hold a replica of the whole model between them; empty: all members hold one.
    """

    rank: int
    count: int
    apart: dict[str, Groups] = {}
    replicas: Groups = ()

    def groups_of(self, feature: str) -> Groups:
        """The groups of members that share chunks of this feature, each group chunks of its own."""
        return self.apart.get(feature, (tuple(range(self.count)),))

    def group_of(self, feature: str, member: int) -> int:
        """The number of the group among those that this member is in."""
        return next(i for i, group in enumerate(self.groups_of(feature)) if member in group)

    def holders_of(self, feature: str) -> tuple[int, ...]:
        """The members, this one among them, that hold chunks of this feature between them."""
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
        """What of elements `begin` to `end` lies in it: nothing, where the first is not below the second."""
        return max(self.begin, begin), min(self.end, end)


class Holding(msgspec.Struct, frozen=True):
    """Who holds what of each chunk: its values, and what the optimizer keeps for them.

    `groups[i]` are the members that share chunk i, ascending: its gradients are summed over them. `parts[i]`
    tile its elements (`Chunk.extent`) in their order, and no part is empty; a member of the group may have
    none. A member has at most one part of a chunk.

    Where there are `replicas` of the model, they are the holdings of all, in order of their groups, and this
    is one of them: sums then go on over those who hold the same elements in the other groups.
    """

    groups: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[Part, ...], ...]
    replicas: tuple[Holding, ...] = ()

    @property
    def of_replicas(self) -> tuple[Holding, ...]:
        """The holdings of all replicas, of which there is one at least."""
        return self.replicas or (self,)

    def members_of(self, chunk: int) -> tuple[int, ...]:
        """The members that share this chunk."""
        return self.groups[chunk]

    def part(self, chunk: int, member: int) -> tuple[int, int]:
        """From where to where this member holds the chunk's elements; (0, 0): nothing of it."""
        for part in self.parts[chunk]:
            if part.member == member:
                return part.begin, part.end
        return 0, 0

    def arriving(self, chunk: int) -> int:
        """Elements of room that a member needs while the chunk comes to it or its gradients are summed: all
        of it, or of each gradient that comes to it the part that it holds. The same for all members."""
        extent = self.parts[chunk][-1].end
        if any(len(held.parts[chunk]) == 1 for held in self.of_replicas):
            return extent  # the gradients come in rounds
        return max(extent, self._summed_at_once(chunk))

    def summed_in_rounds_of(self, chunk: int, room: int) -> int:
        """How many of a chunk's elements are summed at once with `room` for so many: all, where what comes
        to each member then has room. The same for all members."""
        if self._summed_at_once(chunk) <= room:
            return self.parts[chunk][-1].end
        return room // max(self._gradients_to(held, chunk) for held in self.of_replicas)

    def _summed_at_once(self, chunk: int) -> int:
        """Elements that come to a member, the most to any, where all of the chunk is summed at once."""
        return max(
            self._gradients_to(held, chunk) * max(part.numel for part in held.parts[chunk])
            for held in self.of_replicas
        )

    def _gradients_to(self, held: Holding, chunk: int) -> int:
        """How many gradients of its part come at once to a member of this replica: one of each member of its
        group, itself included; then one of each other group."""
        return max(len(held.groups[chunk]), len(self.of_replicas) - 1)


def split_evenly(extents: Sequence[int], groups: Sequence[Sequence[int]]) -> Holding:
    """Split each chunk evenly over the members of its group (symmetric sharding).

    Shares differ by at most one `UNIT`. A chunk without elements belongs to its group's first member.

    Args:
        extents: the number of elements of each chunk.
        groups: the members among which each chunk is split.
    """
    parts = []
    for extent, group in zip(extents, groups, strict=True):
        units, count = -(-extent // UNIT), len(group)
        bounds = [min(units * i // count * UNIT, extent) for i in range(count + 1)]
        of_members = zip(group, bounds, bounds[1:], strict=False)
        own = tuple(Part(member, begin, end) for member, begin, end in of_members if end > begin)
        parts.append(own or (Part(group[0], 0, 0),))
    return Holding(tuple(map(tuple, groups)), tuple(parts))


def deal_whole(extents: Sequence[int], nbytes: Sequence[int], groups: Sequence[Sequence[int]]) -> Holding:
    """Asymmetric sharding: each chunk belongs to one member of its group. `nbytes` is what each takes at
    home."""
    owners = owners_of(nbytes, groups)
    parts = tuple((Part(owner, 0, extent),) for owner, extent in zip(owners, extents, strict=True))
    return Holding(tuple(map(tuple, groups)), parts)


def owners_of(nbytes: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """For each chunk the member of its group that owns it: the largest first, each to who has least so far of
    those of this group, by the bytes that a chunk takes at home. The same sizes give the same owners
    everywhere.

    Of the chunks of one group no member gets more than the mean and one chunk.
    """
    owners = [0] * len(nbytes)
    loads: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)  # what others share counts apart
    for chunk in sorted(range(len(nbytes)), key=lambda chunk: (-nbytes[chunk], chunk)):
        group = tuple(groups[chunk])
        owner = min(group, key=lambda member: (loads[group, member], member))
        owners[chunk] = owner
        loads[group, owner] += nbytes[chunk]
    return tuple(owners)
