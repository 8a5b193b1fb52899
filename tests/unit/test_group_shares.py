"""Members of a group that lease batches in unlike parts: each sample once, and as many batches for each."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from atoll.core.errors import RunError
from atoll.groups.shares import ShareChange, cut_run
from atoll.store.blocks import Blocks
from atoll.store.leases import Leases
from atoll.train.data.groupshares import GroupShares
from atoll.train.data.leased_sampler import LeasedBatches, LeasedSampler
from atoll.train.data.sharereports import ShareReports
from atoll.wire.messages import Cut, Lease, Leased

KEY = (7, 20)


@pytest.mark.parametrize("seed", range(20))
def test_a_run_is_cut_into_batches_without_a_gap(seed: int) -> None:
    chance = random.Random(seed)
    parts = {worker: chance.randint(0, 9) for worker in chance.sample(range(50), chance.randint(1, 6))}
    start, stop = (begin := chance.randint(0, 99)), begin + chance.randint(0, 99)
    batches = list(cut_run(start, stop, parts, 1))
    whole, at = sum(parts.values()) or len(parts), start
    assert len(batches) == -(-(stop - start) // whole)
    for number, batch in enumerate(batches):
        assert list(batch) == sorted(parts)
        for first, last in batch.values():
            assert at == first <= last
            at = last
        if sum(parts.values()) and number < len(batches) - 1:
            assert {worker: last - first for worker, (first, last) in batch.items()} == parts
    assert at == stop or not batches


@dataclass
class Ring:
    """The ring as one member sees it."""

    rank: int
    names: list[int]
    generation: int = 1

    @property
    def world(self) -> int:
        return len(self.names)

    @property
    def place(self) -> Any:
        return SimpleNamespace(name=self.names[self.rank], name_of=self.names.__getitem__)


@dataclass
class Crew:
    """A group at a hub: its members, their seconds for a sample, and a clock for each."""

    length: int
    whole: int
    each: list[float]
    caps: dict[int, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leases = Leases()
        self.blocks, self.number = Blocks(self.leases), Counter[tuple[int, int]]()
        self.names = [3 * rank + 1 for rank in range(len(self.each))]
        self.now = [0.0] * len(self.each)
        self.rings = [Ring(rank, self.names) for rank in range(len(self.each))]
        self.reports = [
            ShareReports(
                by_speed=True,
                waited=lambda: 0.0,
                chosen=self._chosen,
                name_of=self.names.__getitem__,
                clock=partial(self.now.__getitem__, rank),
            )
            for rank in range(len(self.each))
        ]
        self.shares = [
            GroupShares(
                self.rings[rank],
                self.reports[rank],
                part_of=lambda name: self.whole // 4 + (name % 4 < self.whole % 4),
                cap_of=lambda name: self.caps.get(name, 0),
                least=1,
                fill=lambda: 2,
            )
            for rank in range(len(self.each))
        ]
        self.samplers = [
            LeasedSampler(self.length, lease=partial(self._lease, rank), shares=self.shares[rank])
            for rank in range(len(self.each))
        ]
        self.batches = [
            LeasedBatches(sampler, lambda: 1, shares.batches)
            for sampler, shares in zip(self.samplers, self.shares, strict=True)
        ]
        self.used: dict[int, Counter[int]] = {}

    def _chosen(self, choice: str, reason: str, _change: ShareChange) -> None:
        self.lines.append(f"{choice} ({reason})")

    def _lease(
        self,
        rank: int,
        sampler: int,
        epoch: int,
        length: int,
        count: int,
        wait: float,
        cut: Cut | None = None,
    ) -> Leased:
        assert cut is not None
        self.number[rank, epoch] += 1
        asked = Lease(
            incarnation=1,
            sampler=sampler,
            epoch=epoch,
            length=length,
            count=count,
            contributor=7,
            block=self.number[rank, epoch],
            patient=wait > 0,
            cut=cut,
        )
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=Lease)
        return self.blocks.handle_lease(KEY, self.names[rank], self.names, again)

    def step(self, batches: list[list[int]]) -> tuple[int, ...]:
        """Make an iteration of these batches; return the samples that count, of each member."""
        counted = []
        for rank, batch in enumerate(batches):
            assert len(batch) in self.samplers[rank].next_sizes()
            self.now[rank] += self.each[rank] * len(batch)
            counted.append(int(self.samplers[rank].count(len(batch))))
        world = len(batches)
        said = [report.said(rank, world) for rank, report in enumerate(self.reports)]
        summed = [sum(each) for each in zip(*said, strict=True)]
        self.now = [max(self.now)] * world
        for rank, (report, sampler) in enumerate(zip(self.reports, self.samplers, strict=True)):
            report._clock = partial(self.now.__getitem__, rank)
            report.heard(summed, rank)
            used = sampler.used()
            sampler.committed()
            self.leases.handle_used(*KEY, used)
            for part in used:
                self.used.setdefault(part.epoch, Counter()).update(range(part.start, part.stop))
        return tuple(counted)


def fetch(batches: Any, ahead: int) -> Any:
    """A loader that fetches so many batches ahead."""
    indices, ready = iter(batches), list[list[int]]()
    while True:
        ready += islice(indices, 1 + ahead - len(ready))
        if not ready:
            return
        yield ready.pop(0)


@pytest.mark.parametrize("seed", range(12))
def test_parts_follow_speeds_whatever_loaders_fetch_and_each_sample_counts_once(seed: int) -> None:
    chance = random.Random(seed)
    crew = Crew(chance.randint(230, 260), 32, [0.01, 0.04, 0.01][: chance.randint(2, 3)])
    ahead = [chance.randint(0, 3) for _ in crew.each]
    sizes = []
    for _ in range(4):
        loops = [fetch(batches, fetches) for batches, fetches in zip(crew.batches, ahead, strict=True)]
        sizes += [crew.step(list(each)) for each in zip(*loops, strict=True)]
    assert crew.used == {epoch: Counter(range(crew.length)) for epoch in range(4)}
    world = len(crew.each)
    total = 8 * world
    assert sizes[0] == (8,) * world
    whole = [each for each in sizes if sum(each) == total]
    assert whole[-1] in ([(13, 3), (12, 4)] if world == 2 else [(11, 3, 10), (10, 3, 11), (11, 2, 11)])
    assert crew.lines[0].startswith(", ".join(map(str, whole[-1])) + f" of {total} samples (worker 4 would ")


def test_a_loop_that_is_left_goes_on_with_the_batches_that_were_not_used() -> None:
    crew = Crew(400, 32, [0.01, 0.04])
    sizes = []
    for _ in range(7):  # two batches in each loop, and up to three more are fetched
        loops = [fetch(batches, 3 * rank) for rank, batches in enumerate(crew.batches)]
        sizes += [crew.step(list(each)) for each in islice(zip(*loops, strict=True), 2)]
    assert crew.used[0].total() == len(crew.used[0]) == 14 * 16
    assert set(map(sum, sizes)) == {16}
    assert sizes[0] == (8, 8)
    assert sizes[-1] in ((13, 3), (12, 4))


def test_a_member_without_a_sample_has_a_fill_that_counts_nothing() -> None:
    crew = Crew(17, 32, [0.01, 0.04])
    loops = [list(batches) for batches in crew.batches]
    assert [list(map(len, loop)) for loop in loops] == [[8, 1], [8, 2]]
    assert [crew.step(list(each)) for each in zip(*loops, strict=True)] == [(8, 8), (1, 0)]
    assert crew.used == {0: Counter(range(17))}


def test_members_that_are_new_begin_evenly() -> None:
    crew = Crew(10**4, 32, [0.01, 0.04])
    loops = [iter(batches) for batches in crew.batches]
    for _ in range(12):
        sizes = crew.step([next(loop) for loop in loops])
    assert sizes in ((13, 3), (12, 4))
    for ring in crew.rings:  # as after a move, or a loss
        ring.generation += 1
    for sampler in crew.samplers:
        sampler.leave_leased()
    found = [crew.step([next(loop) for loop in loops]) for _ in range(12)]
    assert found[:3] == [(8, 8)] * 3
    assert found[-1] in ((13, 3), (12, 4))
    crew.rings[0].names, crew.rings[0].generation = [1], 9
    assert crew.shares[0].cut() is None  # a worker alone


def test_no_part_is_above_a_cap_while_caps_hold_the_groups_part() -> None:
    crew = Crew(2000, 32, [0.01, 0.04], caps={1: 10})
    loops = [iter(batches) for batches in crew.batches]
    sizes = [crew.step([next(loop) for loop in loops]) for _ in range(12)]
    assert sizes[0] == (8, 8)
    assert sizes[-1] == (10, 6)


def test_a_block_for_others_is_refused() -> None:
    shares = Crew(20, 32, [1.0, 1.0]).shares[0]
    leased = Leased(sampler=0, epoch=0, start=0, stop=8)
    with pytest.raises(RunError, match="worker 1 was given a block of epoch 0 that is cut for workers 4, 9"):
        list(shares.own(leased, Cut({4: 4, 9: 4})))
