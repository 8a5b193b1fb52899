"""Order of eviction: cached keys sorted by score."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Ranking(Generic[K]):
    """Keys by score, the highest first; of equal scores, the one that entered first.

    A sorted list: O(log n) comparisons for a change. For the thousands of blocks of a cache, the shift of its
    pointers is cheap beside a use's hook.
    """

    def __init__(self) -> None:
        self._sorted: list[tuple[int, int]] = []  # (score, -tick), ascending
        self._entry: dict[K, tuple[int, int]] = {}
        self._key: dict[int, K] = {}  # by -tick, which is unique: keys need not be comparable
        self._ticks = 0

    def __contains__(self, key: K) -> bool:
        return key in self._entry

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[K]:
        """Iterate in the order of eviction."""
        return (self._key[tick] for _, tick in reversed(self._sorted))

    def score(self, key: K) -> int:
        return self._entry[key][0]

    def enter(self, key: K, score: int) -> None:
        """Add the key, or give it another score, as the newest of that score."""
        if key in self._entry:
            self.remove(key)
        self._ticks += 1
        self._add(key, (score, -self._ticks))

    def rescore(self, key: K, score: int) -> None:
        """Give a key another score, with its old age."""
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
