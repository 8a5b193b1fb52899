"""The least that any schedule can move, for an order of use that is known and repeats."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from heapq import heappop, heappush
from typing import Generic, TypeVar

from atoll.moves.order import NEVER, Order

K = TypeVar("K", bound=Hashable)


def optimum(
    order: Order[K],
    blocks: int,
    sizes: Mapping[K, int] | None = None,
    *,
    steps: int = 1,
    resident: Iterable[K] = (),
) -> list[int]:
    """Blocks brought in each of `steps` steps that use what `order` says, such that no schedule that begins
    with `resident` in the cache brings fewer in the first k steps together, whatever k is.

    With keys of one block these are moves, and `Cache` makes no more. With larger ones it is a lower bound:
    here keys may lie anywhere, in parts. To let the part leave that is needed last is optimal then (Belady):
    each stay between two uses is an interval, and of too many at one time the one that ends last is given up.

    Raises ValueError where a key takes more than `blocks`, or `resident` do together.
    """
    cache = _Parts(order, blocks, {} if sizes is None else sizes)
    for key in resident:
        cache.keep(key, order.need_from(key, 0))
    if cache.used > blocks:
        raise ValueError(f"{cache.used} blocks are said to be in a cache of {blocks}")
    moved = [0] * steps
    for position in range(steps * len(order)):
        moved[position // len(order)] += cache.use(position)
    return moved


class _Parts(Generic[K]):
    """What the best schedule has in the cache: blocks of each key that will be needed, by when."""

    def __init__(self, order: Order[K], blocks: int, sizes: Mapping[K, int]) -> None:
        self.order, self.blocks, self.sizes = order, blocks, sizes
        self.there: dict[K, int] = {}
        self.used = 0
        self.need: dict[K, int] = {}
        self.last: list[int] = []  # a heap of negative needs; what is not in `need` any more is passed over

    def use(self, position: int) -> int:
        """Blocks brought for the use at this position."""
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
        """Keep all of `key` until it is needed, if it is."""
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
