"""Workers that train on what samplers deal them, for tests of the deals: teams in lockstep whose members
come and go (`Team`), nodes that deal by themselves (`Nodes`), and workers that lease (`Lessees`).

Their clocks are virtual: an iteration, or a turn, is a tick of it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from atoll.groups.shares import even, scaled
from atoll.store.leases import Leases
from atoll.train.data.leased_sampler import LeasedSampler
from atoll.train.data.order import SampleOrder
from atoll.train.data.peersdealing import AHEAD, PeerDeal
from atoll.train.data.runs import Item
from atoll.train.data.sampler import BatchesSampler, DealtSampler, ShardedSampler
from atoll.train.data.shares import Shares, ShareSchedule
from atoll.wire.messages import Lease, Leased, Used


@dataclass
class Change:
    """After how many iterations, who is lost (by its place in the team, modulo), and how many come new.

    `redone`: the iteration in which they are lost is made again by those who live; else it is whole."""

    after: int
    lost: list[int]
    new: int
    redone: bool


@dataclass
class Member:
    """A worker: a loader over its sampler that fetches `ahead` batches, and what it trains on now."""

    sampler: DealtSampler[Any]
    size: int  # of its batches; 0: the sampler gives batches
    ahead: int
    fetched: list[list[int]] = field(default_factory=list)
    batches: Iterator[list[int]] | None = None

    def begin(self) -> None:
        indices = iter(self.sampler)
        self.batches = self._batched(indices) if self.size else indices
        self.fetched = list(itertools.islice(self.batches, self.ahead))

    def _batched(self, indices: Iterator[int]) -> Iterator[list[int]]:
        while batch := list(itertools.islice(indices, self.size)):
            yield batch

    def next(self) -> list[int] | None:
        assert self.batches is not None
        self.fetched += itertools.islice(self.batches, 1)
        return self.fetched.pop(0) if self.fetched else None


class Team:
    """Workers in lockstep, and what whole iterations have counted of each epoch."""

    def __init__(
        self,
        length: int,
        world: int,
        size: int,
        batch: int,
        ahead: int,
        seed: int,
        shares: Shares | None = None,
        drop_last: bool = False,
        agreed: bool = False,
    ) -> None:
        """`agreed`: shares are those on which members agree at the end of each iteration, by `shares`."""
        self.agreed, self.schedules = agreed, dict[int, ShareSchedule]()
        self.length, self.size, self.batch, self.ahead, self.seed = length, size, batch, ahead, seed
        self.shares, self.drop_last = shares, drop_last
        self.members = [self.member(rank, world) for rank in range(world)]
        self.counts: Counter[int] = Counter()  # over all epochs
        self.totals: list[int] = []  # samples in each iteration
        self.given: list[Any] = []  # each iteration's batches, by member
        self.batches: list[list[int]] = []  # what counted of each iteration

    def member(self, rank: int, world: int) -> Member:
        options: dict[str, Any] = {"rank": rank, "world": world, "seed": self.seed}
        options["drop_last"] = self.drop_last
        if self.batch:
            if self.agreed:
                schedule = ShareSchedule(partial(even, self.batch), world, 1)
                batches = BatchesSampler(self.length, batch=self.batch, schedule=schedule, **options)
                self.schedules[id(batches)] = schedule
            else:
                batches = BatchesSampler(self.length, batch=self.batch, shares=self.shares, **options)
            return Member(batches, 0, self.ahead)
        return Member(ShardedSampler(self.length, **options), self.size, self.ahead)

    def _agree(self) -> None:
        """Let other parts hold from the first tick that no loader was given."""
        samplers = [member.sampler for member in self.members]
        if self.shares is None or len({sampler.epoch for sampler in samplers}) > 1:
            return
        tick = max(sampler.given for sampler in samplers)
        parts = np.array(self.shares(len(self.totals), self.batch, range(len(samplers))))
        for sampler in samplers:
            self.schedules[id(sampler)].change(tick, parts)

    def iterate(self, change: Change | None) -> bool:
        """One iteration, in which the change comes; False where the epoch is over, for all alike."""
        taken = [member.next() for member in self.members if member.batches is not None]
        self.given.append(taken)
        assert len({batch is None for batch in taken}) == 1, "workers make unlike numbers of iterations"
        if taken[0] is None:
            return False
        assert len(taken) == len(self.members), "who comes new begins too late"
        counted = [
            batch if member.sampler.count(len(batch or ())) else []
            for member, batch in zip(self.members, taken, strict=True)
        ]
        lost = {index % len(self.members) for index in change.lost} if change else set()
        lost = set() if len(lost) == len(self.members) else lost
        kept = [index for index in range(len(self.members)) if index not in lost]
        if change and change.redone:
            self._change(kept, change.new, set())
        if self.agreed:
            self._agree()
        for index in kept:
            self.counts.update(counted[index] or [])
        self.batches.append(sorted(each for index in kept for each in counted[index] or []))
        self.totals.append(len(self.batches[-1]))
        for member in [m for m in self.members if m.batches is not None]:
            member.sampler.committed()
        if change and not change.redone:
            self._change(kept, change.new, lost)
        if change and change.redone:
            # Those who come new make this iteration too.
            for member in [m for m in self.members if m.batches is None]:
                member.begin()
                batch = member.next() or []
                self.counts.update(batch if member.sampler.count(len(batch)) else [])
                member.sampler.committed()
        epoch = self.members[0].sampler.epoch
        for member in [m for m in self.members if m.batches is None]:
            if member.sampler.epoch == epoch:  # else it begins with the next, as the others do
                member.begin()
        return True

    def _change(self, kept: list[int], new: int, absent: set[int]) -> None:
        before = [self.members[index] for index in kept]
        state = json.loads(json.dumps(before[0].sampler.deal_state()))
        self.members = before + [self.member(0, 1) for _ in range(new)]
        places = [member.sampler.place() for member in before] + [None] * new
        for member in self.members[len(before) :]:
            member.sampler.load_deal_state(state)
        for rank, member in enumerate(self.members):
            member.sampler.deal_anew(json.loads(json.dumps(places)), rank, absent)


def run(team: Team, changes: list[Change], epochs: int) -> None:
    for _ in range(epochs):
        for member in team.members:
            member.begin()
        iteration = 0
        while True:
            due = next((change for change in changes if change.after == iteration), None)
            if due is not None:
                changes = [change for change in changes if change is not due]
            if not team.iterate(due):
                break
            iteration += 1


def drawn_shares(seed: int) -> Shares:
    """Other shares in every tick; some members take nothing."""

    def shares(tick: int, samples: int, members: Sequence[int]) -> list[int]:
        rng = random.Random(f"{seed}, {tick}, {len(members)}")
        weights = np.array([rng.choice([0, 1, 5, 15]) for _ in members])
        parts: list[int] = scaled(weights if weights.any() else weights + 1, samples).tolist()
        return parts

    return shares


class Lessees:
    """Workers that lease what they train on, each at its own pace. `counts` has what is committed.

    A worker may die, and come back in a later incarnation: what it had not committed does not count. All may
    be saved, and others go on from there.
    """

    def __init__(self, length: int) -> None:
        self.length, self.state = length, {}
        self.order = SampleOrder(length, seed=5, shuffle=True)
        self.counts: Counter[Item] = Counter()
        self.incarnation = 0
        self._begin()

    def _begin(self) -> None:
        self.book = Leases()
        self.samplers: dict[int, LeasedSampler] = {}  # of those who live
        self.loops: dict[int, Iterator[int]] = {}
        self.lives: dict[int, int] = {}
        self.used: dict[int, list[Used]] = {}  # by incarnation
        self.trained: dict[int, Counter[Item]] = {}
        self.known: dict[int, set[Item]] = {}
        self.had: dict[int, list[int]] = {}  # indices that were trained on, and not committed

    def come(self, worker: int) -> None:
        """A worker comes, new or again: as those who live lease, or else from the checkpoint."""
        self.incarnation += 1
        sampler = LeasedSampler(self.length, lease=partial(self._lease, worker), seed=5)
        if self.samplers:
            sampler.load_deal_state(_plain(next(iter(self.samplers.values())).deal_state()))
        elif self.state:
            sampler.load_state_dict(self.state)
        self.samplers[worker], self.lives[worker] = sampler, self.incarnation
        self.used[self.incarnation], self.trained[self.incarnation] = [], Counter()
        self.known[self.incarnation], self.had[self.incarnation] = self._used_by(sampler), []
        self.loops[worker] = iter(sampler)

    def _lease(self, worker: int, sampler: int, epoch: int, length: int, count: int, wait: float) -> Leased:
        life = self.lives[worker]
        request = Lease(incarnation=life, sampler=sampler, epoch=epoch, length=length, count=count)
        return self.book.handle_lease(worker, life, request)

    def _used_by(self, sampler: LeasedSampler) -> set[Item]:
        return {
            (epoch, each) for epoch, start, stop in sampler.place()["used"] for each in range(start, stop)
        }

    def die(self, worker: int) -> None:
        """The hub fences the worker: what it had committed counts, and nothing else."""
        life = self.lives.pop(worker)
        del self.samplers[worker], self.loops[worker]
        self.book.handle_fenced(worker, life, self.used[life])

    def iterate(self, worker: int, batch: int, *, commits: bool = True) -> bool:
        """A worker trains on a batch; False where its loop has ended, and the next one begins."""
        sampler = self.samplers[worker]
        had = list(itertools.islice(self.loops[worker], batch))
        sampler.count(len(had))
        self.had[self.lives[worker]] += had
        if commits:
            self.commit(worker)
        if not had:
            self.loops[worker] = iter(sampler)
        return bool(had)

    def commit(self, worker: int) -> None:
        """What the worker has trained on counts."""
        sampler, life = self.samplers[worker], self.lives[worker]
        used = sampler.used()
        self.used[life] += used
        self.book.handle_used(worker, life, used)
        known = self._used_by(sampler)
        new = known - self.known[life]
        assert len(new) == sum(part.stop - part.start for part in used), "one is used twice by one worker"
        named = sorted(self.order.index(*item) for item in new)
        assert named == sorted(self.had[life]), "what is committed is not what was trained on"
        self.known[life], self.had[life] = known, []
        self.trained[life].update(new)
        self.counts.update(new)

    def save(self) -> None:
        """Those who live save, and all end: what the dead had used of the epochs under way is not in
        the checkpoint, so it is dealt again. Earlier epochs stay as they are."""
        for worker in self.samplers:
            self.commit(worker)
        living = list(self.samplers.values())
        self.state = _plain(living[0].state_dict(_plain([sampler.place() for sampler in living])))
        for life, trained in self.trained.items():
            if life not in self.lives.values():
                again = {item: count for item, count in trained.items() if item[0] >= self.state["epoch"]}
                self.counts.subtract(again)
        self._begin()


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


class Nodes:
    """Nodes that make the same iterations, each with its own deal, its own loader and its own lateness.

    `dies` has the iteration that a node makes no more, though it was dealt to; its contributions of earlier
    ones are applied.
    """

    def __init__(
        self,
        seed: int,
        length: int,
        batch: int,
        nodes: int,
        stale_max: int,
        per: int,
        dies: dict[int, int],
        ahead: int = AHEAD,
        uneven: float = 0.0,
        least: int = 1,
    ) -> None:
        self.random = random.Random(seed)
        self.length, self.stale_max, self.per, self.dies = length, stale_max, per, dies
        self.ahead, self.uneven, self.seed = max(ahead, per - 1), uneven, seed
        self.paces = {node: self.random.choice([0.1, 0.2, 0.5, 1.0]) for node in range(nodes)}
        self.deals = {
            node: PeerDeal([(0, 0, length)], batch, range(nodes), stale_max, ahead=self.ahead, least=least)
            for node in range(nodes)
        }
        self.told = dict.fromkeys(range(nodes), 0)  # iterations that a node knows to be applied
        self.trained: Counter[Item] = Counter()  # by contributions that were applied
        self.sizes: Counter[int] = Counter()
        self.given: list[dict[int, list[Item]]] = []  # each iteration's samples, by node
        self.iteration = self.epoch = 0

    def alive(self, node: int, iteration: int) -> bool:
        return iteration < self.dies.get(node, 2**60)

    def run(self, epochs: int) -> None:
        while self.epoch < epochs:
            if not self._iterate():
                self.epoch += 1
                for node, deal in self.deals.items():
                    if self.alive(node, self.iteration):
                        deal.again([(self.epoch, 0, self.length)] if self.epoch < epochs else [])
        for node in self.deals:
            if self.alive(node, self.iteration):
                self._tell(node, self.iteration, self.iteration)

    def _iterate(self) -> bool:
        """All nodes make an iteration of `per` ticks, as many as there are; False: there are none."""
        parts: dict[int, list[Item]] = {}
        counts = set()
        for node, deal in self.deals.items():
            if not self.alive(node, self.iteration):
                continue
            self._tell(node, self.iteration - self.stale_max, self.iteration)
            used, items, ticks = deal.used, [], 0
            for tick in range(used, used + self.per):
                dealt = deal.tick(tick)
                if dealt is None:
                    break
                items += dealt.part_of(node)
                ticks += 1
            deal.tick(used + self.random.randint(0, self.ahead))  # the loader goes on
            parts[node] = items
            counts.add(ticks)
            if ticks:
                deal.made(self.iteration, used + ticks)
        self.given.append(parts)
        assert len(counts) == 1, "all nodes make equally many ticks"
        if counts == {0}:
            return False
        for node, items in parts.items():
            self.trained.update(items)
            self.sizes[node] += len(items)
        self.iteration += 1
        return True

    def _tell(self, node: int, least: int, most: int) -> None:
        """A node has applied at least so many iterations when it begins one."""
        until = self.random.randint(max(0, least), most)
        for iteration in range(self.told[node], until):
            drawn = random.Random(f"{self.seed}, {iteration}")
            each_time = {
                each: pace * drawn.lognormvariate(0, self.uneven) for each, pace in self.paces.items()
            }
            paces = {each: pace for each, pace in each_time.items() if self.alive(each, iteration)}
            self.deals[node].applied(iteration, paces)
        self.told[node] = max(self.told[node], until)
