"""A cache of equal blocks: which chunk is brought, where to, and which leaves for it.

The same decisions serve the device's arena (its keys are chunks) and the host's (payloads, the rest lies on
disk). docs/memory.md has the rules and what they promise; S2, part 6.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from atoll.core.errors import UserError
from atoll.moves.order import NEVER, Order
from atoll.moves.places import Places
from atoll.moves.ranking import Ranking

K = TypeVar("K", bound=Hashable)

Policy = Literal["belady", "lru", "fifo"]

LONGEST = 1_000_000  # uses of one step that are recorded at most; a longer step leaves the order as it was
REACH = 8  # a use that comes before its turn is looked for in the next 1/REACH of the order


class Full(UserError):
    """Nothing can leave for a use; the use changed nothing and may be tried again.

    `least_blocks`: a cache of this size would have served it.
    """

    def __init__(self, key: Hashable, count: int, blocks: int, held: int, least_blocks: int) -> None:
        super().__init__(
            f"{key!r} takes {count} blocks in a row, and of {blocks} blocks {held} hold what is in use: "
            f"{least_blocks} blocks would do"
        )
        self.least_blocks = least_blocks


@dataclass(frozen=True, slots=True)
class Eviction(Generic[K]):
    """`chunk` leaves; where `write_back`, its content was changed and must be saved first."""

    chunk: K
    write_back: bool


@dataclass(frozen=True, slots=True)
class Decision(Generic[K]):
    """Evict, in this order, then have `chunk` in its blocks, the first of which is `place`."""

    chunk: K
    hit: bool  # it is there already
    bring: bool  # copy its content there: no hit, and the use does not overwrite all of it
    evict: tuple[Eviction[K], ...]
    place: int
    reason: str


@dataclass(slots=True)
class StepStatistics:
    """What one step's uses came to. A move made ahead is counted in the step for whose use it was made."""

    planned: bool = False  # the order was known
    uses: int = 0
    hits: int = 0  # found in place, prefetched ones among them
    unforeseen: int = 0  # uses that the order did not have, or not yet
    skipped: int = 0  # uses that the order had and that did not come
    moves_in: int = 0  # chunks brought
    blocks_in: int = 0
    prefetched: int = 0  # of moves_in: before the use
    evictions: int = 0
    write_backs: int = 0  # of changed content, at an eviction or asked for
    blocks_out: int = 0  # of the write-backs

    @property
    def misses(self) -> int:
        return self.uses - self.hits


class Cache(Generic[K]):
    """Who is in a cache of `blocks` blocks, and who leaves for whom.

    `sizes` gives the blocks of each key, one where it has none; it is read at each arrival, so it may grow.
    `policy`: "belady" lets the key leave whose next use lies farthest ahead, by the order recorded in the last
    step, and in the first step, with no order yet, the least recently used; "lru" and "fifo" are there to
    compare with.

    A use costs O(log n), and where something must leave, as much again for each held key that is passed over.
    """

    def __init__(self, blocks: int, sizes: Mapping[K, int] | None = None, *, policy: Policy = "belady") -> None:
        raise NotImplementedError

    def handle_use(
        self,
        chunk: K,
        *,
        writes: bool = False,
        fresh: bool = False,
        held: Callable[[K], bool] = lambda key: False,
    ) -> Decision[K]:
        """`chunk` is used now. `writes`: its content changes, and is written back when it leaves; `fresh`: all of
        it is overwritten, so nothing is brought. Who is `held` does not leave.

        Raises Full, with nothing changed, where not enough can leave.
        """
        raise NotImplementedError

    def poll_prefetch(self, held: Callable[[K], bool] = lambda key: False) -> Decision[K] | None:
        """What may be brought now, ahead of its use, with no more moves in all than without; None: nothing."""
        raise NotImplementedError

    def forget(self, chunk: K) -> None:
        """The content of `chunk` is void: its blocks are free, and nothing is written back. Nothing happens where
        it is not there, but that it was called is recorded: what is void by the end of each step is worth
        nothing to keep until the next."""
        raise NotImplementedError

    def handle_written_back(self, chunk: K) -> None:
        """What was changed has been saved, with no eviction."""
        raise NotImplementedError

    def handle_step_ended(self) -> StepStatistics:
        """The step is over: from now on its order is expected, each step anew, if it was not expected already.
        Says what the step came to."""
        raise NotImplementedError
