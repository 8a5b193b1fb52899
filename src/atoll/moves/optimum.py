"""The least that any schedule can move, for an order of use that is known and repeats."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def optimum(
    order: Sequence[K],
    blocks: int,
    sizes: Mapping[K, int] | None = None,
    *,
    steps: int = 1,
    resident: Iterable[K] = (),
    expiring: Set[K] = frozenset(),
) -> list[int]:
    """Blocks brought in each of `steps` steps that use keys in `order`, such that no schedule that begins with
    `resident` in the cache brings fewer in the first k steps together, whatever k is.

    The keys in `expiring` are void at the end of each step. With keys of one block these are moves, and the
    bound is met. With larger ones it is a lower bound: keys may lie in parts, anywhere.
    """
    raise NotImplementedError
