"""Which members share which chunks, and what members tell one another of chunks that are not everybody's.

A chunk that was given to groups of members (memory/over.py) is another chunk in each of them. What all tell
in one vector, for such a chunk, has a place for each of its groups: a member fills its own group's, and the
sum over all members is each group's own sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.moves.owners import Groups, Holding, Part, Share


class Grouping:
    """What `share` means for the chunks of these features, as member `share.rank` sees them."""

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
        """Chunks of one kind are shared by the same members."""
        return self._features[chunk]

    def groups(self, kind: str) -> Groups:
        """The groups that have chunks of this kind, each its own; all of one size."""
        return self._groups[kind]

    def own(self, kind: str) -> int:
        """The number of this member's group among them."""
        return self._own[kind]

    def spread(self, kind: str, values: Sequence[float]) -> list[float]:
        """What this member tells of a chunk of this kind, in the place of its group."""
        groups, own = len(self.groups(kind)), self.own(kind)
        return [value if group == own else 0.0 for group in range(groups) for value in values]

    def heard(self, kind: str, told: Iterator[float], count: int) -> list[list[float]]:
        """The next of what was told in that way, `count` values for each group."""
        return [[next(told) for _ in range(count)] for _ in self.groups(kind)]

    def seen_by(self, kind: str, holding: Holding, group: int) -> Holding:
        """Who holds what of chunks of this kind in another group: the i-th of its members holds what the i-th
        of this one's does."""
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
