"""Groups of workers at the log, which take one another's place as the hub decides anew who is with whom: each
worker's part is in each iteration once, whatever order things come in."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cluster import Cluster, Worker
from test_store_interleavings import check, run

from atoll.store.entries import Apply, Combine, Joined, StepWithMean
from atoll.wire import messages


class Grouped(Cluster):
    """A cluster whose workers are contributors, with a hub that decides `groupings` times who shares one.

    A contributor whose Committed names a new grouping makes no other iteration. The new one of its members
    joins once all of them are there. Old ones are fenced when their members are in new ones: under BSP all
    at once, once all new ones have joined. With `newcomer`, one more worker comes while the run goes, which
    decisions concern once it trains. With `pipelined` a contributor that is told of a new grouping sends one
    more contribution, and moves when that counts. Now and then it has ended what was in flight before, as a
    meeting does.
    """

    def __init__(
        self,
        rng: random.Random,
        consistency: str,
        workers: int,
        groupings: int,
        newcomer: bool = False,
        pipelined: bool = False,
        **more: Any,
    ) -> None:
        self.pipelined = pipelined
        self.newcomer = workers if newcomer else -1  # its rank, until it has come
        self.members: dict[int, list[int]] = {worker: [worker] for worker in range(workers)}
        self.grouping_of: dict[int, int] = dict.fromkeys(range(workers), 0)
        self.left_to_decide, self.decided = groupings, 0
        self.forming: list[list[int]] = []  # groups of the latest grouping that are not formed
        self.waiting: set[int] = set()  # workers that have asked for their group
        self.left: set[int] = set()
        self.arrived: set[int] = set(range(workers))  # contributors that the log knows
        self.unfenced: dict[int, int] = {}  # contributor -> incarnation
        super().__init__(rng, consistency, 1, workers, target=8, chunks=3, edits=False, **more)

    def start(self, worker: int, moves: bool = False) -> None:
        super().start(worker, moves)
        self.unfenced[worker] = self.alive[worker].incarnation

    # -- what members do ----------------------------------------------------------------------------------

    def _grouping(self, me: Worker) -> int:
        """It has heard of the latest decision, or not yet."""
        mine = max(self.grouping_of[me.worker], 0 if me.told is None else me.told.grouping)
        return self.decided if self.rng.random() < 0.8 else mine

    def _run(self, me: Worker) -> Iterator[tuple[str, int]]:
        if not self.pipelined:
            yield from super()._run(me)
            return
        self._to_all(me, messages.Pull(incarnation=me.incarnation, clock=0))
        yield ("start", 0)
        first, told = me.clock, False
        for k in range(first, max(first + 1, self.target)):
            if k > first:
                yield ("parameters", k)
                me.clock, told = k, self._moves(me)
            self._push(me, k, behind=int(k > first and self.rng.random() < 0.7))
            self._to_all(me, messages.Pull(incarnation=me.incarnation, clock=k + 1))
            if told:
                break
        yield ("parameters", k + 1)
        me.clock = k + 1

    def _goes_on(self, me: Worker) -> bool:
        return super()._goes_on(me) and not self._moves(me)

    def _moves(self, me: Worker) -> bool:
        return me.told is not None and me.told.grouping > self.grouping_of[me.worker]

    def _finish(self, me: Worker) -> None:
        members = self.members[me.worker]
        if me.clock >= self.target:
            self.left |= set(members)
            self._fence_later(me.worker)
        else:
            assert self._moves(me)
            self.waiting |= set(members)
        self._form()

    # -- what the hub does --------------------------------------------------------------------------------

    def deliver_one(self) -> bool:
        if self.left_to_decide and not self.forming and self.rng.random() < 0.3:
            self._decide()
        if self.newcomer >= 0 and self.begun and self.rng.random() < 0.02:
            self._comes()
        return super().deliver_one()

    def _comes(self) -> None:
        worker, self.newcomer = self.newcomer, -1
        self.members[worker], self.grouping_of[worker] = [worker], self.decided
        self.arrived.add(worker)
        self.start(worker)

    def _trains(self, worker: int) -> bool:
        """A newcomer has begun: the hub hears it from its heartbeats."""
        return worker < self.workers or self.alive[worker].wait != ("start", 0)

    def _decide(self) -> None:
        if len({self.grouping_of[each] for each in self.unfenced}) > 1 or not self.begun:
            return  # the one before is still being moved to
        self.left_to_decide -= 1
        self.decided += 1
        there = {worker for worker in self.members if worker <= self.workers and self._trains(worker)}
        workers = sorted(there - self.left)
        if self.workers in self.members and self.workers not in there:
            self.grouping_of[self.workers] = self.decided  # it is told to stay where it is
        self.rng.shuffle(workers)
        cuts = sorted({0, len(workers), *(self.rng.randrange(len(workers) + 1) for _ in range(2))})
        self.forming = [workers[start:stop] for start, stop in pairwise(cuts)]

    def _form(self) -> None:
        for group in list(self.forming):
            living = [worker for worker in group if worker not in self.left]
            if not self.waiting.issuperset(living):
                continue
            self.forming.remove(group)
            if living:
                number = len(self.members) + 7  # above the workers'
                self.members[number], self.grouping_of[number] = living, self.decided
                self.waiting -= set(living)
                self.start(number, moves=True)
        self._fence_old()

    def _from_worker(self, worker: int, incarnation: int, shard: int, message: Any) -> None:
        super()._from_worker(worker, incarnation, shard, message)
        if isinstance(message, tuple):
            self.arrived.add(worker)
            self._fence_old()

    def _fence_old(self) -> None:
        new = [each for each in self.members if self.grouping_of[each] == self.decided]
        if self.consistency == "bsp" and (self.forming or not self.arrived.issuperset(new)):
            return
        moved = self.left | {w for each in new if each in self.arrived for w in self.members[each]}
        for old in [each for each in self.unfenced if self.grouping_of[each] < self.decided]:
            if moved.issuperset(self.members[old]):
                self._fence_later(old)

    def _fence_later(self, contributor: int) -> None:
        incarnation = self.unfenced.pop(contributor, None)
        if incarnation is not None:
            self.fences.append((contributor, incarnation))


def check_each_worker(cluster: Grouped) -> None:
    """BSP: every iteration has every worker's part once, and is stepped. Else: a worker speaks through one
    group at a time, and never again through one that it has left."""
    entries = cluster.log.lines.entries
    if cluster.consistency == "bsp":
        late: list[list[int]] = []
        combined = [entry for entry in entries if isinstance(entry, Combine)]
        for entry in combined:
            parts = sorted(worker for each in entry.members for worker in cluster.members[each.worker])
            assert parts[: cluster.workers] == list(range(cluster.workers)), entry
            late.append(parts[cluster.workers :])
        came = late.index([cluster.workers]) if [cluster.workers] in late else len(late)
        assert late == [[]] * came + [[cluster.workers]] * (len(late) - came), "the newcomer's iterations"
        assert [entry.iteration for entry in combined] == list(range(cluster.target))
        assert all(entry.accepted for entry in entries if isinstance(entry, StepWithMean))
    for worker in range(cluster.workers):
        through = [e.worker for e in entries if isinstance(e, Apply) and worker in cluster.members[e.worker]]
        assert through == sorted(through)
    joined = [entry.worker for entry in entries if isinstance(entry, Joined)]
    assert len(joined) == len(set(joined))
    assert set(joined) == set(cluster.members)


@pytest.mark.check
@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 5),
    shards=st.integers(1, 3),
    groupings=st.integers(0, 3),
    newcomer=st.booleans(),
    pipelined=st.booleans(),
    repeats=st.sampled_from([0.0, 0.3]),
    restarts=st.sets(st.integers(0, 400), max_size=4),
)
def test_groups_take_one_anothers_place_and_nothing_is_lost(
    consistency: str,
    seed: int,
    workers: int,
    shards: int,
    groupings: int,
    newcomer: bool,
    pipelined: bool,
    repeats: float,
    restarts: set[int],
) -> None:
    cluster = Grouped(
        random.Random(seed),
        consistency,
        workers,
        groupings,
        newcomer,
        pipelined and consistency != "bsp",
        shards=shards,
        repeats=repeats,
    )
    run(cluster, [], restarts)
    check(cluster)
    check_each_worker(cluster)


def test_runs_are_grouped_anew() -> None:
    """What the property above is about does happen."""
    moved = []
    for seed in range(10):
        cluster = Grouped(random.Random(seed), "bsp", 4, 2, shards=2, repeats=0.3)
        run(cluster, [])
        moved.append(max(cluster.grouping_of.values()))
    assert moved.count(2) >= 5, moved
