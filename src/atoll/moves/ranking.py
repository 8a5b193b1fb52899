"""Who leaves first: what is in the cache, sorted by score."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Ranking(Generic[K]):
    """Keys by score, the highest first; of equal scores, who entered first.

    A sorted list: O(log n) comparisons a change. The shift of its pointers costs nothing beside a use's hook
    for the thousands of blocks that a cache has.
    """

    def __init__(self) -> None:
        self._sorted: list[tuple[int, int]] = []  # (score, -tick), ascending
        self._entry: dict[K, tuple[int, int]] = {}
        self._key: dict[int, K] = {}  # by -tick, which no two entries share: keys need not be comparable
        self._ticks = 0

    def __contains__(self, key: K) -> bool:
        return key in self._entry

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[K]:
        """Whoever leaves first comes first."""
        return (self._key[tick] for _, tick in reversed(self._sorted))

    def score(self, key: K) -> int:
        return self._entry[key][0]

    def enter(self, key: K, score: int) -> None:
        """Add the key, or give it another score; as the newest of its score."""
        if key in self._entry:
            self.remove(key)
        self._ticks += 1
        self._add(key, (score, -self._ticks))

    def rescore(self, key: K, score: int) -> None:
        """Another score for a key that stays as old as it was."""
        tick = self._entry[key][1]
        self.remove(key)
        self._add(key, (score, tick))

    def remove(self, key: K) -> None:
        entry = self._entry.pop(key)
        del self._key[entry[1]]
        del self._sorted[bisect_left(self._sorted, entry)]

    def _add(self, key: K, entry: tuple[int, int]) -> None:
        self._entry[key] = entry
        self._key[entry[1]] = key
        insort(self._sorted, entry)
