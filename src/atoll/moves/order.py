"""The recorded order of use, taken as cyclic over steps."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Hashable, Sequence, Set
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

NEVER = sys.maxsize  # the position of a use that does not come


class Order(Generic[K]):
    """One step's uses, and when each key is used next if the step repeats without end.

    A position counts uses from the first of the recorded step: position p is use p % length of a later step.
    `expiring` are keys whose content is void when a step ends (chunks that the optimizer changes elsewhere): to
    keep one for a later step is of no use, so such a next use is NEVER. `fresh` are indices of uses that
    overwrite all of the content, so that nothing is brought for them.
    """

    def __init__(self, uses: Sequence[K], expiring: Set[K] = frozenset(), fresh: Set[int] = frozenset()):
        self.uses = tuple(uses)
        self.expiring = frozenset(expiring)
        self.fresh = frozenset(fresh)
        self._places: dict[K, list[int]] = {}  # ascending indices of each key's uses
        for index, key in enumerate(self.uses):
            self._places.setdefault(key, []).append(index)

    def __len__(self) -> int:
        return len(self.uses)

    def at(self, position: int) -> K:
        """The key that is used at this position."""
        return self.uses[position % len(self.uses)]

    def next_use(self, key: K, position: int) -> int:
        """The first position from this one on at which `key` is used; NEVER where no use can have the content.
        O(log n)."""
        places = self._places.get(key)
        if places is None:
            return NEVER
        index = position % len(self.uses)
        found = bisect_left(places, index)
        if found < len(places):
            return position - index + places[found]
        return NEVER if key in self.expiring else position - index + len(self.uses) + places[0]

    def voids_before(self, key: K, position: int, use: int) -> bool:
        """Whether the content that `key` has at `position` is void before its use at `use`, in a later step."""
        return key in self.expiring and use // len(self.uses) > position // len(self.uses)
