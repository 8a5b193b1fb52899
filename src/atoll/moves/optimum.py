"""A lower bound of moves for a known, repeating order of use."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from heapq import heappop, heappush
from typing import Generic, TypeVar

from atoll.moves.order import NEVER, UseOrder

K = TypeVar("K", bound=Hashable)


def optimum(
    order: UseOrder[K],
    blocks: int,
    sizes: Mapping[K, int] | None = None,
    *,
    steps: int = 1,
    resident: Iterable[K] = (),
) -> list[int]:
    """Return the blocks brought in for each of `steps` steps of `order`, by the best schedule.

    No schedule that begins with `resident` in the cache brings fewer in the first k steps together, for any
    k. With keys of one block these are moves, and `Cache` makes no more. With larger keys it is a lower
    bound: here keys may lie anywhere, in parts. Evicting the part needed last is then optimal (Belady): each
    stay between two uses is an interval, and of too many at one time the one that ends last is given up.

    Raises ValueError if a key needs more than `blocks`, or `resident` do together.
    """
    cache = _Parts(order, blocks, {} if sizes is None else sizes)
    for key in resident:
        cache.keep(key, order.need_from(key, 0))
    if cache.used > blocks:
        raise ValueError(f"{cache.used} resident blocks exceed a cache of {blocks}")
    moved = [0] * steps
    for position in range(steps * len(order)):
        moved[position // len(order)] += cache.use(position)
    return moved


class _Parts(Generic[K]):
    """Cache of the best schedule: blocks of each key that will be needed, by time of need."""

    def __init__(self, order: UseOrder[K], blocks: int, sizes: Mapping[K, int]) -> None:
        self.order, self.blocks, self.sizes = order, blocks, sizes
        self.there: dict[K, int] = {}
        self.used = 0
        self.need: dict[K, int] = {}
        self.last: list[int] = []  # heap of negated needs; stale entries are skipped

    def use(self, position: int) -> int:
        """Return the blocks brought in for the use at this position."""
        key = self.order.at(position)
        count = self.sizes.get(key, 1)
        self.need.pop(key, None)
        here = self.there.pop(key, 0)
        self.used -= here
        if count > self.blocks:
            raise ValueError(f"{key!r} takes {count} blocks, and the cache has {self.blocks}")
        self._give_up(self.used + count - self.blocks)
        self.keep(key, self.order.need_after(key, position))
        return count - here if self.order.brings(position) else 0

    def keep(self, key: K, need: int) -> None:
        """Keep all of `key` until position `need`; NEVER: keep nothing."""
        if need != NEVER:
            self.there[key] = self.sizes.get(key, 1)
            self.used += self.there[key]
            self.need[key] = need
            heappush(self.last, -need)

    def _give_up(self, excess: int) -> None:
        while excess > 0:
            key = self.order.at(-self.last[0])
            if self.need.get(key) != -self.last[0] or not self.there[key]:
                heappop(self.last)
                continue
            part = min(excess, self.there[key])
            self.there[key] -= part
            self.used -= part
            excess -= part
