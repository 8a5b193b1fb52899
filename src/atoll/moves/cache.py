"""A cache of equal blocks: which chunk comes in, where, and which chunk leaves for it.

The device's arena (keys are chunks) and the host's (keys are payloads; the others lie on disk) use the same
decisions. docs/memory.md, "Moves", has the rules and guarantees; the rule for one size and one cost is L. A.
Belady's (IBM Systems Journal 5, 1966).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Generic, Literal, TypeVar

from atoll.core.errors import UserError
from atoll.moves.order import NEVER, UseOrder
from atoll.moves.places import Places
from atoll.moves.ranking import Ranking

K = TypeVar("K", bound=Hashable)

Policy = Literal["belady", "lru", "fifo"]

LONGEST = 1_000_000  # uses recorded of one step; a longer step does not change the order
REACH = 8  # an early use is looked for in the next 1/REACH of the order
TRUST = 16  # foreseen uses in a row, after an unforeseen one, before prefetching goes on


def nobody(_: object) -> bool:
    """Return False: no key is held."""
    return False


class Full(UserError):  # noqa: N818 (as queue.Full)
    """No key can leave for a use. The use changed nothing and may be tried again.

    `least_blocks`: a cache of this size would have served the use.
    """

    def __init__(self, key: Hashable, count: int, blocks: int, held: int, least_blocks: int) -> None:
        super().__init__(
            f"{key!r} needs {count} contiguous blocks, and {held} of {blocks} blocks are in use: "
            f"{least_blocks} blocks would do"
        )
        self.least_blocks = least_blocks


@dataclass(frozen=True, slots=True)
class Eviction(Generic[K]):
    """`chunk` leaves. With `write_back` its content has changed and must be saved first."""

    chunk: K
    write_back: bool


@dataclass(frozen=True, slots=True)
class CachePlacement(Generic[K]):
    """Evict in this order, then have `chunk` in its blocks; the first of these is `place`."""

    chunk: K
    hit: bool  # in the cache already
    bring: bool  # copy the content: no hit, and the use does not overwrite all of it
    evict: tuple[Eviction[K], ...]
    place: int
    reason: str


@dataclass(slots=True)
class StepStatistics:
    """Counts of one step. A prefetch counts in the step of its use."""

    planned: bool = False  # an order was known
    uses: int = 0
    hits: int = 0  # found in place, prefetched ones among them
    unforeseen: int = 0  # uses that the order did not have, or not yet
    skipped: int = 0  # uses of the order that did not occur
    moves_in: int = 0  # chunks brought in
    blocks_in: int = 0
    prefetched: int = 0  # of moves_in: before the use
    evictions: int = 0
    write_backs: int = 0  # of changed content, at an eviction or on request
    blocks_out: int = 0  # of the write-backs

    @property
    def misses(self) -> int:
        return self.uses - self.hits

    def add(self, other: StepStatistics) -> None:
        """Add the counts of `other`."""
        for field in fields(self):
            if field.name != "planned":
                setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Cache(Generic[K]):
    """Contents of a cache of `blocks` blocks, and evictions.

    A use costs O(log n). An eviction adds O(log n) for each held key that is passed over. Two cases cost
    O(blocks log n): an unforeseen miss after a prefetch, and the end of a step whose order differs from the
    last.

    Args:
        sizes: blocks of each key, 1 for a missing one; read at each arrival, so it may grow.
            policy: "belady" evicts the key whose next use is farthest, by the order recorded in the last
            step; in the first step the least recently used one. "lru" and "fifo" exist for comparison.
    """

    def __init__(
        self, blocks: int, sizes: Mapping[K, int] | None = None, *, policy: Policy = "belady"
    ) -> None:
        self.blocks = blocks
        self.order: UseOrder[K] | None = None  # expected in each step
        self._sizes: Mapping[K, int] = {} if sizes is None else sizes
        self._policy = policy
        self._places: Places[K] = Places(blocks)
        self._ranking: Ranking[K] = Ranking()  # of cached keys; the score is the next use from `_seen` on
        self._changed: set[K] = set()  # keys to write back
        self._record: _Record[K] = _Record()
        # All uses before `_position` are past; those up to `_seen` are hits. The use at `_seen` is
        # prefetched; the keys leave that would leave at that use, so prefetching adds no move.
        self._position = 0
        self._seen = 0
        self._trust = TRUST  # foreseen uses in a row
        self._needed: dict[K, int] = {}  # the last use before `_seen` that each key is kept for
        self._barred = 0  # before this position a victim of the next prefetch is still to be used
        self.statistics = StepStatistics()  # of this step so far
        self._following = StepStatistics()  # of the next step

    # -- contents ------------------------------------------------------------------------------------------

    @property
    def resident(self) -> list[K]:
        """Keys in the cache."""
        return list(self._places.runs)

    @property
    def changed(self) -> list[K]:
        """Keys that must be written back before they leave."""
        return [key for key in self._places.runs if key in self._changed]

    def place(self, chunk: K) -> int | None:
        """Return the first block of `chunk`; None if it is not in the cache."""
        run = self._places.runs.get(chunk)
        return None if run is None else run.first

    # -- events --------------------------------------------------------------------------------------------

    def handle_use(
        self, chunk: K, *, writes: bool = False, fresh: bool = False, held: Callable[[K], bool] = nobody
    ) -> CachePlacement[K]:
        """Decide on a use of `chunk` now. Raises Full, with nothing changed, if not enough keys can leave.

        Args:
            writes: the use changes the content, which is written back when the chunk leaves.
            fresh: the use overwrites all content, so nothing is brought in.
            held: True for keys that must not leave.
        """
        before = self._position
        foreseen, skipped = self._follow(chunk)
        run = self._places.runs.get(chunk)
        if run is not None:
            decision = CachePlacement(chunk, True, False, (), run.first, "it is there")
            if not foreseen or self.order is None:
                self._touch(chunk)
        else:
            if self._seen > self._position:
                self._look_anew()  # it was expected to be in the cache
            found = self._room(chunk, held)
            if found is None:
                self._position = before
                self._look_anew()
                raise self._full(chunk, held)
            decision = self._arrive(chunk, *found, not fresh, self.statistics, 0)
        if writes or fresh:
            self._changed.add(chunk)
        self._record.add(chunk, fresh)
        self._trust = self._trust + 1 if foreseen and not skipped else 0
        self.statistics.uses += 1
        self.statistics.hits += decision.hit
        self.statistics.unforeseen += not foreseen
        self.statistics.skipped += skipped
        return decision

    def poll_prefetch(self, held: Callable[[K], bool] = nobody) -> CachePlacement[K] | None:
        """Return a chunk to bring in ahead of its use without adding moves; None if there is none.

        It is the order's next miss, and the keys leave that would leave at that use. So it waits while one of
        these is held or still to be used. This presumes the order: after an unforeseen use nothing is
        prefetched until `TRUST` foreseen ones in a row.
        """
        order = self.order
        if order is None or self._trust < TRUST or self._position < self._barred or not self._see():
            return None
        chunk = order.at(self._seen)
        found = self._room(chunk, nobody)
        if found is None:
            return None
        self._barred = 1 + max((self._needed.get(key, -1) for key in found[1]), default=-1)
        if self._position < self._barred or any(held(key) for key in found[1]):
            return None
        later = self._seen // len(order) > self._position // len(order)
        statistics = self._following if later else self.statistics
        statistics.prefetched += 1
        decision = self._arrive(chunk, *found, True, statistics, self._seen - self._position + 1)
        self._pass()
        return decision

    def forget(self, chunk: K) -> None:
        """Void the content of `chunk`: free its blocks, write nothing back.

        Call it for keys outside the cache too. It is recorded: content that is void by the end of each step
        is not worth keeping until the next.
        """
        self._record.void(chunk)
        if chunk in self._places.runs:
            self._leave(chunk)

    def resume(self, places: Mapping[K, int]) -> None:
        """Continue with only these keys, given by their first blocks, after a decision that was not carried
        out."""
        self._places, self._ranking = Places(self.blocks), Ranking()
        for key, first in places.items():
            self._places.occupy(key, first, self._sizes.get(key, 1))
            self._ranking.enter(key, 0)
        self._changed &= places.keys()
        self._look_anew()

    def handle_step_ended(self) -> StepStatistics:
        """End the step and return its statistics. Its order is expected of the next step.

        A step without any use does not change the order.
        """
        ended, self.statistics, self._following = self.statistics, self._following, StepStatistics()
        record, self._record = self._record, _Record()
        if self._policy == "belady" and record.uses and not record.cut and not self._expected(record, ended):
            self.order = UseOrder(record.uses, record.fresh, record.voids)
            ended.add(self.statistics)  # prefetches for a step that is no longer expected
            self.statistics = StepStatistics()
            self._position, self._trust = 0, TRUST
            self._look_anew()
        elif self.order is not None and self._position % len(self.order):
            self._position += -self._position % len(self.order)
            self._look_anew()
        self.statistics.planned = self.order is not None
        return ended

    def _expected(self, record: _Record[K], ended: StepStatistics) -> bool:
        """Return True if the ended step followed its order."""
        order = self.order
        if order is None or ended.unforeseen or ended.skipped or len(record.uses) != len(order):
            return False
        return record.fresh == order.fresh and record.voids == order.voids

    # -- position in the order -----------------------------------------------------------------------------

    def _follow(self, chunk: K) -> tuple[bool, int]:
        """Advance in the order by a use of `chunk`; return whether it was foreseen, and the uses skipped.

        An early use means that the few uses before it do not occur (an expert that got no tokens). If they
        are many, it counts as an additional use, and the expectation stays.
        """
        order = self.order
        if order is None:
            return True, 0
        use = order.next_in_step(chunk, self._position)
        skipped = use - self._position
        if skipped > len(order) // REACH:
            return False, 0
        self._position = use + 1
        while self._seen < self._position:
            self._pass()
        return True, skipped

    def _pass(self) -> None:
        """Advance `_seen` over a use that will be a hit: keep its key for this use, then for the next."""
        assert self.order is not None
        chunk = self.order.at(self._seen)
        if chunk in self._ranking:
            self._needed[chunk] = self._seen
            need = self.order.need_after(chunk, self._seen)
            # Of keys not needed again, the one used up first leaves first, so that a prefetch need not wait
            # for another key's last use.
            put = self._ranking.enter if need == NEVER else self._ranking.rescore
            put(chunk, need)
        self._seen += 1

    def _see(self) -> bool:
        """Advance `_seen` to the next miss; return True if it may be brought in before its use."""
        order = self.order
        if order is None or (self._record.uses and self._position % len(order) == 0):
            return False  # at a step's end its content may be about to become void
        while self._seen < self._position + len(order):
            chunk = order.at(self._seen)
            if chunk not in self._ranking:
                voided = (chunk, len(self._record.uses)) in self._record.voids
                return order.need_from(chunk, self._position, voided=voided) == self._seen
            if self._ranking.score(chunk) != self._seen:
                return False  # cached, but void before that use
            self._pass()
        return False

    def _look_anew(self) -> None:
        """Restart from `_position`: uses or the order differ from those expected at prefetching."""
        self._barred = 0
        if self.order is not None:
            self._seen = self._position
            self._needed.clear()
            for chunk in self._places.runs:
                self._ranking.rescore(chunk, self.order.need_from(chunk, self._position))

    # -- arrival and eviction ------------------------------------------------------------------------------

    def _room(self, chunk: K, held: Callable[[K], bool]) -> tuple[int, list[K]] | None:
        """Return the first block for `chunk` and the keys that must leave; None if not enough can leave."""
        count = self._sizes.get(chunk, 1)
        free = self._places.free_run(count)
        if free is not None:
            return free, []
        return self._places.clear_run(count, (key for key in self._ranking if not held(key)))

    def _arrive(
        self, chunk: K, place: int, leaving: list[K], bring: bool, statistics: StepStatistics, ahead: int
    ) -> CachePlacement[K]:
        """Evict `leaving` and put `chunk` at `place`, for the use that is `ahead` uses from now."""
        reason = self._reason(leaving, ahead)
        evictions = []
        for key in leaving:
            evictions.append(Eviction(key, key in self._changed))
            statistics.evictions += 1
            if key in self._changed:
                self._count_write_back(statistics, key)
            self._leave(key)
        count = self._sizes.get(chunk, 1)
        self._places.occupy(chunk, place, count)
        self._ranking.enter(chunk, 0 if self.order is None else self.order.need_after(chunk, self._seen - 1))
        statistics.moves_in += bring
        statistics.blocks_in += count * bring
        return CachePlacement(chunk, False, bring, tuple(evictions), place, reason)

    def _leave(self, chunk: K) -> None:
        self._barred = 0
        self._places.remove(chunk)
        self._ranking.remove(chunk)
        self._changed.discard(chunk)
        if self._needed.pop(chunk, -1) >= self._position:
            self._look_anew()

    def _touch(self, chunk: K) -> None:
        if self._policy != "fifo":
            self._ranking.enter(chunk, self._ranking.score(chunk))

    def _count_write_back(self, statistics: StepStatistics, chunk: K) -> None:
        statistics.write_backs += 1
        statistics.blocks_out += self._places.runs[chunk].length

    def _full(self, chunk: K, held: Callable[[K], bool]) -> Full:
        staying = [key for key in self._places.runs if held(key)]
        taken = sum(self._places.runs[key].length for key in staying)
        count = self._sizes.get(chunk, 1)
        least = taken + count
        if least <= self.blocks:  # enough room, but not contiguous: more blocks at the end would do
            least = self.blocks + count - self._places.tail(staying)
        return Full(chunk, count, self.blocks, taken, least)

    def _reason(self, leaving: list[K], ahead: int) -> str:
        use = f"used {ahead} uses from now" if ahead else "used now"
        if not leaving:
            return f"{use}; its blocks were free"
        if self.order is None:
            why = "came first" if self._policy == "fifo" else "was used least recently"
            return f"{use}; {leaving[0]!r} {why}"
        first = min(leaving, key=self._ranking.score)
        need = self._ranking.score(first)
        if need == NEVER:
            return f"{use}; {first!r} is not needed again"
        return f"{use}; {first!r} is needed again latest, {need - self._position + 1} uses from now"


class _Record(Generic[K]):
    """Uses of one step, recorded for an order."""

    def __init__(self) -> None:
        self.uses: list[K] = []
        self.fresh: set[int] = set()
        self.voids: set[tuple[K, int]] = set()
        self.cut = False  # too long for an order

    def add(self, key: K, fresh: bool) -> None:
        if len(self.uses) == LONGEST:
            self.cut = True
        else:
            if fresh:
                self.fresh.add(len(self.uses))
            self.uses.append(key)

    def void(self, key: K) -> None:
        if not self.cut:
            self.voids.add((key, len(self.uses)))
