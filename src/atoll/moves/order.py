"""The recorded order of use, repeated in each step."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Hashable, Sequence, Set
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

NEVER = sys.maxsize  # position of a use that never occurs


class UseOrder(Generic[K]):
    """Uses of one step, and the next use of each key if the step repeats without end.

    A position counts uses from the first of the recorded step: position p has use p % len(order).

    Args:
        fresh: indices of uses that overwrite all of the key's content.
            voids: pairs (key, i): the key's content is void before use i (i = len(uses): before the step's
            end), for example because the optimizer changed it elsewhere.
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
        # One ascending list for each key: use i as 2 i, a void before use i as 2 i - 1.
        self._events = {key: [2 * index for index in found] for key, found in self._uses.items()}
        for key, index in self.voids:
            if key in self._events:
                self._events[key].append(2 * index - 1)
        for key in {key for key, _ in self.voids} & self._events.keys():
            self._events[key].sort()

    def __len__(self) -> int:
        return len(self.uses)

    def at(self, position: int) -> K:
        """Return the key used at this position."""
        return self.uses[position % len(self.uses)]

    def brings(self, position: int) -> bool:
        """Return True if the use at this position needs the key's former content."""
        return position % len(self.uses) not in self.fresh

    def next_in_step(self, key: K, position: int) -> int:
        """Return the first use of `key` in the same step, from this position on; NEVER if there is none."""
        index = position % len(self.uses)
        found = self._uses.get(key, [])
        at = bisect_left(found, index)
        return NEVER if at == len(found) else position - index + found[at]

    def need_after(self, key: K, position: int) -> int:
        """Return the position that needs the content of `key` after the use at `position`.

        NEVER if the content becomes void or is overwritten before. O(log n).
        """
        return self._need(key, position, 2 * (position % len(self.uses)) + 1)

    def need_from(self, key: K, position: int, *, voided: bool = False) -> int:
        """Return the position that needs the content of `key` before the use at `position`.

        `voided`: a void at this position has already taken effect.
        """
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
