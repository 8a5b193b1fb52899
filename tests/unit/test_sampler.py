"""The sampler: the order of DistributedSampler, each sample once an epoch, and its place in the epoch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from atoll.core.errors import CheckpointError, UserError
from atoll.train.data.sampler import ShardedSampler


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def team(length: int, world: int, **options: Any) -> list[ShardedSampler]:
    return [ShardedSampler(length, rank=rank, world=world, **options) for rank in range(world)]


def dealt(samplers: list[ShardedSampler]) -> list[int]:
    """What the team gives in its next iteration, in the order in which it is dealt out."""
    return [index for row in zip(*samplers, strict=True) for index in row]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("length", "world"), [(10, 1), (10, 3), (12, 4), (2, 4), (1, 3)])
def test_the_order_is_that_of_distributed_sampler(
    length: int, world: int, shuffle: bool, drop_last: bool
) -> None:
    for rank in range(world):
        options: dict[str, Any] = {"rank": rank, "seed": 5, "shuffle": shuffle, "drop_last": drop_last}
        theirs: DistributedSampler[int] = DistributedSampler(Numbers(length), num_replicas=world, **options)
        ours = ShardedSampler(Numbers(length), world=world, **options)
        for epoch in range(3):
            theirs.set_epoch(epoch)
            assert len(ours) == len(theirs)
            assert list(ours) == list(theirs)  # ours goes on to the next epoch by itself


def test_each_whole_iteration_is_the_next_epoch() -> None:
    sampler = ShardedSampler(8, rank=0, world=1)
    orders = [list(sampler) for _ in range(4)]
    assert sampler.epoch == 3
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len(set(map(tuple, orders))) > 1


def test_a_broken_off_iteration_is_begun_again() -> None:
    sampler = ShardedSampler(8, rank=0, world=1)
    first = next(iter(sampler))
    assert sampler.epoch == 0
    assert next(iter(sampler)) == first


def test_a_loop_that_breaks_after_the_last_index_has_had_the_epoch() -> None:
    sampler = ShardedSampler(8, rank=0, world=1)
    had = list(itertools.islice(sampler, 8))
    assert sorted(had) == list(range(8))
    list(sampler)
    assert sampler.epoch == 1


def test_set_epoch() -> None:
    sampler, other = team(9, 1) + team(9, 1)
    orders = [list(sampler) for _ in range(4)]
    other.set_epoch(3)
    assert list(other) == orders[3]
    other.set_epoch(3)  # the same once more, when asked for
    assert list(other) == orders[3]
    other.set_epoch(1)
    assert list(other) == orders[1]


def test_on_index_is_called_before_each_index() -> None:
    seen: list[tuple[int, int]] = []
    sampler = ShardedSampler(2, rank=0, world=1, on_index=lambda s: seen.append((s.epoch, s.consumed)))
    indices = iter(sampler)
    assert seen == []
    list(indices)
    sampler.count(2)
    list(sampler)
    assert seen == [(0, 0), (0, 0), (1, 0), (1, 0)]


def test_an_empty_dataset_gives_nothing() -> None:
    sampler = ShardedSampler(0, rank=0, world=2)
    assert list(sampler) == []
    assert len(sampler) == 0


def test_a_loader_over_it_sees_the_epoch_with_any_prefetch() -> None:
    sampler = ShardedSampler(Numbers(10), rank=0, world=1, seed=3)
    loader: DataLoader[Any] = DataLoader(Numbers(10), batch_size=4, sampler=sampler)
    assert len(loader) == 3
    first = torch.cat(list(loader)).tolist()
    second = torch.cat(list(loader)).tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_resume_at_another_world_gives_what_is_left_once() -> None:
    before = team(20, 2, seed=1)
    batches = [list(itertools.islice(iter(s), 3)) for s in before]  # three indices each: six consumed
    state = before[0].state_dict(6)
    assert state == before[1].state_dict(6)
    assert state == {"seed": 1, "epoch": 0, "offset": 6, "length": 20, "shuffle": True}
    after = team(20, 7)
    for sampler in after:
        sampler.load_state_dict(state)
        assert sampler.resumed
        assert len(sampler) == 2
    assert sorted(list(itertools.chain(*batches)) + dealt(after)) == list(range(20))
    next_epoch = dealt(after)
    assert not after[0].resumed
    assert after[0].epoch == 1
    assert next_epoch[:20] == list(team_order(20, seed=1, epoch=1))


def team_order(length: int, seed: int, epoch: int) -> list[int]:
    alone = ShardedSampler(length, rank=0, world=1, seed=seed)
    alone.set_epoch(epoch)
    return list(alone)


def test_resume_twice_inside_one_epoch() -> None:
    whole = team_order(20, seed=0, epoch=0)
    sampler = ShardedSampler(20, rank=0, world=1)
    sampler.load_state_dict(sampler.state_dict(5))
    again = ShardedSampler(20, rank=0, world=1)
    assert next(iter(sampler)) == whole[5]
    again.load_state_dict(sampler.state_dict(3))
    assert list(again) == whole[8:]


def test_a_finished_epoch_resumes_at_the_next() -> None:
    sampler = ShardedSampler(10, rank=0, world=3, drop_last=True)
    list(sampler)
    state = sampler.state_dict(9)  # the tenth does not go round
    sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.resumed, len(sampler)) == (1, False, 3)
    padded = ShardedSampler(10, rank=0, world=3)
    padded.load_state_dict(padded.state_dict(12))  # two samples more than there are: the padding
    assert (padded.epoch, padded.resumed, len(padded)) == (1, False, 4)


def test_set_epoch_keeps_the_place_in_the_epoch_that_was_loaded() -> None:
    sampler = ShardedSampler(10, rank=0, world=1)
    sampler.load_state_dict(sampler.state_dict(4))
    sampler.set_epoch(0)
    assert len(list(sampler)) == 6
    sampler.load_state_dict({"seed": 0, "epoch": 2, "offset": 4, "length": 10, "shuffle": True})
    sampler.set_epoch(3)
    assert list(sampler) == team_order(10, seed=0, epoch=3)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("by_state", [True, False])
def test_what_nobody_trains_on_is_dealt_whole_to_the_new_members(
    shuffle: bool, whole: bool, by_state: bool
) -> None:
    """Of an evaluation, iterated over before members changed, or broken off: nothing comes twice."""
    before = team(10, 2, seed=1, shuffle=shuffle)
    for sampler in before:
        list(sampler) if whole else next(iter(sampler))
    places = [sampler.place() for sampler in before] + [None]
    for rank, sampler in enumerate(before):
        sampler.deal_anew(places, rank)
    newcomer = team(10, 1, seed=9, shuffle=shuffle)[0]
    if by_state:
        newcomer.load_deal_state(before[0].deal_state(), 2)
    else:
        newcomer.load_deal_state(team(10, 2, seed=1, shuffle=shuffle)[0].deal_state())
        newcomer.deal_anew(places, 2)
    together = dealt([*before, newcomer])
    assert together[:10] == (team_order(10, 1, int(whole)) if shuffle else list(range(10)))
    assert {sampler.epoch for sampler in (*before, newcomer)} == {int(whole)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 11}, "of a dataset of 11 samples, and this dataset has 10"),
        ({"shuffle": False}, "has shuffle=False, and this one shuffle=True"),
        ({"offset": 11}, "at sample 11 of epoch 0"),
        ({"epoch": -1}, "of epoch -1"),
        ({"offset": "four"}, "has offset 'four'"),
        ({"seed": None}, "has seed None"),
    ],
)
def test_a_state_that_does_not_fit_is_one_clear_line(change: dict[str, Any], message: str) -> None:
    sampler = ShardedSampler(10, rank=0, world=1)
    state = sampler.state_dict(4)
    with pytest.raises(CheckpointError, match=message):
        sampler.load_state_dict(state | change)
    assert sampler.state_dict(0)["offset"] == 0


def test_what_cannot_be_dealt_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="a generator has no length"):
        ShardedSampler((i for i in range(3)), rank=0, world=1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="-1 samples"):
        ShardedSampler(-1, rank=0, world=1)
    with pytest.raises(UserError, match="ranks go from 0 to 1"):
        ShardedSampler(4, rank=2, world=2)
