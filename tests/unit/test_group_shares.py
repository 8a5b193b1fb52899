"""Members of a group that lease batches in parts of their own: each sample once, as many batches for each."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader

from atoll.core.config import Sync
from atoll.core.errors import RunError, UserError
from atoll.groups.shares import ShareChange, cut_run
from atoll.store.blocks import Blocks
from atoll.store.leases import Leases
from atoll.train.data.batches import SampledBatches
from atoll.train.data.groupshares import GroupShares
from atoll.train.data.leased_sampler import LeasedBatches, LeasedSampler
from atoll.train.data.order import SampleOrder
from atoll.train.data.passes import Passes
from atoll.train.data.sharereports import ShareReports
from atoll.train.data.sources import UnevenShares
from atoll.train.gradients.samples import SeenSamples
from atoll.train.members.regrouping import Leases as MemberLeases
from atoll.wire.messages import Cut, Lease, Leased, Used

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
    by_speed: bool = True
    workers: int = 4
    wait: float = 1.0  # 0: under ssp
    shows_left: Callable[[object], bool] | None = None

    def __post_init__(self) -> None:
        world = len(self.each)
        self.leases = Leases()
        self.blocks, self.key, self.everything = Blocks(self.leases), KEY, list[Used]()
        self.there, self.names = list(range(world)), [3 * rank + 1 for rank in range(world)]
        self.heard = [self.workers] * world  # the number of the run's workers, as each member knows it
        self.left = [False] * world  # True once a loader's latest loop was left, or is under way
        self.now = [0.0] * world
        self.rings = [Ring(rank, self.names) for rank in range(world)]
        self.reports = [
            ShareReports(
                by_speed=True,
                waited=lambda: 0.0,
                chosen=self._chosen,
                name_of=self.names.__getitem__,
                clock=partial(self._time, rank),
            )
            for rank in range(world)
        ]
        self.shares = [
            GroupShares(
                self.rings[rank],
                self.reports[rank] if self.by_speed else None,
                whole=lambda: self.whole,
                part_of=partial(self._part_of, rank),
                workers=partial(self._heard_by, rank),
                cap_of=lambda name: self.caps.get(name, 0),
                least=lambda: 1,
                fill=lambda: 2,
            )
            for rank in range(world)
        ]
        hubs = [cast(Any, SimpleNamespace(lease=partial(self._lease, rank))) for rank in range(world)]
        self.requests = [MemberLeases(hub) for hub in hubs]
        for requests in self.requests:
            requests.move(self.key[0])
        self.samplers = [
            LeasedSampler(
                self.length, lease=self.requests[rank].lease, shares=self.shares[rank], wait=self.wait
            )
            for rank in range(world)
        ]
        self.batches = [
            LeasedBatches(sampler, lambda: 1, shares, partial(self._was_left, rank))
            for rank, (sampler, shares) in enumerate(zip(self.samplers, self.shares, strict=True))
        ]
        self.used: dict[int, Counter[int]] = {}

    def _time(self, rank: int) -> float:
        return self.now[rank]

    def _heard_by(self, rank: int) -> int:
        return self.heard[rank]

    def _part_of(self, rank: int, name: int) -> int:
        return self.whole // self.heard[rank] + (name % self.heard[rank] < self.whole % self.heard[rank])

    def _was_left(self, rank: int, batches: object) -> bool:
        assert batches is self.batches[rank]
        return self.left[rank] if self.shows_left is None else self.shows_left(batches)

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
        *,
        contributor: int,
        block: int,
        cut: Cut | None,
    ) -> Leased:
        """Return the hub's answer. Nothing changes while this member waits for it."""
        assert cut is not None
        assert contributor == self.key[0]
        members = [self.names[each] for each in self.there]
        for patient in (wait > 0, False):
            asked = Lease(
                incarnation=1,
                sampler=sampler,
                epoch=epoch,
                length=length,
                count=count,
                contributor=contributor,
                block=block,
                patient=patient,
                cut=cut,
            )
            again = msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=Lease)
            leased = self.blocks.handle_lease(self.key, self.names[rank], members, again)
            if leased.block:
                break
        return leased

    def loader(self, rank: int, ahead: int) -> Iterator[list[int]]:
        """A DataLoader, which fetches `ahead` batches as its loop begins, and one with each that it gives."""
        indices = iter(self.batches[rank])
        ready = list(islice(indices, ahead))
        self.left[rank] = True
        while True:
            ready += islice(indices, 1)
            if not ready:
                self.left[rank] = False
                return
            yield ready.pop(0)

    def lose(self, rank: int) -> None:
        """A member dies. The others form the ring anew, and stay in their contributor until they `move`."""
        self.there.remove(rank)
        for each, survivor in enumerate(self.there):
            ring = self.rings[survivor]
            ring.rank, ring.names = each, [self.names[other] for other in self.there]
            ring.generation += 1
        self._meet()

    def move(self) -> None:
        """Those who are there become a new contributor, and the former one is fenced."""
        old, self.key = self.key, (self.key[0] + 1, self.key[1] + 1)
        members = [self.samplers[rank] for rank in self.there]
        for rank, sampler in zip(self.there, members, strict=True):
            self.leases.handle_moved(old, self.key, sampler.held())
            sampler.leave_leased()
            self.requests[rank].move(self.key[0])
        self._meet()
        for rank in self.there:
            self.rings[rank].generation += 1
        self.fence(old)

    def _meet(self) -> None:
        """The members of a ring that is new tell their places to one another."""
        members = [self.samplers[rank] for rank in self.there]
        places = [sampler.where() for sampler in members]
        for sampler in members:
            sampler.go_to(places)

    def fence(self, key: tuple[int, int]) -> None:
        self.blocks.handle_fenced(key)
        self.leases.handle_fenced(*key, self.everything)

    def step(self, batches: list[list[int]]) -> tuple[int, ...]:
        """Make an iteration of the members' batches; return the samples that count, of each."""
        counted = []
        for rank, batch in zip(self.there, batches, strict=True):
            assert len(batch) in self.samplers[rank].next_sizes()
            self.now[rank] += self.each[rank] * len(batch)
            counted.append(int(self.samplers[rank].count(len(batch))))
        reports = [self.reports[rank] for rank in self.there]
        said = [report.said(each, len(reports)) for each, report in enumerate(reports)]
        self.now = [max(self.now)] * len(self.now)
        for each, report in enumerate(reports):
            report.heard([sum(values) for values in zip(*said, strict=True)], each)
        for rank in self.there:
            used = self.samplers[rank].used()
            self.samplers[rank].committed()
            self.count_used(self.key, used)
        return tuple(counted)

    def check_checkpoint(self) -> None:
        """A run that loads a checkpoint made now gives all samples that the group has leased and not used."""
        state = self.samplers[0].state_dict([sampler.place() for sampler in self.samplers])
        for (_, epoch), there in self.leases.state.epochs.items():
            if epoch < state["epoch"]:
                assert not there.leased.get(self.key), (epoch, state["epoch"])
        for epoch, start, stop in state["used"]:
            assert all(self.used[epoch][position] == 1 for position in range(start, stop))

    def count_used(self, key: tuple[int, int], used: list[Used]) -> None:
        self.everything += used
        self.leases.handle_used(*key, used)
        for part in used:
            self.used.setdefault(part.epoch, Counter()).update(range(part.start, part.stop))


