"""A cache of equal blocks: which chunk is brought, where to, and which leaves for it.

The same decisions serve the device's arena (its keys are chunks) and the host's (payloads, the rest lies on
disk). docs/memory.md, "Moves", has the rules and what they promise; the rule for one size and one cost is L.
A. Belady's (IBM Systems Journal 5, 1966).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Generic, Literal, TypeVar

from atoll.core.errors import UserError
from atoll.moves.order import NEVER, Order
from atoll.moves.places import Places
from atoll.moves.ranking import Ranking

K = TypeVar("K", bound=Hashable)

Policy = Literal["belady", "lru", "fifo"]

LONGEST = 1_000_000  # uses of one step that are recorded at most; a longer step leaves the order as it was
REACH = 8  # a use that comes before its turn is looked for in the next 1/REACH of the order
TRUST = 16  # uses in a row that must be as foreseen, after one that was not, before anything is brought ahead


def nobody(_: object) -> bool:
    """Whether it is held, where none is."""
    return False


class Full(UserError):  # noqa: N818 (as queue.Full)
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

    def add(self, other: StepStatistics) -> None:
        """Count what `other` counts, too."""
        for field in fields(self):
            if field.name != "planned":
                setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Cache(Generic[K]):
    """Who is in a cache of `blocks` blocks, and who leaves for whom.

    `sizes` gives the blocks of each key, one where it has none; it is read at each arrival, so it may grow.
    `policy`: "belady" lets the key leave whose next use lies farthest ahead, by the order recorded in the
    last step, and in the first step, with no order yet, the least recently used; "lru" and "fifo" are there
    to compare with.

    A use costs O(log n); where something must leave, as much again for each held key that is passed over.
    Two things cost O(blocks log n): a miss that was not foreseen after something was prefetched, and the end
    of a step with another order than the one before.
    """

    def __init__(
        self, blocks: int, sizes: Mapping[K, int] | None = None, *, policy: Policy = "belady"
    ) -> None:
        self.blocks = blocks
        self.order: Order[K] | None = None  # what is expected of each step
        self._sizes: Mapping[K, int] = {} if sizes is None else sizes
        self._policy = policy
        self._places: Places[K] = Places(blocks)
        self._ranking: Ranking[K] = Ranking()  # of who is there; the score is the next use from `_seen` on
        self._changed: set[K] = set()  # who must be written back
        self._record: _Record[K] = _Record()
        # Every use before `_position` has come; those up to `_seen` are of keys that are there. Prefetched is
        # what the use at `_seen` needs, and who leaves for it is who would leave then: it costs no move.
        self._position = 0
        self._seen = 0
        self._trust = TRUST  # uses in a row that were as foreseen
        self._needed: dict[K, int] = {}  # the last use before `_seen` that each key is kept for
        self._barred = 0  # until this position who would leave for what is at `_seen` is still to be used
        self.statistics = StepStatistics()  # of this step so far
        self._following = StepStatistics()  # the next step's

    # -- what is there -------------------------------------------------------------------------------------

    @property
    def resident(self) -> list[K]:
        """Who is in the cache."""
        return list(self._places.runs)

    @property
    def changed(self) -> list[K]:
        """Who must be written back before it leaves."""
        return [key for key in self._places.runs if key in self._changed]

    def place(self, chunk: K) -> int | None:
        """The first of its blocks; None where it is not there."""
        run = self._places.runs.get(chunk)
        return None if run is None else run.first

    # -- what happens --------------------------------------------------------------------------------------

    def handle_use(
        self, chunk: K, *, writes: bool = False, fresh: bool = False, held: Callable[[K], bool] = nobody
    ) -> Decision[K]:
        """`chunk` is used now. `writes`: its content changes, and is written back when it leaves; `fresh`:
        all of it is overwritten, so nothing is brought. Who is `held` does not leave.

        Raises Full, with nothing changed, where not enough can leave.
        """
        before = self._position
        foreseen, skipped = self._follow(chunk)
        run = self._places.runs.get(chunk)
        if run is not None:
            decision = Decision(chunk, True, False, (), run.first, "it is there")
            if not foreseen or self.order is None:
                self._touch(chunk)
        else:
            if self._seen > self._position:
                self._look_anew()  # it was thought to be there
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

    def poll_prefetch(self, held: Callable[[K], bool] = nobody) -> Decision[K] | None:
        """What may be brought now, ahead of its use, with no more moves in all than without; None: nothing.

        It is the next miss of the order, and who leaves is who would leave then; so it must wait while that
        one is still to be used before, or held. All this holds if the order does: after a use that was not
        foreseen nothing is brought ahead until `TRUST` in a row were.
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
        """The content of `chunk` is void: its blocks are free, and nothing is written back.

        Call it for who is not there too: it is recorded, since what is void by the end of each step is not
        worth keeping until the next.
        """
        self._record.void(chunk)
        if chunk in self._places.runs:
            self._leave(chunk)

    def resume(self, places: Mapping[K, int]) -> None:
        """Go on with these keys alone, by their first block, after a decision that was not carried out."""
        self._places, self._ranking = Places(self.blocks), Ranking()
        for key, first in places.items():
            self._places.occupy(key, first, self._sizes.get(key, 1))
            self._ranking.enter(key, 0)
        self._changed &= places.keys()
        self._look_anew()

    def handle_written_back(self, chunk: K) -> None:
        """What was changed in `chunk` has been saved, and it stays."""
        if chunk in self._changed:
            self._changed.remove(chunk)
            self._count_write_back(self.statistics, chunk)

    def handle_step_ended(self) -> StepStatistics:
        """The step is over, and its order is what is expected of the next, if it was not already. Says what
        the step came to. A step without any use leaves the order as it was."""
        ended, self.statistics, self._following = self.statistics, self._following, StepStatistics()
        record, self._record = self._record, _Record()
        if self._policy == "belady" and record.uses and not record.cut and not self._expected(record, ended):
            self.order = Order(record.uses, record.fresh, record.voids)
            ended.add(self.statistics)  # made for a step that was expected, and is not any more
            self.statistics = StepStatistics()
            self._position, self._trust = 0, TRUST
            self._look_anew()
        elif self.order is not None and self._position % len(self.order):
            self._position += -self._position % len(self.order)
            self._look_anew()
        self.statistics.planned = self.order is not None
        return ended

    def _expected(self, record: _Record[K], ended: StepStatistics) -> bool:
        """Whether the step that has ended was as its order says."""
        order = self.order
        if order is None or ended.unforeseen or ended.skipped or len(record.uses) != len(order):
            return False
        return record.fresh == order.fresh and record.voids == order.voids

    # -- where in the order it is --------------------------------------------------------------------------

    def _follow(self, chunk: K) -> tuple[bool, int]:
        """Go on in the order by a use of `chunk`: whether it was foreseen, and how many uses were skipped.

        A use that comes before its turn means that those between do not come, if they are few (an expert that
        got no tokens); otherwise it is one more, and what was expected is still expected.
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
        """Count the use at `_seen` as one that will come: who is there is kept for it, then for the next."""
        assert self.order is not None
        chunk = self.order.at(self._seen)
        if chunk in self._ranking:
            self._needed[chunk] = self._seen
            need = self.order.need_after(chunk, self._seen)
            # Of those that are not needed again, who is done with first leaves first, so that what is brought
            # ahead need not wait for another's last use.
            put = self._ranking.enter if need == NEVER else self._ranking.rescore
            put(chunk, need)
        self._seen += 1

    def _see(self) -> bool:
        """Go through what comes up to the next miss, at `_seen`; whether it may be brought before its use."""
        order = self.order
        if order is None or (self._record.uses and self._position % len(order) == 0):
            return False  # at the end of a step what would be brought may be about to be void
        while self._seen < self._position + len(order):
            chunk = order.at(self._seen)
            if chunk not in self._ranking:
                voided = (chunk, len(self._record.uses)) in self._record.voids
                return order.need_from(chunk, self._position, voided=voided) == self._seen
            if self._ranking.score(chunk) != self._seen:
                return False  # it is there, but will not be: it is void before
            self._pass()
        return False

    def _look_anew(self) -> None:
        """What comes next is not what was thought when things were prefetched, or the order is another."""
        self._barred = 0
        if self.order is not None:
            self._seen = self._position
            self._needed.clear()
            for chunk in self._places.runs:
                self._ranking.rescore(chunk, self.order.need_from(chunk, self._position))

    # -- coming and leaving --------------------------------------------------------------------------------

    def _room(self, chunk: K, held: Callable[[K], bool]) -> tuple[int, list[K]] | None:
        """The first of the blocks for `chunk`, and who must leave them; None where not enough can leave."""
        count = self._sizes.get(chunk, 1)
        free = self._places.free_run(count)
        if free is not None:
            return free, []
        return self._places.clear_run(count, (key for key in self._ranking if not held(key)))

    def _arrive(
        self, chunk: K, place: int, leaving: list[K], bring: bool, statistics: StepStatistics, ahead: int
    ) -> Decision[K]:
        """Let `leaving` leave, and have `chunk` at `place` for its use, the `ahead`th from now."""
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
        return Decision(chunk, False, bring, tuple(evictions), place, reason)

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
        if least <= self.blocks:  # there is room, but not in a row: more blocks at the end would do
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
    """What one step's uses are, as an order wants it."""

    def __init__(self) -> None:
        self.uses: list[K] = []
        self.fresh: set[int] = set()
        self.voids: set[tuple[K, int]] = set()
        self.cut = False  # it was too long, and is no order

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
