"""The leased sampler: ShardedSampler's order, each sample once an epoch, whoever is fast, slow or dies."""

from __future__ import annotations

import gc
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from atoll.core.errors import CheckpointError, RunError, UserError
from atoll.store.leases import Leases
from atoll.train.data.epochs import epoch_of
from atoll.train.data.leased_sampler import FIRST_LEASE, LeasedBatches, LeasedSampler, Samples
from atoll.train.data.moredata import MoreData
from atoll.train.data.order import SampleOrder
from atoll.train.data.owndata import OwnData
from atoll.train.data.sampler import ShardedSampler
from atoll.wire.messages import Lease, Leased, Used


class Office:
    """The hub's leases without a hub: workers ask, commit and die by calls."""

    def __init__(self) -> None:
        self.leases = Leases()
        self.asked: list[int] = []  # counts
        self.used: dict[int, Counter[int]] = {}  # epoch -> positions, as commits name them
        self.everything: dict[int, list[Any]] = {}  # rank -> what its commits used

    def lessor(self, rank: int) -> Any:
        def lease(
            sampler: int,
            epoch: int,
            length: int,
            count: int,
            wait: float,
            returned: Sequence[Used] = (),
            *,
            idle: bool = False,
        ) -> Leased:
            self.asked.append(count)
            request = Lease(
                incarnation=rank + 1,
                sampler=sampler,
                epoch=epoch,
                length=length,
                count=count,
                returned=list(returned),
                idle=idle,
            )
            return self.leases.handle_lease(rank, rank + 1, request)

        return lease

    def sampler(self, rank: int, length: int, **options: Any) -> LeasedSampler:
        return LeasedSampler(length, lease=self.lessor(rank), **options)

    def commit(self, rank: int, sampler: LeasedSampler) -> None:
        used = sampler.used()
        self.everything.setdefault(rank, []).extend(used)
        self.leases.handle_used(rank, rank + 1, used)
        for part in used:
            self.used.setdefault(part.epoch, Counter()).update(range(part.start, part.stop))

    def die(self, rank: int) -> None:
        self.leases.handle_fenced(rank, rank + 1, self.everything.get(rank, []))


def train(office: Office, rank: int, sampler: LeasedSampler, batch: int) -> list[int]:
    """An epoch of steps, each of which trains on a batch and commits it; gives the indices."""
    had = []
    indices = iter(sampler)
    while part := list(itertools.islice(indices, batch)):
        had += part
        sampler.count(len(part))
        office.commit(rank, sampler)
    return had


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch", [1, 3, 8, 100])
def test_alone_the_order_is_the_sharded_samplers(shuffle: bool, batch: int) -> None:
    theirs = ShardedSampler(50, rank=0, world=1, seed=3, shuffle=shuffle)
    office = Office()
    ours = office.sampler(0, 50, seed=3, shuffle=shuffle)
    for epoch in range(3):
        assert train(office, 0, ours, batch) == list(theirs)
        assert ours.epoch == epoch
        assert office.used[epoch] == Counter(range(50))


def own_data() -> OwnData:
    """Return the loops over own data of a worker alone."""
    return OwnData(MoreData(), ask=bool, unsent=lambda: False, check=lambda: None, together=False)


@pytest.mark.parametrize("in_batches", [True, False])
def test_an_epoch_of_a_loader_is_one_loop_over_it(in_batches: bool) -> None:
    office = Office()
    sampler = office.sampler(0, 10)
    how: dict[str, Any] = {"batch_sampler": LeasedBatches(sampler, lambda: 4)} if in_batches else {}
    data: Any = range(10)
    loader = DataLoader(data, **(how or {"batch_size": 4, "sampler": sampler}))
    for epoch in range(2):
        had = []
        for batch in epoch_of(loader, [sampler], lambda: None, own_data()):
            had += batch.tolist()
            sampler.count(len(batch))
            office.commit(0, sampler)
        assert sorted(had) == list(range(10))
        assert sampler.epoch == epoch


def test_leases_are_whole_batches_once_a_batch_is_known() -> None:
    office = Office()
    train(office, 0, office.sampler(0, 100), 6)
    assert office.asked[0] == FIRST_LEASE
    assert office.asked[1] == 2 * 6 - FIRST_LEASE % 6
    assert set(office.asked[2:-1]) == {12}
    office = Office()
    train(office, 0, office.sampler(0, 100, lease_size=7), 6)
    assert set(office.asked) == {7}


