"""Properties of the store, for any interleaving, any repetition, and deaths between any two messages."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cluster import Cluster, Contribution, clocks_after, in_order

from atoll.store.balance import balance
from atoll.store.entries import Apply, Combine, Fenced, Idle, Joined, StepWithMean
from atoll.store.leases import Leases
from atoll.store.ranges import Ranges
from atoll.wire.messages import Lease, Used

DEATHS = st.lists(st.tuples(st.integers(0, 250), st.booleans()), max_size=5)


def run(cluster: Cluster, deaths: list[tuple[int, bool]], restarts: Collection[int] = ()) -> None:
    """Deliver everything; at the given counts of deliveries someone dies, and may come back at once or later,
    and log and shards are started again.

    A run that cannot begin, since too few live, gets others in the place of the dead. Afterwards nobody who
    lives may still wait.
    """
    plan = sorted(deaths)
    revive: list[int] = []
    for delivered in range(200_000):
        if delivered in restarts:
            cluster.restart()
        while plan and plan[0][0] <= delivered and cluster.alive:
            _, comes_back = plan.pop(0)
            worker = cluster.rng.choice(sorted(cluster.alive))
            cluster.kill(worker)
            if comes_back:
                revive.append(worker)
        if revive and cluster.rng.random() < 0.1:
            cluster.start(revive.pop())
        if not cluster.deliver_one():
            if not revive and cluster.alive and not cluster.begun:
                gone = [worker for worker in range(cluster.workers) if worker not in cluster.alive]
                there = f"({cluster.workers - len(gone)} of {cluster.workers} workers are there"
                assert there in cluster.log.waiting_for()[0]
                revive += gone
            if not revive:
                break
            cluster.start(revive.pop())
    else:
        raise AssertionError("the deliveries have no end")
    stuck = [me for me in cluster.alive.values() if not me.finished]
    waits = [(me.worker, me.incarnation, me.wait, me.heard) for me in stuck]
    assert not stuck, f"{waits} for ever; the log waits for {cluster.log.waiting_for()}"


def check(cluster: Cluster) -> None:
    """What must hold once all is delivered."""
    entries = cluster.log.lines.entries
    assert len(entries) == cluster.log.lines.next_sequence
    counted: Counter[Contribution] = Counter()
    for entry in entries:
        if isinstance(entry, Combine):
            counted.update((m.worker, m.incarnation, entry.iteration) for m in entry.members)
        elif isinstance(entry, Apply):
            counted[entry.worker, entry.incarnation, entry.iteration] += 1
    assert set(counted.values()) <= {1}, "a contribution counts twice"
    for shard, runtime in enumerate(cluster.shards):
        followed = msgspec.msgpack.encode(runtime.entries)  # in which NaN equals itself
        assert followed == msgspec.msgpack.encode(entries), f"shard {shard} did not follow the log"
        assert runtime.counted == counted, f"shard {shard} applied other contributions"
        assert not runtime.held, f"shard {shard} still holds payloads of workers that are gone"
        assert not runtime.state.whole()
        assert not runtime.pulls.waiting()
    for me in cluster.alive.values():
        assert all(counted[me.worker, me.incarnation, k] for k in me.committed), (
            "Committed, but not in the log"
        )
    check_fences(cluster)
    check_rounds(cluster) if cluster.consistency == "bsp" else check_streams(cluster)


def check_fences(cluster: Cluster) -> None:
    fenced: dict[int, int] = {}
    for entry in cluster.log.lines.entries:
        if isinstance(entry, Fenced):
            assert entry.incarnation > fenced.get(entry.worker, 0)
            fenced[entry.worker] = entry.incarnation
        elif isinstance(entry, (Joined, Apply)):
            assert entry.incarnation > fenced.get(entry.worker, 0)
        elif isinstance(entry, Combine):
            assert all(m.incarnation > fenced.get(m.worker, 0) for m in entry.members)


def check_rounds(cluster: Cluster) -> None:
    """Combine and Step in turn, of one iteration after the other; members joined before it began."""
    turns = [e for e in cluster.log.lines.entries if isinstance(e, (Combine, StepWithMean))]
    for index, entry in enumerate(turns):
        assert entry.iteration == index // 2
        assert isinstance(entry, StepWithMean if index % 2 else Combine)
    joined: dict[tuple[int, int], int] = {}
    for entry in cluster.log.lines.entries:
        if isinstance(entry, Joined):
            joined[entry.worker, entry.incarnation] = entry.clock
        elif isinstance(entry, Combine):
            assert entry.members
            assert all(joined[m.worker, m.incarnation] <= entry.iteration for m in entry.members)


def check_streams(cluster: Cluster) -> None:
    """Every worker's iterations in its own order; in SSP, none begun more than slack before the slowest.

    And the steps: each is open from its first contribution to its last, has no more than there are workers,
    and its parts make a weighted mean."""
    in_step, left, idled = 0, 1.0, any(isinstance(entry, Idle) for entry in cluster.log.lines.entries)
    for index, entry in enumerate(cluster.log.lines.entries):
        if isinstance(entry, Apply):
            clocks = clocks_after(cluster.log.lines.entries[:index])
            assert clocks[entry.worker] == entry.iteration
            assert entry.staleness >= 0
            in_step = 1 if entry.opens else in_step + 1
            assert (in_step > 1) or entry.opens
            assert entry.closes == (in_step >= len(clocks))
            assert 0 <= entry.part <= 1
            left = (1.0 if entry.opens else left) * (1 - entry.part)
            assert left in (0.0, 1.0)  # no earlier gradients keep a share that the parts do not give them
            in_step = 0 if entry.closes else in_step
            # Nobody waits for who is idle; when that one goes on, others may be far ahead of it.
            if cluster.consistency == "ssp" and not idled:
                assert min(clocks.values()) >= entry.iteration - cluster.slack


@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 3),
    shards=st.integers(1, 3),
    edits=st.booleans(),
    repeats=st.sampled_from([0.0, 0.3]),
    losses=st.sampled_from([0.0, 0.5]),
    deaths=DEATHS,
    restarts=st.sets(st.integers(0, 250), min_size=1, max_size=10),
)
def test_from_a_journals_states_all_goes_on_as_if_nothing_had_been(
    consistency: str,
    seed: int,
    workers: int,
    shards: int,
    edits: bool,
    repeats: float,
    losses: float,
    deaths: list[tuple[int, bool]],
    restarts: set[int],
) -> None:
    edits = edits and consistency == "bsp"
    unharmed, mortal = (
        Cluster(random.Random(seed), consistency, 1, workers, shards, 4, 4, edits, repeats, losses)
        for _ in range(2)
    )
    run(unharmed, deaths)
    run(mortal, deaths, restarts)
    check(mortal)
    assert in_order(mortal.log) == in_order(unharmed.log)
    for one, other in zip(mortal.shards, unharmed.shards, strict=True):
        assert in_order(one.state) == in_order(other.state)


@pytest.mark.check
@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 4),
    shards=st.integers(1, 3),
    chunks=st.integers(1, 4),
    slack=st.integers(0, 3),
    edits=st.booleans(),
    repeats=st.sampled_from([0.0, 0.3]),
    losses=st.sampled_from([0.0, 0.5]),
    deaths=DEATHS,
)
def test_any_interleaving_with_deaths(
    consistency: str,
    seed: int,
    workers: int,
    shards: int,
    chunks: int,
    slack: int,
    edits: bool,
    repeats: float,
    losses: float,
    deaths: list[tuple[int, bool]],
) -> None:
    cluster = Cluster(
        random.Random(seed), consistency, slack, workers, shards, 4, chunks, edits, repeats, losses
    )
    run(cluster, deaths)
    check(cluster)


@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_death_at_each_delivery_of_a_run(consistency: str, comes_back: bool) -> None:
    """No luck needed: one run, and a death before its first delivery, its second, and so on."""
    at = 0
    while True:
        cluster = Cluster(random.Random(7), consistency, 1, 2, 2, 2, 2, edits=True, repeats=0.0)
        run(cluster, [(at, comes_back)])
        check(cluster)
        if not cluster.log.lines.entries or at > 250:
            break
        at += 1
    assert at > 250


@given(
    sizes=st.lists(st.integers(0, 1000), max_size=40),
    shards=st.integers(1, 6),
)
def test_chunks_are_balanced_by_bytes(sizes: list[int], shards: int) -> None:
    homes = balance(sizes, shards)
    assert homes == balance(list(sizes), shards)
    loads = [sum(size for size, home in zip(sizes, homes, strict=True) if home == s) for s in range(shards)]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert len(set(homes)) == min(shards, len(sizes))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), max_size=30))
def test_ranges_are_a_set(changes: list[tuple[bool, int, int]]) -> None:
    ranges, model = Ranges(), set[int]()
    for adds, start, stop in changes:
        if adds:
            ranges.add(start, stop)
            model |= set(range(start, stop))
        else:
            ranges.remove(start, stop)
            model -= set(range(start, stop))
        parts = list(ranges)
        assert {p for a, b in parts for p in range(a, b)} == model
        assert all(a < b for a, b in parts)
        assert all(one[1] < other[0] for one, other in pairwise(parts))
        assert len(ranges) == len(model)
        assert bool(ranges) == bool(model)
        found = {p for a, b in ranges.overlap(start, stop) for p in range(a, b)}
        assert found == model & set(range(start, stop))


class LeaseSimulation:
    """Workers that lease, commit and die; commits are reported to the hub late, repeatedly, or only by the
    answer to the fence. `hoards`: they ask for more while they hold some, as one with half a batch does."""

    def __init__(self, rng: random.Random, workers: int, length: int, hoards: bool) -> None:
        self.rng, self.length, self.hoards = rng, length, hoards
        self.leases = Leases()
        self.used: Counter[int] = Counter()  # the truth
        self.log: dict[tuple[int, int], list[Used]] = {}
        self.reports: list[tuple[tuple[int, int], list[Used]]] = []
        self.held: dict[tuple[int, int], list[int]] = {(w, w + 1): [] for w in range(workers)}
        self.over: set[tuple[int, int]] = set()
        self._incarnations = workers

    def ask(self, key: tuple[int, int]) -> None:
        count = self.rng.randint(1, 7)
        lease = Lease(incarnation=key[1], sampler=0, epoch=0, length=self.length, count=count)
        leased = self.leases.handle_lease(*key, lease)
        assert leased.stop - leased.start <= count
        self.held[key] += range(leased.start, leased.stop)
        if leased.over:
            assert leased.start == leased.stop
            self.over.add(key)

    def commit(self, key: tuple[int, int]) -> None:
        count = self.rng.randint(1, len(self.held[key]))
        now, self.held[key] = self.held[key][:count], self.held[key][count:]
        self.used.update(now)
        parts = [Used(sampler=0, epoch=0, start=p, stop=p + 1) for p in now]
        self.log.setdefault(key, []).extend(parts)
        self.reports.append((key, parts))

    def report(self) -> None:
        key, parts = self.reports[self.rng.randrange(len(self.reports))]
        if self.rng.random() < 0.7:
            self.reports.remove((key, parts))
        self.leases.handle_used(*key, parts)

    def die(self, key: tuple[int, int], comes_back: bool) -> None:
        del self.held[key]
        self.over.discard(key)
        self.leases.handle_fenced(*key, self.log.get(key, []))
        assert self.leases.handle_fenced(*key, self.log.get(key, [])) == 0
        if comes_back:
            self._incarnations += 1
            self.held[key[0], self._incarnations] = []

    def run(self, deaths: list[tuple[int, bool]], last_holder_dies: bool = False) -> None:
        plan = sorted(deaths)
        for turn in range(100_000):
            progress = self.leases.progress(0, 0)
            holders = [key for key, held in sorted(self.held.items()) if held]
            if (
                last_holder_dies
                and progress.leased
                and not progress.free
                and len(self.held) > 1 == len(holders)
            ):
                last_holder_dies = False
                self.die(holders[0], False)
            if plan and plan[0][0] <= turn and len(self.held) > 1:
                self.die(self.rng.choice(sorted(self.held)), plan.pop(0)[1])
            moves = [(self.report, ())] * bool(self.reports)
            for key, held in sorted(self.held.items()):
                moves += [(self.commit, (key,))] * bool(held)
                may_ask = key not in self.over and (self.hoards or not held)
                moves += [(self.ask, (key,))] * may_ask
                # Half a batch is kept until it is known whether more comes.
                if self.hoards and held and key not in self.over:
                    moves.remove((self.commit, (key,)))
                    moves += [(self.commit, (key,))] * (len(held) >= 5)
            if not moves:
                return
            move, arguments = self.rng.choice(moves)
            move(*arguments)
            progress = self.leases.progress(0, 0)
            assert progress.used + progress.leased + progress.free == self.length or turn < 10
            assert max(self.used.values(), default=0) <= 1, "a position is used twice"
        raise AssertionError(f"nobody gets on: {self.leases.progress(0, 0)}, held {self.held}")


LEASE_DEATHS = st.lists(st.tuples(st.integers(0, 150), st.booleans()), max_size=4)


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 60), LEASE_DEATHS, st.booleans())
def test_each_position_is_used_once_an_epoch_whoever_dies(
    seed: int, workers: int, length: int, deaths: list[tuple[int, bool]], last_holder_dies: bool
) -> None:
    simulation = LeaseSimulation(random.Random(seed), workers, length, hoards=False)
    simulation.run(deaths, last_holder_dies)
    assert set(simulation.used) == set(range(length))


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 60), LEASE_DEATHS)
def test_workers_that_keep_half_batches_back_do_not_wait_for_each_other_for_ever(
    seed: int, workers: int, length: int, deaths: list[tuple[int, bool]]
) -> None:
    """Then an epoch may end for one before another dies: what comes back stays free, and is counted."""
    simulation = LeaseSimulation(random.Random(seed), workers, length, hoards=True)
    simulation.run(deaths)
    progress = simulation.leases.progress(0, 0)
    assert len(simulation.used) == progress.used == length - progress.free
    assert progress.free == 0 or deaths
