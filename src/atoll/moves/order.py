"""The recorded order of use, taken as cyclic over steps."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Hashable, Sequence, Set
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

NEVER = sys.maxsize  # the position of a use that does not come


class Order(Generic[K]):
    """The uses of one step, and when each key is used next if the step is repeated without end.

    A position counts uses from the first of the recorded step: at position p comes use p % len(order).
    `fresh` are indices of uses that overwrite all of the key's content. `voids` are pairs (key, i): what the
    key holds is void before use i comes (i = len(uses): before the step ends), because the optimizer has
    changed it elsewhere, say.
    """

    def __init__(
        self, uses: Sequence[K], fresh: Set[int] = frozenset(), voids: Set[tuple[K, int]] = frozenset()
    ) -> None:
        self.uses = tuple(uses)
        self.fresh = frozenset(fresh)
        self.voids = frozenset(voids)
        self._uses: dict[K, list[int]] = {}  # ascending indices, by key
        for index, key in enumerate(self.uses):
            self._uses.setdefault(key, []).append(index)
        # Both kinds in one ascending list for each key: use i as 2 i, what is void before it as 2 i - 1.
        self._events = {key: [2 * index for index in found] for key, found in self._uses.items()}
        for key, index in self.voids:
            if key in self._events:
                self._events[key].append(2 * index - 1)
        for key in {key for key, _ in self.voids} & self._events.keys():
            self._events[key].sort()

    def __len__(self) -> int:
        return len(self.uses)

    def at(self, position: int) -> K:
        """The key that is used at this position."""
        return self.uses[position % len(self.uses)]

    def brings(self, position: int) -> bool:
        """Whether the use at this position needs the content that the key had before."""
        return position % len(self.uses) not in self.fresh

    def next_in_step(self, key: K, position: int) -> int:
        """The first use of `key` in the same step, from this position on; NEVER if there is none."""
        index = position % len(self.uses)
        found = self._uses.get(key, [])
        at = bisect_left(found, index)
        return NEVER if at == len(found) else position - index + found[at]

    def need_after(self, key: K, position: int) -> int:
        """When what `key` holds after the use at `position` is needed: a position; NEVER if it is void or
        overwritten before. O(log n)."""
        return self._need(key, position, 2 * (position % len(self.uses)) + 1)

    def need_from(self, key: K, position: int, *, voided: bool = False) -> int:
        """Of what it holds before the use at `position`. `voided`: what is void there is so by now."""
        return self._need(key, position, 2 * (position % len(self.uses)) - (not voided))

    def _need(self, key: K, position: int, event: int) -> int:
        events = self._events.get(key)
        if not events:
            return NEVER
        start = position - position % len(self.uses)
        at = bisect_left(events, event)
        if at == len(events):
            at, start = 0, start + len(self.uses)
        use = start + events[at] // 2
        return NEVER if events[at] % 2 or not self.brings(use) else use