@pytest.mark.parametrize("seed", range(12))
def test_parts_follow_speeds_whatever_loaders_fetch_and_each_sample_counts_once(seed: int) -> None:
    chance = random.Random(seed)
    crew = Crew(chance.randint(230, 260), 32, [0.01, 0.04, 0.01][: chance.randint(2, 3)])
    ahead = [chance.randint(0, 3) for _ in crew.each]
    sizes = []
    for _ in range(4):
        loops = [crew.loader(rank, fetches) for rank, fetches in enumerate(ahead)]
        sizes += [crew.step(list(each)) for each in zip(*loops, strict=True)]
    assert crew.used == {epoch: Counter(range(crew.length)) for epoch in range(4)}
    world = len(crew.each)
    total = 8 * world
    assert sizes[0] == (8,) * world
    whole = [each for each in sizes if sum(each) == total]
    assert whole[-1] in ([(13, 3), (12, 4)] if world == 2 else [(11, 3, 10), (10, 3, 11), (11, 2, 11)])
    assert crew.lines[0].startswith(", ".join(map(str, whole[-1])) + f" of {total} samples (worker 4 would ")


@pytest.mark.parametrize("by_speed", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_members_make_equally_many_batches_whatever_loops_are_left(seed: int, by_speed: bool) -> None:
    """Batches are fetched ahead, of sizes that no number of workers divides; and other contributors use
    samples, and die. In the end each sample has counted once an epoch."""
    chance = random.Random(seed)
    wait = float(seed % 3 > 0)
    crew = Crew(
        chance.randint(20, 120), chance.randint(9, 31), [0.01, 0.04, 0.02], by_speed=by_speed, wait=wait
    )
    ahead = [chance.randint(0, 4) for _ in crew.each]
    others = Others(crew, 0.4)
    for _ in range(20):
        stop = chance.choice([1, 2, 3, 5, 1000])  # the batches after which the loop is left
        loops = [islice(crew.loader(rank, fetches), stop) for rank, fetches in enumerate(ahead)]
        for each in zip(*loops, strict=True):
            crew.step(list(each))
            crew.check_checkpoint()
            others.turn(chance)
    others.die()
    epochs = max(sampler.epoch for sampler in crew.samplers) + 2
    while min(sampler.epoch for sampler in crew.samplers) < epochs:
        loops = [crew.loader(rank, fetches) for rank, fetches in enumerate(ahead)]
        for each in zip(*loops, strict=True):
            crew.step(list(each))
    for epoch in range(epochs):
        assert crew.used[epoch] == Counter(range(crew.length)), epoch


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_checkpoint_has_the_samples_that_loaders_have_fetched(members: int, ahead: int) -> None:
    """Also at an epoch's end: all is leased, and some of it is in hand."""
    crew = Crew(80, 32, [0.01, 0.04][:members])
    for _ in range(3):
        loops = [crew.loader(rank, ahead * (members - rank)) for rank in range(members)]
        for each in zip(*loops, strict=True):
            crew.step(list(each))
            crew.check_checkpoint()
            places = [sampler.place() for sampler in crew.samplers]
            fresh = Crew(80, 32, [0.01] * members)
            for sampler in fresh.samplers:
                sampler.load_state_dict(crew.samplers[0].state_dict(places))
            epoch = fresh.samplers[0].epoch
            rest = list(zip(*(fresh.loader(rank, 0) for rank in range(members)), strict=True))
            given = {int(index) for step in rest for batch in step for index in batch}
            order = SampleOrder(80, 0, True).draw(epoch).tolist()
            unused = {order[place] for place in range(80) if not crew.used.get(epoch, Counter())[place]}
            assert given == unused


def test_an_epoch_of_which_late_samples_are_in_hand_is_not_over() -> None:
    """Another worker has died with samples of epoch 0, which come with those of epoch 1."""
    crew = Crew(80, 32, [0.01, 0.04], by_speed=False)
    others = Others(crew, 1.0)
    others.hold()
    for epoch in range(2):
        loops = [crew.loader(rank, 3 * rank) for rank in range(2)]
        if epoch:
            others.die()
        for each in zip(*loops, strict=True):
            if epoch and crew.used[0].total() < 80:  # its late samples are in hand
                for sampler in crew.samplers:
                    assert sampler.deal_state()["pending"] == [0]
                    assert sampler.where() == (1, [0, 1])
                    assert sampler.place()["epoch"] == 0
            crew.step(list(each))
            crew.check_checkpoint()
    assert crew.used == {epoch: Counter(range(80)) for epoch in range(2)}
    assert [sampler.where() for sampler in crew.samplers] == [(2, []), (2, [])]


class Others:
    """A worker alone, and after its death the next one. Each time, with probability `often`, it does
    something."""

    def __init__(self, crew: Crew, often: float) -> None:
        self._crew, self._often, self._key = crew, often, (1, 1000)
        self._begin()

    def _begin(self) -> None:
        self._key = (1, self._key[1] + 1)
        self._sampler = LeasedSampler(self._crew.length, lease=self._lease)
        self._indices = iter(self._sampler)

    def turn(self, chance: random.Random) -> None:
        """Take a batch, commit the batches before, or die."""
        if chance.random() < self._often:
            self._fetch(max(sampler.epoch for sampler in self._crew.samplers))
        if chance.random() < self._often / 2:
            self._crew.count_used(self._key, self._sampler.used())
        if chance.random() < self._often / 4:
            self.die()

    def take(self) -> None:
        """Take a batch, if only of a later epoch, and commit it."""
        self._fetch(self._sampler.epoch + 1)
        self._crew.count_used(self._key, self._sampler.used())

    def _fetch(self, last: int) -> None:
        """Take a batch of epoch `last` or an earlier one."""
        while not (batch := list(islice(self._indices, 3))):
            if self._sampler.epoch >= last:
                return
            self._indices = iter(self._sampler)
        self._sampler.count(len(batch))

    def hold(self) -> None:
        """Take a batch, and keep it."""
        next(self._indices)

    def die(self) -> None:
        self._crew.fence(self._key)
        self._begin()

    def _lease(self, sampler: int, epoch: int, length: int, count: int, wait: float) -> Leased:
        request = Lease(
            incarnation=self._key[1], sampler=sampler, epoch=epoch, length=length, count=min(count, 6)
        )
        return self._crew.leases.handle_lease(*self._key, request)


def test_a_loop_that_is_left_goes_on_with_the_batches_that_were_not_used() -> None:
    crew = Crew(400, 32, [0.01, 0.04])
    sizes = []
    for _ in range(7):  # two batches in each loop, and up to three more are fetched
        loops = [crew.loader(rank, 3 * rank) for rank in range(2)]
        sizes += [crew.step(list(each)) for each in islice(zip(*loops, strict=True), 2)]
    assert crew.used[0].total() == len(crew.used[0]) == 14 * 16
    assert set(map(sum, sizes)) == {16}
    assert sizes[0] == (8, 8)
    assert sizes[-1] in ((13, 3), (12, 4))


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_loop_that_is_left_near_the_end_leaves_its_rest_to_the_next_loop(ahead: int) -> None:
    """The fast member has fetched all that is left, the slow one nothing or as much."""
    crew = Crew(80, 32, [0.01, 0.04], by_speed=False)
    found = []
    for stop in (3, 1, 9, 9):
        loops = [islice(crew.loader(rank, fetches), stop) for rank, fetches in enumerate((3, ahead))]
        found.append([crew.step(list(each)) for each in zip(*loops, strict=True)])
    assert list(map(len, found)) == [3, 1, 1, 5]
    assert crew.used == {0: Counter(range(80)), 1: Counter(range(80))}


@pytest.mark.parametrize("workers", [(0, 2), (1, 1)])
def test_a_data_loader_shows_that_its_loop_was_left(workers: tuple[int, int]) -> None:
    """Processes of a loader fetch two batches ahead, each; one keeps them for all its loops."""
    crew, passes = Crew(80, 32, [0.01, 0.04], by_speed=False), Passes()
    crew.shows_left = passes.was_left
    data: Any = range(80)
    loaders = [
        DataLoader(data, batch_sampler=batches, num_workers=count, persistent_workers=count == 1)
        for batches, count in zip(crew.batches, workers, strict=True)
    ]
    found = []
    try:
        for stop in (3, 1, 9, 9, 2, 2, 2):
            loops = islice(zip(*loaders, strict=True), stop)
            found.append([crew.step([each.tolist() for each in both]) for both in loops])
    finally:
        passes.close()
    assert list(map(len, found)) == [3, 1, 1, 5, 2, 2, 1]
    assert crew.used == {epoch: Counter(range(80)) for epoch in range(3)}


@pytest.mark.parametrize("given_as", ["batch_sampler", "sampler"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_model_that_is_called_twice_for_a_batch_uses_it_once(ahead: int, given_as: str) -> None:
    """Whatever the size of a member's part; the second time its samples are of no further batch."""
    more: dict[str, Any] = {"batch_size": None} if given_as == "sampler" else {}
    crew, passes, data = Crew(80, 32, [0.01, 0.04], by_speed=False), Passes(), torch.arange(80)
    state = cast(Any, SimpleNamespace(restore_random_once=lambda: None))
    seen = [SampledBatches(state, passes, None) for _ in crew.each]
    try:
        loaders = [
            DataLoader(cast(Any, data), num_workers=ahead * rank, **{given_as: batches, **more})
            for rank, batches in enumerate(crew.batches)
        ]
        for both in zip(*loaders, strict=True):
            for rank, batch in enumerate(both):
                seen[rank].given_by(crew.samplers[rank])
                size = float(len(batch))
                counted = []
                for part in (size - 1, 1.0, size, size) if size > 1 else (size, size):
                    seen[rank].forward()
                    counted.append(seen[rank].count(SeenSamples(part, True)))
                assert sum(each.new or 0.0 for each in counted) == size
                used = crew.samplers[rank].used()
                assert sum(part.stop - part.start for part in used) == size
                crew.count_used(KEY, used)
    finally:
        passes.close()
    assert crew.used == {0: Counter(range(80))}


def test_members_of_unlike_parts_tell_the_same_number_of_batches() -> None:
    """Of ten samples for four workers two get three: the epoch has as many batches for these as for the
    others. So it is for the members of a group of three of them."""
    for members in (4, 3):
        crew = Crew(251, 10, [0.01] * members, by_speed=False)
        assert [len(batches) for batches in crew.batches] == [26] * members
        loops = [crew.loader(rank, 0) for rank in range(members)]
        steps = [crew.step(list(each)) for each in zip(*loops, strict=True)]
        if members == 4:
            assert len(steps) == 26
        assert [len(batches) for batches in crew.batches] == [26] * members


@pytest.mark.parametrize("stop", [99, 7, 3])
@pytest.mark.parametrize("fetches", [(0, 0), (0, 4), (9, 0), (2, 1)])
def test_members_tell_the_same_number_of_batches_after_a_resume(fetches: tuple[int, int], stop: int) -> None:
    """Of the epoch that was resumed, until its loop has ended on all: whoever knows by then that it will.
    Loops come to their end, are left with the epoch's last batch, or before."""
    saved, crew = [Crew(320, 32, [0.01, 0.04], by_speed=False) for _ in range(2)]
    loops = [saved.loader(rank, 0) for rank in range(2)]
    for _ in range(13):
        saved.step([next(loop) for loop in loops])
    state = saved.samplers[0].state_dict([sampler.place() for sampler in saved.samplers])
    for sampler in crew.samplers:
        sampler.load_state_dict(state)
    found = []
    for _ in range(2):
        loops = [islice(crew.loader(rank, ahead), stop) for rank, ahead in enumerate(fetches)]
        for each in zip(*loops, strict=True):
            crew.step(list(each))
            found.append([len(batches) for batches in crew.batches])
        found.append([len(batches) for batches in crew.batches])
    assert all(one == other for one, other in found), found
    told = {99: [4] * 7 + [10] * 22, 7: [4] * 8 + [10] * 8, 3: [4] * 8}
    assert [one for one, _ in found] == told[stop]


def test_batches_that_a_script_leaves_out_do_not_come_again() -> None:
    crew = Crew(80, 32, [0.01, 0.04], by_speed=False)
    for _ in range(3):
        loops = [crew.loader(rank, 2) for rank in range(2)]
        batches = list(zip(*loops, strict=True))
        assert len(batches) == 5
        for each in batches[::2]:  # of which the first are taken for those used
            crew.step(list(each))
    assert [sampler.epoch for sampler in crew.samplers] == [2, 2]


@pytest.mark.parametrize("same", [True, False])
def test_an_epoch_that_is_set_is_alike_on_members_that_fetch_unlike(same: bool) -> None:
    crew = Crew(80, 32, [0.01, 0.04], by_speed=False)
    found = []
    for loop, stop in enumerate((3, 9, 9)):
        for batches in crew.batches:
            batches.set_epoch(0 if same else loop)
        loops = [islice(crew.loader(rank, 3 * rank), stop) for rank in range(2)]
        found.append([crew.step(list(each)) for each in zip(*loops, strict=True)])
    assert list(map(len, found)) == ([3, 2, 0] if same else [3, 5, 5])


@pytest.mark.parametrize("sets", ["loop", "ended", "again"])
@pytest.mark.parametrize("seed", range(40))
def test_members_whose_scripts_set_epochs_make_equally_many_batches(seed: int, sets: str) -> None:
    """Whatever they have fetched, and whoever else dies. An epoch is the number of a loop (`loop`), or of
    loops that have come to their end (`ended`), or any of the first three (`again`)."""
    chance = random.Random(seed)
    crew = Crew(
        chance.randint(20, 120),
        chance.randint(9, 31),
        [0.01, 0.04, 0.02],
        by_speed=bool(seed % 2),
        wait=float(seed % 3 > 0),
    )
    ahead, others, epoch = [chance.randint(0, 4) for _ in crew.each], Others(crew, 0.4), 0
    for loop in range(20):
        if sets == "again":
            epoch = chance.randint(0, 2)
        for batches in crew.batches:
            batches.set_epoch(loop if sets == "loop" else epoch)
        stop = chance.choice([0, 1, 2, 3, 5, 1000])
        loops = [islice(crew.loader(rank, fetches), stop) for rank, fetches in enumerate(ahead)]
        steps = 0
        for each in zip(*loops, strict=True):
            crew.step(list(each))
            others.turn(chance)
            steps += 1
        epoch += sets == "ended" and steps < stop


@pytest.mark.parametrize("by_speed", [True, False])
def test_an_epoch_that_was_given_up_and_is_set_again_is_as_long_for_all_members(by_speed: bool) -> None:
    """One member has fetched six batches more than the other one. What it was given and did not use is lost
    to the epoch."""
    crew = Crew(320, 32, [0.01, 0.04], by_speed=by_speed)
    found = []
    for epoch, stop in ((0, 2), (1, 2), (0, 99), (1, 99), (0, 99)):
        for batches in crew.batches:
            batches.set_epoch(epoch)
        loops = [islice(crew.loader(rank, 6 * rank), stop) for rank in range(2)]
        found.append(len([crew.step(list(each)) for each in zip(*loops, strict=True)]))
    assert found == [2, 2, 12, 12, 0]
    assert all(count == 1 for used in crew.used.values() for count in used.values())


def test_members_that_have_gone_back_to_an_epoch_unlike_often_are_alike_in_a_new_group() -> None:
    """Each was alone before. The first loop of the group begins with what was left of the latest epochs. Then
    the group goes back to an epoch before the one in which it was formed."""
    crew = Crew(320, 32, [0.01, 0.04], by_speed=False)
    for epoch in (9, 1, 2, 1, 9):
        crew.batches[1].set_epoch(epoch)
    found = []
    for epoch, stop in ((9, 2), (0, 99), (9, 99)):
        for batches in crew.batches:
            batches.set_epoch(epoch)
        if not found:
            crew.move()
        loops = [islice(crew.loader(rank, 6 * rank), stop) for rank in range(2)]
        found.append(len([crew.step(list(each)) for each in zip(*loops, strict=True)]))
    assert found == [2, 20, 20]


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_loop_that_is_left_with_its_last_batch_leaves_nothing_of_an_epoch_set_again(ahead: int) -> None:
    """Whether the loader knows that it was the last one, or not."""
    crew = Crew(80, 32, [0.01, 0.04], by_speed=False)
    found = []
    for epoch, stop in ((0, 5), (0, 9), (1, 9), (1, 9)):
        for batches in crew.batches:
            batches.set_epoch(epoch)
        loops = [islice(crew.loader(rank, fetches), stop) for rank, fetches in enumerate((3, ahead))]
        found.append(len([crew.step(list(each)) for each in zip(*loops, strict=True)]))
    assert found == [5, 0, 5, 0]


@pytest.mark.parametrize("wait", [0.0, 1.0])
def test_an_epoch_that_the_script_gives_up_is_given_up_by_all_members(wait: float) -> None:
    """One member has seen that it is over, while a worker that dies held some of it. The other has not."""
    crew = Crew(80, 32, [0.01, 0.04], by_speed=False, wait=wait)
    others, found = Others(crew, 1.0), []
    others.hold()
    for epoch, stop in ((0, 2), (1, 99), (2, 99)):
        for batches in crew.batches:
            batches.set_epoch(epoch)
        loops = [islice(crew.loader(rank, 6 * rank), stop) for rank in range(2)]
        found.append(len([crew.step(list(each)) for each in zip(*loops, strict=True)]))
        others.die()
    assert found == [2, 5, 5]


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("members", [2, 3])
def test_a_group_goes_on_without_a_member_that_has_asked_for_more_or_less(
    gone: int, ahead: int, members: int
) -> None:
    """Those who are left take their parts of blocks that were leased for all, and of new ones."""
    crew, fetches = Crew(400, 32, [0.01, 0.04, 0.02][:members]), [3 - ahead, ahead, 0]
    loops = {rank: crew.loader(rank, fetches[rank]) for rank in range(members)}

    def go_on() -> None:
        """The members whose loops have not ended make a step."""
        batches = {rank: batch for rank in crew.there if (batch := next(loops[rank], None)) is not None}
        for rank in set(crew.there) - set(batches):
            crew.lose(rank)
        crew.step(list(batches.values()))

    for _ in range(7):
        go_on()
    crew.lose(gone)
    for _ in range(3):  # before they become a contributor of their own
        go_on()
    crew.move()
    while crew.there:
        go_on()
    crew.fence(crew.key)
    others = Others(crew, 1.0)
    while 0 in crew.used and crew.used[0].total() < crew.length:
        others.take()
    assert crew.used[0] == Counter(range(crew.length))


@pytest.mark.parametrize("seed", range(40))
def test_each_sample_counts_once_whoever_dies_and_whatever_loops_are_left(seed: int) -> None:
    """Members die one after another, with batches in hand and blocks that the others have not asked for.
    Those who live become a new contributor some iterations later."""
    chance = random.Random(seed)
    wait = float(seed % 3 > 0)
    crew = Crew(
        chance.randint(40, 160),
        chance.randint(9, 31),
        [0.01, 0.04, 0.02, 0.01],
        by_speed=seed % 2 == 0,
        wait=wait,
    )
    others, leaves, iteration = Others(crew, 0.3), chance.choice([3, 4, 7, 1000]), 0

    def script(rank: int, ahead: int) -> Iterator[list[int]]:
        while crew.samplers[rank].epoch < 6:
            for batch in crew.loader(rank, ahead):
                yield batch
                if iteration % leaves == 0:
                    break

    scripts = {rank: script(rank, chance.randint(0, 4)) for rank in crew.there}
    moves_at = 0
    while crew.there:
        iteration += 1
        batches = {rank: batch for rank in crew.there if (batch := next(scripts[rank], None)) is not None}
        gone = set(crew.there) - set(batches)
        if len(crew.there) > 1 and chance.random() < 0.03:
            gone.add(chance.choice(crew.there))
        for rank in gone:
            crew.lose(rank)
            moves_at = iteration + chance.randint(0, 3)
        crew.step([batches[rank] for rank in crew.there])
        others.turn(chance)
        if iteration == moves_at and crew.there:
            crew.move()
    crew.fence(crew.key)
    epochs = max(sampler.epoch for sampler in crew.samplers)
    while any(crew.used[epoch].total() < crew.length for epoch in range(epochs)):
        others.take()
    for epoch in range(epochs):
        assert crew.used[epoch] == Counter(range(crew.length)), epoch


@pytest.mark.parametrize("seed", range(12))
def test_members_are_offset_after_a_loss_or_a_move_by_what_they_had_in_hand(seed: int) -> None:
    """The loop in which it happens, or the next one, is of unlike length for them, and no later one. A member
    whose loop has ended is in its next one, so no iteration waits for a batch that nobody makes."""
    chance = random.Random(seed)
    crew = Crew(chance.randint(40, 99), chance.randint(9, 31), [0.01, 0.04, 0.02], by_speed=seed % 2 == 0)
    ahead, ends = [chance.randint(0, 4) for _ in crew.each], list[list[int]]([[], [], []])
    loses, iteration = chance.randint(1, 12), 0
    moves, gone = loses + chance.randint(0, 3), chance.choice([None, 0, 1, 2])

    def script(rank: int) -> Iterator[list[int]]:
        while True:
            yield from crew.loader(rank, ahead[rank])
            ends[rank].append(iteration)

    scripts, first, last = [script(rank) for rank in range(3)], 0, 0
    for iteration in range(60):
        if iteration == loses and gone is not None:
            first = min(map(len, ends))
            crew.lose(gone)
        if iteration == moves:
            last = max(map(len, ends))
            crew.move()
        crew.step([next(scripts[rank]) for rank in crew.there])
    for rank in crew.there[1:]:
        offsets = [own - other for own, other in zip(ends[rank], ends[crew.there[0]], strict=False)]
        assert len(offsets) > last + 2
        assert not any(offsets[:first])
        assert len(set(offsets[last + 1 :])) == 1, offsets
        assert abs(offsets[-1]) <= max(ahead), offsets
    assert all(count == 1 for used in crew.used.values() for count in used.values())


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
    crew.move()
    found = [crew.step([next(loop) for loop in loops]) for _ in range(12)]
    assert found[:3] == [(8, 8)] * 3
    assert found[-1] in ((13, 3), (12, 4))
    crew.lose(1)
    assert crew.shares[0].cut() == Cut({1: 8}, 1)  # of one that is left alone, too


def test_a_groups_part_follows_the_number_of_workers_in_all_groups() -> None:
    """Members hear of it one after another, with their leases. The proportion of their parts stays."""
    crew = Crew(10**5, 32, [0.01, 0.04])
    loops = [crew.loader(rank, 2 * rank) for rank in range(2)]
    for _ in range(12):
        crew.step([next(loop) for loop in loops])
    found = []
    for hears in (0, 1, None, None):  # two of the others are lost; then they come back
        for _ in range(8):
            found.append(crew.step([next(loop) for loop in loops]))
        crew.heard = [2 if rank == hears else each for rank, each in enumerate(crew.heard)]
        if hears is None:
            crew.heard = [4, 4]
    assert {sum(each) for each in found[:8]} == {16}
    assert {sum(each) for each in found[8:20]} <= {16, 32}
    assert {sum(each) for each in found[20:24]} == {32}
    assert found[23] in ((26, 6), (25, 7))
    assert sum(found[-1]) == 16
    assert found[-1] in ((13, 3), (12, 4))


def test_no_part_is_above_a_cap_while_caps_hold_the_groups_part() -> None:
    crew = Crew(2000, 32, [0.01, 0.04], caps={1: 10})
    loops = [iter(batches) for batches in crew.batches]
    sizes = [crew.step([next(loop) for loop in loops]) for _ in range(12)]
    assert sizes[0] == (8, 8)
    assert sizes[-1] == (10, 6)
    crew.heard = [2, 2]  # a part of 32 samples, which the cap does not hold any more with one of 10
    crew.caps[4] = 10
    sizes = [crew.step([next(loop) for loop in loops]) for _ in range(8)]
    assert sum(sizes[-1]) == 32


def test_a_block_for_others_is_refused() -> None:
    shares = Crew(20, 32, [1.0, 1.0]).shares[0]
    leased = Leased(sampler=0, epoch=0, start=0, stop=8)
    with pytest.raises(RunError, match="worker 1 was given a block of epoch 0 that is cut for workers 4, 9"):
        list(shares.own(leased, Cut({4: 4, 9: 4})))


def test_the_first_batches_of_a_session_follow_speeds_and_others_are_cut_evenly() -> None:
    crew = Crew(2000, 20, [0.01, 0.04])
    reports = crew.reports[0]
    sync = Sync(shares="auto", global_batch=20, memory_cap=9)
    dealing = UnevenShares(sync, lambda world: crew.names[:world], reports, print, fixed=False)
    first, second = [
        dealing.in_group(crew.rings[0], lambda: 2, lambda: 3, whole, lambda: 1) for whole in (16, 21)
    ]
    assert (first.cut(), second.cut()) == (Cut({1: 8, 4: 8}, 3), Cut({1: 10, 4: 11}, 1))
    assert reports._sampler is first
    with pytest.raises(
        UserError, match="sync.global_batch = 5 is too small to give each of 2 workers 3 samp"
    ):
        UnevenShares(sync, list, reports, print, fixed=False).in_group(
            crew.rings[0], lambda: 2, lambda: 3, 5, lambda: 1
        )
    with pytest.raises(
        UserError, match="sync.global_batch = 2147483648 is too large: groups cut batches bel"
    ):
        dealing.in_group(crew.rings[0], lambda: 2, lambda: 3, 2**31, lambda: 1)
