"""The cache against every schedule that there is, on small orders; and what it may never do, on any."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atoll.moves import Cache, CachePlacement, Full, UseOrder, optimum

KEYS = range(5)
STEPS = 4


# -- every schedule ----------------------------------------------------------------------------------------


def least_moves(order: UseOrder[int], blocks: int, steps: int, resident: frozenset[int]) -> list[int]:
    """The fewest moves in the first k steps together, for each k: all contents at all times are tried."""
    contents = [frozenset(keys) for n in range(blocks + 1) for keys in itertools.combinations(KEYS, n)]
    costs = {resident: 0}
    found = []
    for _ in range(steps):
        for index, key in enumerate(order.uses):
            costs = _void(costs, order, index)
            made = {key} if not order.brings(index) else set()
            costs = {
                new: min(cost + len(new - old - made) for old, cost in costs.items())
                for new in contents
                if key in new
            }
        costs = _void(costs, order, len(order))
        found.append(min(costs.values()))
    return found


def _void(costs: dict[frozenset[int], int], order: UseOrder[int], index: int) -> dict[frozenset[int], int]:
    void = {key for key, at in order.voids if at == index}
    left: dict[frozenset[int], int] = {}
    for keys, cost in costs.items():
        left[keys - void] = min(cost, left.get(keys - void, cost))
    return left


def lru_moves(uses: Sequence[int], blocks: int, resident: Sequence[int]) -> int:
    """`resident`: the least recently used first."""
    there, moves = list(resident), 0
    for key in uses:
        if key in there:
            there.remove(key)
        else:
            moves += 1
            del there[: max(0, len(there) + 1 - blocks)]
        there.append(key)
    return moves


def fifo_moves(uses: Sequence[int], blocks: int, resident: Sequence[int]) -> int:
    """`resident`: who came first is first."""
    there, moves = list(resident), 0
    for key in uses:
        if key not in there:
            moves += 1
            del there[: max(0, len(there) + 1 - blocks)]
            there.append(key)
    return moves


@st.composite
def orders(draw: st.DrawFn, longest: int = 12, with_voids: bool = True) -> UseOrder[int]:
    uses = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=longest))
    if not with_voids:
        return UseOrder(uses)
    fresh = draw(st.sets(st.integers(0, len(uses) - 1), max_size=2))
    voids = draw(st.sets(st.tuples(st.sampled_from(KEYS), st.integers(0, len(uses))), max_size=4))
    return UseOrder(uses, fresh, voids)


def run_step(cache: Cache[int], order: UseOrder[int], prefetch: Callable[[], bool]) -> int:
    """One step of `order`; its moves."""
    for index, key in enumerate(order.uses):
        forget(cache, order, index)
        while prefetch() and cache.poll_prefetch():
            pass
        cache.handle_use(key, fresh=not order.brings(index))
    while prefetch() and cache.poll_prefetch():
        pass
    forget(cache, order, len(order))
    statistics = cache.handle_step_ended()
    assert statistics.uses == len(order)
    return statistics.moves_in


def forget(cache: Cache[int], order: UseOrder[int], index: int) -> None:
    for key, at in sorted(order.voids):
        if at == index:
            cache.forget(key)


@given(orders(), st.integers(1, 4), st.data())
def test_the_optimum_is_that_of_all_schedules(order: UseOrder[int], blocks: int, data: st.DataObject) -> None:
    resident = frozenset(data.draw(st.sets(st.sampled_from(KEYS), max_size=blocks)))
    found = optimum(order, blocks, steps=STEPS, resident=resident)
    assert list(itertools.accumulate(found)) == least_moves(order, blocks, STEPS, resident)


@pytest.mark.check
@given(orders(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_from_the_second_step_on_the_moves_are_the_optimum(
    order: UseOrder[int], blocks: int, random: Random
) -> None:
    """Of each step, with things prefetched now and then or not; and of every prefix, of all schedules."""
    for prefetch in (lambda: False, lambda: random.random() < 0.5, lambda: True):
        cache: Cache[int] = Cache(blocks)
        run_step(cache, order, prefetch)
        resident = cache.resident
        moves = [run_step(cache, order, prefetch) for _ in range(STEPS)]
        assert moves == optimum(order, blocks, steps=STEPS, resident=resident)
        assert list(itertools.accumulate(moves)) == least_moves(order, blocks, STEPS, frozenset(resident))


class Forgetful(Cache[int]):
    """Looks at each poll anew, whatever it has found at the last."""

    def poll_prefetch(self, held: Callable[[int], bool] = lambda _: False) -> CachePlacement[int] | None:
        self._barred = 0
        return super().poll_prefetch(held)


@given(
    orders(longest=30),
    st.dictionaries(st.sampled_from(KEYS), st.integers(1, 2)),
    st.integers(2, 5),
    st.randoms(use_true_random=False),
)
def test_what_is_known_of_the_next_miss_is_asked_again_when_it_changes(
    order: UseOrder[int], sizes: dict[int, int], blocks: int, random: Random
) -> None:
    caches = (Cache[int](blocks, sizes), Forgetful(blocks, sizes))
    for _ in range(STEPS):
        for index, key in enumerate(order.uses):
            gone = {key for key, at in order.voids if at == index}
            for each in gone | set(random.choices(KEYS, k=index % 2)):
                for cache in caches:
                    cache.forget(each)
            brought = True
            while brought:
                found, wanted = (cache.poll_prefetch() for cache in caches)
                assert found == wanted
                brought = found is not None
            first, second = (cache.handle_use(key, fresh=not order.brings(index)) for cache in caches)
            assert first == second
        assert caches[0].handle_step_ended() == caches[1].handle_step_ended()


@given(orders(longest=30, with_voids=False), st.integers(1, 4))
def test_lru_and_fifo_move_as_they_should_and_no_less_than_belady(order: UseOrder[int], blocks: int) -> None:
    caches = {policy: Cache[int](blocks, policy=policy) for policy in ("belady", "lru", "fifo")}
    first = {policy: run_step(cache, order, lambda: False) for policy, cache in caches.items()}
    assert first["belady"] == first["lru"] == lru_moves(order.uses, blocks, [])
    resident = lru_resident(order.uses, blocks)
    assert set(resident) == set(caches["belady"].resident) == set(caches["lru"].resident)
    moves = {
        policy: list(itertools.accumulate(run_step(cache, order, lambda: False) for _ in range(STEPS)))
        for policy, cache in caches.items()
    }
    for step in range(STEPS):
        uses = order.uses * (step + 1)
        assert moves["lru"][step] == lru_moves(uses, blocks, resident)
        assert first["fifo"] + moves["fifo"][step] == fifo_moves(order.uses * (step + 2), blocks, [])
        assert moves["belady"][step] <= moves["lru"][step]
        assert moves["belady"][step] <= fifo_moves(uses, blocks, resident)


def lru_resident(uses: Sequence[int], blocks: int) -> list[int]:
    """The last keys used, the least recently used first."""
    return list(dict.fromkeys(reversed(uses)))[:blocks][::-1]


# -- chunks that take several blocks -----------------------------------------------------------------------


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.dictionaries(st.integers(0, 2), st.integers(2, 4), max_size=3),
    st.integers(4, 12),
)
def test_with_large_chunks_the_moves_are_within_the_bound(
    uses: list[int], sizes: dict[int, int], blocks: int
) -> None:
    """Four times the largest for each large chunk that is brought (docs/memory.md derives it); the same moves
    with prefetching."""
    cache, ahead = Cache[int](blocks, sizes), Cache[int](blocks, sizes)
    order = UseOrder(uses)
    run_step(cache, order, lambda: False)
    run_step(ahead, order, lambda: True)
    resident = cache.resident
    least = itertools.accumulate(optimum(order, blocks, sizes, steps=STEPS, resident=resident))
    largest = max(sizes.values(), default=0)
    brought, bound = 0, largest * sum(key in sizes for key in resident)
    for lowest in least:
        for key in uses:
            decision = cache.handle_use(key)
            brought += decision.bring * sizes.get(key, 1)
            bound += 4 * largest * (decision.bring and key in sizes)
        moves = cache.handle_step_ended().moves_in
        assert run_step(ahead, order, lambda: True) == moves
        assert lowest <= brought <= lowest + bound


# -- any use at all ----------------------------------------------------------------------------------------


class World:
    """Memory with real contents (numbers that each write raises), moved as the cache says."""

    def __init__(self, blocks: int, sizes: dict[int, int]) -> None:
        self.cache: Cache[int] = Cache(blocks, sizes)
        self.sizes = sizes
        self.block: list[int | None] = [None] * blocks  # whose it is
        self.truth = dict.fromkeys(range(10), 0)
        self.home = dict(self.truth)
        self.here: dict[int, int] = {}
        self.changed: set[int] = set()
        self.held: set[int] = set()
        self.counts = [0, 0, 0]  # brought, written back, uses

    def use(self, key: int, writes: bool, fresh: bool) -> None:
        if key not in self.here and not self.fits(key):
            before = (sorted(self.cache.resident), sorted(self.cache.changed))
            with pytest.raises(Full) as full:
                self.cache.handle_use(key, writes=writes, fresh=fresh, held=self.held.__contains__)
            assert full.value.least_blocks > len(self.block)
            assert (sorted(self.cache.resident), sorted(self.cache.changed)) == before
            return
        decision = self.cache.handle_use(key, writes=writes, fresh=fresh, held=self.held.__contains__)
        assert decision.hit == (key in self.here)
        self.apply(decision)
        if fresh or writes:
            self.changed.add(key)
            self.truth[key] += 1
            self.here[key] = self.truth[key]
        self.counts[2] += 1
        assert self.here[key] == self.truth[key]

    def fits(self, key: int) -> bool:
        """Whether some run of blocks holds nobody who is held."""
        count = self.sizes.get(key, 1)
        runs = [self.block[first : first + count] for first in range(len(self.block) - count + 1)]
        return any(not self.held & set(run) for run in runs)

    def apply(self, decision: CachePlacement[int]) -> None:
        assert not (decision.hit and (decision.evict or decision.bring))
        for eviction in decision.evict:
            key = eviction.chunk
            assert key not in self.held
            value = self.here.pop(key)
            assert eviction.write_back == (key in self.changed)
            if eviction.write_back:
                self.changed.remove(key)
                self.home[key] = value
                self.counts[1] += 1
            assert self.home[key] == self.truth[key]
            self.block = [None if owner == key else owner for owner in self.block]
        count = self.sizes.get(decision.chunk, 1)
        place = slice(decision.place, decision.place + count)
        expected = decision.chunk if decision.hit else None
        assert self.block[place] == [expected] * count
        self.block[place] = [decision.chunk] * count
        if not decision.hit:
            self.here[decision.chunk] = self.home[decision.chunk] if decision.bring else -1
            self.counts[0] += decision.bring

    def prefetch(self) -> None:
        decision = self.cache.poll_prefetch(self.held.__contains__)
        if decision is not None:
            assert not decision.hit
            assert decision.bring
            assert decision.chunk not in self.here
            self.apply(decision)

    def forget(self, key: int) -> None:
        """Changed elsewhere; what is here is void."""
        if key not in self.held:
            self.truth[key] += 1
            self.home[key] = self.truth[key]
            self.here.pop(key, None)
            self.changed.discard(key)
            self.block = [None if owner == key else owner for owner in self.block]
            self.cache.forget(key)


KEY = st.integers(0, 9)
NAMES = ["use"] * 6 + ["prefetch"] * 2 + ["hold", "let go", "forget", "step"]
ACTIONS = st.tuples(st.sampled_from(NAMES), KEY, st.booleans(), st.sampled_from([False, False, True]))


@settings(max_examples=200)
@given(
    st.lists(ACTIONS, max_size=60),
    st.integers(2, 4),
    st.dictionaries(KEY, st.integers(1, 3), max_size=4),
    st.integers(1, 8),
)
def test_what_is_used_is_there_as_it_was_written_last(
    actions: list[tuple[str, int, bool, bool]], repeats: int, sizes: dict[int, int], blocks: int
) -> None:
    """With any uses, foreseen or not, and any that are held: each use finds what was written last, in blocks
    of its own; nobody leaves who is held; and a use is refused only where no run of blocks can be had."""
    world = World(blocks, sizes)
    brought = written_back = uses = 0
    for action, key, writes, fresh in [*actions, ("step", 0, False, False)] * repeats:
        if action == "use":
            world.use(key, writes, fresh)
        elif action == "hold":
            world.held |= {key} & world.here.keys()
        elif action == "let go":
            world.held.clear()
        elif action == "forget":
            world.forget(key)
        elif action == "prefetch":
            world.prefetch()
        else:
            ended = world.cache.handle_step_ended()
            brought += ended.moves_in
            written_back += ended.write_backs
            uses += ended.uses
        assert sorted(world.cache.resident) == sorted(world.here)
        assert set(world.cache.changed) == world.changed
        assert all(world.block[world.cache.place(key) or 0] == key for key in world.here)
    # What was made for a step that has not begun is counted with the second of these.
    for _ in range(2):
        ended = world.cache.handle_step_ended()
        brought += ended.moves_in
        written_back += ended.write_backs
        uses += ended.uses
    assert [brought, written_back, uses] == world.counts


@given(orders(with_voids=False), orders(with_voids=False), st.integers(1, 4))
def test_another_order_is_recorded_again(first: UseOrder[int], second: UseOrder[int], blocks: int) -> None:
    """The step in which it changes may move more than needed; from the next on it is the optimum again."""
    assume(first.uses != second.uses)
    cache: Cache[int] = Cache(blocks)
    for order in (first, first, second):
        run_step(cache, order, lambda: True)
    assert cache.order is not None
    assert cache.order.uses == second.uses
    resident = cache.resident
    expected = optimum(second, blocks, steps=STEPS, resident=resident)
    assert [run_step(cache, second, lambda: False) for _ in range(STEPS)] == expected