def test_a_loader_over_it_with_any_prefetch() -> None:
    class Numbers(Dataset[int]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            return index

    for workers in (0, 2):
        office = Office()
        sampler = office.sampler(0, 20)
        loader: DataLoader[Any] = DataLoader(Numbers(), batch_size=3, sampler=sampler, num_workers=workers)
        for epoch in range(2):
            seen: list[int] = []
            for batch in loader:
                seen += batch.tolist()
                sampler.count(len(batch))
                office.commit(0, sampler)
            assert sorted(seen) == list(range(20))
            assert office.used[epoch] == Counter(range(20))


@pytest.mark.parametrize("seed", range(30))
def test_each_sample_counts_once_an_epoch_whatever_the_speeds_and_deaths(seed: int) -> None:
    """Workers of any batch, speed and prefetch in any order; some die. What came back after the others had
    left an epoch is dealt in the next, so all but the last epoch are whole."""
    chance = random.Random(seed)
    epochs, length, office = 4, chance.randint(1, 200), Office()
    loops = {rank: _loop(office, rank, length, epochs, chance) for rank in range(chance.randint(1, 4))}
    immortal = 0
    while loops:
        rank = chance.choice([rank for rank in loops for _ in range(1 + 3 * (rank == 1))])
        if rank != immortal and chance.random() < 0.005:
            office.die(rank)
            del loops[rank]
        elif next(loops[rank], "over") == "over":
            del loops[rank]
            office.die(rank)  # goodbye
    for epoch in range(epochs - 1):
        assert office.used[epoch] == Counter(range(length)), epoch
    assert set(office.used[epochs - 1].values()) <= {1}


def _loop(office: Office, rank: int, length: int, epochs: int, chance: random.Random) -> Any:
    """A worker's training as a generator that stops after each thing it does: a loader that prefetches."""
    sampler = office.sampler(rank, length, seed=1)
    batch, ahead, drop_last = chance.randint(1, 9), chance.randint(0, 3), chance.random() < 0.3
    if rank == 0:
        drop_last, epochs = False, epochs + 1  # someone must be there who takes what comes back
    for _ in range(epochs):
        indices, ready, over = iter(sampler), [], False
        while ready or not over:
            while not over and len(ready) <= ahead:
                part = list(itertools.islice(indices, batch))
                over = len(part) < batch
                if part and not (over and drop_last):
                    ready.append(part)
                yield
            if ready:
                sampler.count(len(ready.pop(0)))
                if chance.random() < 0.8:  # else the next commit has two batches
                    office.commit(rank, sampler)
            yield
    office.commit(rank, sampler)


def test_a_faster_worker_takes_more() -> None:
    office = Office()
    fast, slow = (office.sampler(rank, 600, lease_size=4) for rank in range(2))
    both = [iter(fast), iter(slow)]
    counts = [0, 0]
    for turn in itertools.cycle((0, 0, 0, 0, 1)):
        part = list(itertools.islice(both[turn], 2))
        counts[turn] += len(part)
        sampler = (fast, slow)[turn]
        sampler.count(len(part))
        office.commit(turn, sampler)
        if not part:
            break
    assert counts[0] + counts[1] == 600
    assert 3.8 < counts[0] / counts[1] < 4.2


def test_what_a_dead_worker_held_is_dealt_again() -> None:
    office = Office()
    alive, dead = (office.sampler(rank, 40, lease_size=8) for rank in range(2))
    had = list(itertools.islice(iter(dead), 6))
    dead.count(4)
    office.commit(1, dead)
    first = iter(alive)
    mine = list(itertools.islice(first, 10))
    office.die(1)
    mine += first
    assert sorted(mine + had[:4]) == list(range(40))


def test_waiting_for_others_at_the_end_of_an_epoch() -> None:
    office = Office()
    waits: list[float] = []
    other = office.sampler(1, 8, lease_size=4)
    next(iter(other))
    plain = office.lessor(0)

    def lease(sampler: int, epoch: int, length: int, count: int, wait: float) -> Leased:
        waits.append(wait)
        if wait:
            office.die(1)
        return plain(sampler, epoch, length, count, wait)  # type: ignore[no-any-return]

    sampler = LeasedSampler(8, lease=lease, lease_size=4, wait=7.0)
    assert len(train(office, 0, sampler, 4)) == 8
    assert 7.0 in waits
    assert office.used[0] == Counter(range(8))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_does_not_wait_for_others(context: Callable[[], Any]) -> None:
    """Without gradients nobody commits: another worker holds its positions however long this one waits."""
    office = Office()
    next(iter(office.sampler(1, 8, lease_size=4)))
    waits: list[float] = []
    plain = office.lessor(0)

    def lease(sampler: int, epoch: int, length: int, count: int, wait: float) -> Leased:
        waits.append(wait)
        return plain(sampler, epoch, length, count, 0.0)  # type: ignore[no-any-return]

    sampler = LeasedSampler(8, lease=lease, lease_size=4, wait=7.0)
    with context():
        assert len(list(sampler)) == 4
    assert waits
    assert not any(waits)


def test_without_waiting_what_comes_back_is_dealt_in_the_next_epoch() -> None:
    office = Office()
    other = office.sampler(1, 8, lease_size=4)
    next(iter(other))
    told: list[str] = []
    sampler = office.sampler(0, 8, lease_size=4, mixes=told.append)
    assert len(train(office, 0, sampler, 4)) == 4
    assert told == []
    office.die(1)
    assert len(train(office, 0, sampler, 4)) == 12
    assert sampler.epoch == 1
    assert set(told) == {told[0]}
    assert told[0].startswith(
        "session.sampler: samples of epoch 0 come at the beginning of epoch 1, where one"
    )
    assert office.used == {0: Counter(range(8)), 1: Counter(range(8))}
    assert len(train(office, 0, sampler, 4)) == 8


def test_a_worker_that_may_not_wait_asks_again_for_what_others_hold() -> None:
    """It held nothing itself: the hub says that others do (a new group waits for it, hub/groups.py)."""
    office = Office()
    holder = office.sampler(0, 8)
    assert next(iter(holder)) >= 0  # it holds the whole epoch
    answers = office.lessor(1)

    def lease(sampler: int, epoch: int, length: int, count: int, wait: float) -> Leased:
        leased = answers(sampler, epoch, length, count, wait)
        held = not leased.over and leased.start == leased.stop
        return msgspec.structs.replace(leased, over=True, held=True) if held else leased

    sampler = LeasedSampler(8, lease=lease)
    assert train(office, 1, sampler, 4) == []
    office.die(0)
    order = SampleOrder(8, 0, True)
    assert sorted(train(office, 1, sampler, 4)) == sorted([*order.of(0).tolist(), *order.of(1).tolist()])


def test_an_iteration_that_was_broken_off_goes_on_after_what_was_consumed() -> None:
    office = Office()
    sampler = office.sampler(0, 20, lease_size=6)
    order = list(ShardedSampler(20, rank=0, world=1))
    assert list(itertools.islice(iter(sampler), 9)) == order[:9]
    sampler.count(8)
    assert train(office, 0, sampler, 4) == order[8:]
    assert office.used[0] == Counter(range(20))
    assert sampler.epoch == 0


def test_an_iteration_that_took_all_and_not_the_end_is_followed_by_the_next_epoch() -> None:
    office = Office()
    sampler = office.sampler(0, 20)
    assert len(list(itertools.islice(iter(sampler), 20))) == 20
    sampler.count(20)
    office.commit(0, sampler)
    assert len(train(office, 0, sampler, 5)) == 20
    assert sampler.epoch == 1
    assert office.used[1] == Counter(range(20))


def test_set_epoch_leaves_an_epoch_and_what_is_held_of_it() -> None:
    office = Office()
    sampler = office.sampler(0, 20, lease_size=6)
    list(itertools.islice(iter(sampler), 3))
    sampler.set_epoch(1)
    theirs = ShardedSampler(20, rank=0, world=1)
    theirs.set_epoch(1)
    assert train(office, 0, sampler, 4) == list(theirs)
    sampler.set_epoch(1)
    assert train(office, 0, sampler, 4) == []  # an epoch is used once
    sampler.set_epoch(2)
    assert len(train(office, 0, sampler, 4)) == 20


def test_a_tail_that_makes_no_batch_comes_in_the_next_epoch() -> None:
    office = Office()
    told: list[str] = []
    sampler = office.sampler(0, 10, mixes=told.append)
    indices = iter(sampler)
    for _ in range(2):
        assert len(list(itertools.islice(indices, 4))) == 4
        sampler.count(4)
        office.commit(0, sampler)
    tail = list(indices)  # a loader with drop_last takes it and gives no batch
    assert len(tail) == 2
    assert told == []
    had = train(office, 0, sampler, 4)
    assert had[:2] == tail
    assert len(had) == 12
    assert len(told) == 2
    assert office.used == {0: Counter(range(10)), 1: Counter(range(10))}


def test_samples_that_the_script_leaves_out_do_not_come_again() -> None:
    """A forward whose leading dimension is no count of samples must not make an epoch grow for ever."""
    office = Office()
    sampler = office.sampler(0, 100)
    for epoch in range(4):
        indices = iter(sampler)
        had = 0
        while part := list(itertools.islice(indices, 10)):
            had += len(part)
            sampler.count(1)
            office.commit(0, sampler)
        assert (sampler.epoch, had) == (epoch, 100)


def test_a_worker_that_comes_late_finds_the_epochs_before_used_up() -> None:
    office = Office()
    first = office.sampler(0, 12)
    train(office, 0, first, 4)
    train(office, 0, first, 4)
    late = office.sampler(1, 12)
    assert [len(train(office, 1, late, 4)) for _ in range(3)] == [0, 0, 12]


def test_on_index_is_called_before_each_index() -> None:
    seen: list[tuple[int, int]] = []
    office = Office()
    sampler = office.sampler(0, 3, on_index=lambda s: seen.append((s.epoch, s.given)))
    list(sampler)
    assert seen == [(0, 1), (0, 2), (0, 3)]


def test_the_length_is_an_even_share() -> None:
    sampler = Office().sampler(0, 10, workers=3)
    assert len(sampler) == 4


def test_an_empty_dataset_gives_nothing_and_asks_nobody() -> None:
    office = Office()
    assert list(office.sampler(0, 0)) == []
    assert office.asked == []


def test_a_dataset_without_a_length() -> None:
    with pytest.raises(UserError, match="no length"):
        Office().sampler(0, iter([1]))  # type: ignore[arg-type]


def test_a_lease_beyond_the_epoch_is_an_error() -> None:
    def lease(sampler: int, epoch: int, length: int, count: int, wait: float) -> Leased:
        return Leased(sampler=sampler, epoch=epoch, start=0, stop=length + 1)

    with pytest.raises(RunError, match="epoch 0, which has 5"):
        list(LeasedSampler(5, lease=lease))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_checkpoint_names_what_all_workers_have_used(world: int) -> None:
    office = Office()
    team = [office.sampler(rank, 50, seed=2, lease_size=4) for rank in range(2)]
    indices = [iter(sampler) for sampler in team]
    seen: list[int] = []
    for rank in (0, 1, 0, 0, 1):
        part = list(itertools.islice(indices[rank], 3))
        seen += part
        team[rank].count(len(part))
        office.commit(rank, team[rank])
    state = team[0].state_dict([sampler.place() for sampler in team])
    assert state["epoch"] == 0
    assert state == team[1].state_dict([sampler.place() for sampler in team])
    for _ in range(2):  # by the same hub, and once more by another
        after = [office.sampler(rank, 50, lease_size=4) for rank in range(world)]
        for sampler in after:
            sampler.load_state_dict(state)
            assert sampler.resumed
        rest = _together(office, after)
        assert sorted(seen + rest) == list(range(50))
        assert sorted(_together(office, after)) == list(range(50))
        assert after[0].epoch == 1
        office = Office()


def _together(office: Office, team: list[LeasedSampler]) -> list[int]:
    seen: list[int] = []
    indices = {rank: iter(sampler) for rank, sampler in enumerate(team)}
    while indices:
        for rank, given in list(indices.items()):
            part = list(itertools.islice(given, 2))
            seen += part
            team[rank].count(len(part))
            office.commit(rank, team[rank])
            if not part:
                del indices[rank]
    return seen


def test_a_count_of_all_samples_is_taken_for_a_place() -> None:
    office = Office()
    sampler = office.sampler(0, 30)
    sampler.load_state_dict(office.sampler(1, 30).state_dict(9))
    assert list(itertools.islice(iter(sampler), 5)) == list(ShardedSampler(30, rank=0, world=1))[9:14]
    assert sampler.state_dict(5)["offset"] == 14


def test_a_second_checkpoint_in_a_resumed_epoch() -> None:
    office = Office()
    sampler = office.sampler(0, 30, lease_size=4)
    whole = list(ShardedSampler(30, rank=0, world=1))
    seen: list[int] = []
    for _ in range(3):
        part = list(itertools.islice(iter(sampler), 7))
        seen += part
        sampler.count(7)
        office.commit(0, sampler)
        state = sampler.state_dict()
        sampler = office.sampler(0, 30, lease_size=4)
        sampler.load_state_dict(state)
        office = Office()
        sampler._lease = office.lessor(0)
    assert seen == whole[:21]
    assert train(office, 0, sampler, 4) == whole[21:]


def test_workers_in_different_epochs() -> None:
    office = Office()
    ahead, behind = (office.sampler(rank, 20, lease_size=4) for rank in range(2))
    next(iter(behind))
    assert len(train(office, 0, ahead, 4)) == 16
    list(itertools.islice(iter(ahead), 4))
    ahead.count(4)
    office.commit(0, ahead)
    state = ahead.state_dict([ahead.place(), behind.place()])
    assert (state["epoch"], state["offset"]) == (0, 0)
    office = Office()
    again = office.sampler(0, 20)
    again.load_state_dict(state)
    assert [len(train(office, 0, again, 4)) for _ in range(3)] == [4, 16, 20]


def test_a_finished_epoch_resumes_at_the_next() -> None:
    office = Office()
    sampler = office.sampler(0, 10)
    train(office, 0, sampler, 4)
    again = Office().sampler(0, 10)
    again.load_state_dict(sampler.state_dict())
    assert (again.epoch, again.resumed) == (1, False)
    assert len(list(again)) == 10


def test_a_sharded_samplers_state_is_taken_and_the_other_way_round() -> None:
    theirs = ShardedSampler(20, rank=0, world=1, seed=4)
    whole = list(theirs)
    theirs = ShardedSampler(20, rank=0, world=1, seed=4)
    office = Office()
    sampler = office.sampler(0, 20)
    sampler.load_state_dict(theirs.state_dict(6))
    part = list(itertools.islice(iter(sampler), 3))
    assert part == whole[6:9]
    sampler.count(3)
    office.commit(0, sampler)
    theirs.load_state_dict(sampler.state_dict())
    assert list(theirs) == whole[9:]


@pytest.mark.parametrize(
    "change",
    [
        {"length": 9},
        {"shuffle": False},
        {"used": 3},
        {"used": [[0, 1]]},
        {"used": [[0, 5, 11]]},
        {"used": [[0, 5, 5]]},
        {"used": [["0", 1, 2]]},
        {"epoch": -1},
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    office = Office()
    sampler = office.sampler(0, 10)
    state = {**sampler.state_dict(), **change}
    with pytest.raises(CheckpointError):
        sampler.load_state_dict(state)
    assert train(office, 0, sampler, 5) == list(ShardedSampler(10, rank=0, world=1))


def test_memory_of_a_large_data_set_is_its_order_alone() -> None:
    office = Office()
    sampler = office.sampler(0, 1_000_000, lease_size=10)
    part = list(itertools.islice(iter(sampler), 25))
    assert len(set(part)) == 25
    kept = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.numel() == 1_000_000]
    assert len(kept) == 1


def test_it_goes_on_from_a_sharded_samplers_deal_in_which_parts_are_left() -> None:
    """Of an epoch that is over, too: what came back of it is dealt first."""
    state = {"seed": 3, "epoch": 1, "offset": 30, "length": 40, "shuffle": True}
    state["left"] = [[0, 2, 5], [1, 4, 6], [1, 20, 21]]
    office = Office()
    sampler = office.sampler(0, 40, seed=9)
    sampler.load_state_dict(state)
    given = train(office, 0, sampler, 4)
    orders = [SampleOrder(40, 3, True).of(epoch).tolist() for epoch in range(2)]
    expected = orders[0][2:5] + orders[1][4:6] + orders[1][20:21] + orders[1][30:]
    assert sorted(given) == sorted(expected)
    assert len(train(office, 0, sampler, 4)) == 40  # the next epoch, whole


def test_one_that_enters_leases_of_the_same_order() -> None:
    """After a load, too, when what was used before is nobody's any more."""
    office = Office()
    first = office.sampler(0, 40, seed=9)
    first.load_state_dict({"seed": 3, "epoch": 2, "offset": 10, "length": 40, "shuffle": True})
    indices = iter(first)
    had = [next(indices) for _ in range(8)]
    first.count(8)
    office.commit(0, first)
    newcomer = office.sampler(1, 40, seed=1)
    state = first.deal_state()
    newcomer.check_deal_state(state)
    newcomer.load_deal_state(state)
    office.die(0)
    had += train(office, 1, newcomer, 4)
    assert sorted(had) == sorted(SampleOrder(40, 3, True).of(2).tolist()[10:])
    with pytest.raises(CheckpointError, match="loaded -1 times"):
        newcomer.check_deal_state({**state, "loads": -1})
    for pending in ([-1], [1.5], "12", list(range(2000))):
        with pytest.raises(CheckpointError, match="the sampler's pending epochs are "):
            newcomer.check_deal_state({**state, "pending": pending})


def test_a_newcomer_deals_what_comes_back_of_an_epoch_that_the_others_have_left() -> None:
    """The giver is in the next epoch, holds a sample of the earlier one that is not committed, and dies."""
    office = Office()
    first = office.sampler(0, 4)
    assert len(list(first)) == 4
    first.count(4)
    again = iter(first)
    next(again)
    assert first.epoch == 1
    newcomer = office.sampler(1, 4)
    newcomer.load_deal_state(json.loads(json.dumps(first.deal_state())))
    office.die(0)
    assert sorted(train(office, 1, newcomer, 8)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_members_of_a_new_group_go_to_where_the_furthest_is() -> None:
    """Who is behind ends its epochs at once; what is left of them, or comes back, is dealt with the next."""
    office = Office()
    ahead, behind = office.sampler(0, 20, seed=1), office.sampler(1, 20, seed=1)
    indices = iter(behind)
    assert len(list(itertools.islice(indices, 4))) == 4
    behind.count(4)
    office.commit(1, behind)
    behind.leave_leased()
    office.die(1)  # its old contributor, of which 16 samples are free again
    ahead.set_epoch(1)
    for sampler in (ahead, behind):
        sampler.go_to([ahead.where(), behind.where()])
    assert list(indices) == []
    assert behind.where() == (1, [0])
    train(office, 0, ahead, 4)
    assert office.used == {0: Counter(range(20)), 1: Counter(range(20))}


@pytest.mark.parametrize("seed", range(8))
def test_used_runs_are_the_fewest_in_whatever_order_they_were_used(seed: int) -> None:
    """Before a load and after it, when the hub leases what is left of the order alone."""
    chance, samples, used = random.Random(seed), Samples(SampleOrder(200, 0, True)), set[int]()
    for load in range(2):
        if load:
            samples.load(samples.order.facts(0, 0), [(epoch, *run) for epoch, *run in samples.used()])
        left = [place for place in range(200) if place not in used]
        edges = sorted(chance.sample(range(len(left) + 1), 20))
        runs = list(itertools.pairwise(edges))[::2]
        chance.shuffle(runs)
        for start, stop in runs:
            samples.note_used((0, start, stop))
            used.update(left[start:stop])
    for since_load in (True, False):
        found = samples.used(since_load=since_load)
        assert all(epoch == 0 for epoch, _, _ in found)
        places = [place for _, start, stop in found for place in range(start, stop)]
        assert len(places) == len(set(places))
        if since_load:
            assert set(places) == used
        else:
            assert set(places) < used
            begins = sum(place - 1 not in places for place in places)
            assert len(found) == begins


def test_the_first_lease_leaves_each_worker_a_part_of_a_short_epoch() -> None:
    office = Office()
    for rank in range(3):
        assert next(iter(office.sampler(rank, 24, workers=3))) >= 0
    assert office.asked == [8, 8, 8]


def test_a_loop_for_which_nothing_is_left_says_so() -> None:
    office = Office()
    train(office, 0, office.sampler(0, 8), 4)
    told: list[str] = []
    late = LeasedSampler(8, lease=office.lessor(1), rank=1, empty=told.append)
    assert list(late) == []
    assert len(told) == 1
    assert told[0].startswith("session.sampler: none of the 8 samples of epoch 0 were left for worker 1: ")
    assert told[0].endswith("take dataset[0] for a look at the data")
    assert train(office, 1, late, 4)
    assert len(told) == 1
