"""Blocks of an arena: each chunk has a contiguous run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class BlockRange(NamedTuple):
    """`length` blocks from block `first` on."""

    first: int
    length: int

    @property
    def end(self) -> int:
        return self.first + self.length


class Places(Generic[K]):
    """Runs of the keys among `blocks` blocks.

    Chunks of one block are placed low and larger ones high, so that small ones do not fragment the runs that
    large ones need.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.runs: dict[K, BlockRange] = {}  # by key
        self._owner: dict[int, K] = {}  # by block; free ones have none
        self._free = [BlockRange(0, blocks)] if blocks else []  # ascending, no two adjacent

    @property
    def used(self) -> int:
        return len(self._owner)

    def occupy(self, key: K, first: int, count: int) -> None:
        """Give `key` these blocks, all of them free."""
        at = bisect_left(self._free, BlockRange(first + 1, 0)) - 1
        run = self._free[at]
        parts = [BlockRange(run.first, first - run.first), BlockRange(first + count, run.end - first - count)]
        self._free[at : at + 1] = [part for part in parts if part.length]
        self.runs[key] = BlockRange(first, count)
        self._owner.update(dict.fromkeys(range(first, first + count), key))

    def remove(self, key: K) -> BlockRange:
        """Free the blocks of `key` and return their run."""
        run = self.runs.pop(key)
        for block in range(run.first, run.end):
            del self._owner[block]
        first, end = run.first, run.end
        at = bisect_left(self._free, run)
        above, below = at, at
        if at < len(self._free) and self._free[at].first == end:
            end, above = self._free[at].end, at + 1
        if at and self._free[at - 1].end == first:
            first, below = self._free[at - 1].first, at - 1
        self._free[below:above] = [BlockRange(first, end - first)]
        return run

    def free_run(self, count: int) -> int | None:
        """Return the first of `count` contiguous free blocks, in the shortest run that fits; None if none
        does.

        O(free runs).
        """
        fits = [run for run in self._free if run.length >= count]
        if not fits:
            return None
        if count == 1:
            return min(fits, key=lambda run: (run.length, run.first)).first
        return max(fits, key=lambda run: (-run.length, run.first)).end - count

    def clear_run(self, count: int, leaving: Iterable[K]) -> tuple[int, list[K]] | None:
        """Return the first of `count` contiguous blocks that can be cleared, and the keys to evict.

        Keys leave one by one in the given order until such a run exists: its last key comes earliest in that
        order. Keys outside the run stay. None if all of them leave too little.
        """
        gone: set[K] = set()
        for key in leaving:
            gone.add(key)
            run = self.runs[key]
            low, high = run.first, run.end
            while run.first - low < count and low > 0 and self._empty(low - 1, gone):
                low -= 1
            while high - run.end < count and high < self.blocks and self._empty(high, gone):
                high += 1
            if high - low >= count:
                return self._cheapest(low, high, count)
        return None

    def tail(self, staying: Iterable[K]) -> int:
        """Return the number of blocks above the last of the `staying` keys."""
        return self.blocks - max((self.runs[key].end for key in staying), default=0)

    def _empty(self, block: int, gone: set[K]) -> bool:
        return block not in self._owner or self._owner[block] in gone

    def _cheapest(self, low: int, high: int, count: int) -> tuple[int, list[K]]:
        """Return the run between two blocks that gives up the fewest blocks, with its keys."""

        def leavers(first: int) -> list[K]:
            found, block = [], first
            while block < first + count:
                key = self._owner.get(block)
                if key is None:
                    block += 1
                else:
                    found.append(key)
                    block = self.runs[key].end
            return found

        def cost(first: int) -> tuple[int, int]:
            return sum(self.runs[key].length for key in leavers(first)), first if count == 1 else -first

        best = min(range(low, high - count + 1), key=cost)
        return best, leavers(best)
