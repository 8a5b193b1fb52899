"""The groups of members that share each kind of chunk, and how members sum reports of chunks that groups own.

`atoll.memory.over` (memory/over.py) gives a chunk to groups of members; each group then has a chunk of its
own in that place. A vector that all members sum has a place for each group of such a chunk. A member fills
the place of its own group and leaves zeros in the others, so each place sums over one group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.moves.owners import Groups, Holding, Part, Share


class ChunkGroups:
    """The groups that share each chunk, as member `share.rank` sees them.

    Args:
        share: the groups by feature.
        features: each chunk's feature: "" for a chunk that all members share, else a name from
            `over.features_of`.

    Attributes:
        kinds: the features in use, "" first.
    """

    def __init__(self, share: Share, features: Sequence[str]) -> None:
        self._features = list(features)
        self.kinds = list(dict.fromkeys(["", *features]))
        self._groups = {kind: share.groups_of(kind) for kind in self.kinds}
        self._own = {kind: share.group_of(kind, share.rank) for kind in self.kinds}

    @property
    def is_apart(self) -> bool:
        """True if some chunk is not shared by all members."""
        return any(len(self.groups(kind)) > 1 for kind in self.kinds)

    def kind(self, chunk: int) -> str:
        """Return a chunk's kind: its feature. The same members share all chunks of one kind."""
        return self._features[chunk]

    def groups(self, kind: str) -> Groups:
        """Return the groups that each have chunks of this kind; all are of one size."""
        return self._groups[kind]

    def own(self, kind: str) -> int:
        """Return the number of this member's group in `groups(kind)`."""
        return self._own[kind]

    def spread(self, kind: str, values: Sequence[float]) -> list[float]:
        """Return `values` in the place of this member's group, and zeros in the places of the other
        groups."""
        groups, own = len(self.groups(kind)), self.own(kind)
        return [value if group == own else 0.0 for group in range(groups) for value in values]

    def heard(self, kind: str, told: Iterator[float], count: int) -> list[list[float]]:
        """Take the next sums of vectors made by `spread`: `count` values for each group."""
        return [[next(told) for _ in range(count)] for _ in self.groups(kind)]

    def seen_by(self, kind: str, holding: Holding, group: int) -> Holding:
        """Return the holding as a member of another group has it, for chunks of this kind.

        The i-th member of that group holds what the i-th member of this group holds here.
        """
        groups = self.groups(kind)
        names = dict(zip(groups[self.own(kind)], groups[group], strict=True))
        parts = [
            tuple(Part(names[part.member], part.begin, part.end) for part in parts)
            if self._features[chunk] == kind
            else parts
            for chunk, parts in enumerate(holding.parts)
        ]
        members = [
            groups[group] if self._features[chunk] == kind else members
            for chunk, members in enumerate(holding.groups)
        ]
        return Holding(tuple(members), tuple(parts))
