"""Batches by the costs of samples: who takes which, how large a batch is, and costs that are none."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.config import Sync, load_config
from atoll.core.errors import CheckpointError, ConfigError, UserError
from atoll.groups.shares import even, scaled
from atoll.train.data.costs import Costs, batch_of, cut_by_cost
from atoll.train.data.peerssampler import PeerBatches
from atoll.train.data.sampler import BatchesSampler
from atoll.train.data.shares import ShareSchedule


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    st.integers(1, 3),
)
def test_a_cut_is_whole_and_follows_the_costs_and_nobody_has_less_than_the_least(
    parts: list[int], costs: list[int], least: int
) -> None:
    sizes = scaled(np.array(parts), len(costs), least).tolist()
    found = cut_by_cost(sizes, np.array(costs), least)
    assert sum(found) == len(costs)
    for before, after in zip(sizes, found, strict=True):
        assert after >= min(before, least)
        assert bool(after) == bool(before)
    goals = np.cumsum(sizes) / len(costs) * sum(costs)
    ends = np.concatenate([[0], np.cumsum(costs)])[np.cumsum(found)]
    if all(after > min(before, least) for before, after in zip(sizes, found, strict=True)):
        assert np.abs(ends - goals).max() <= max(costs)


def test_equal_costs_change_nothing() -> None:
    assert cut_by_cost([5, 0, 2, 9], np.full(16, 7), 2) == [5, 0, 2, 9]


def samplers(
    costs: list[int], world: int, batch: int, parts: list[int] | None = None
) -> list[BatchesSampler]:
    first = partial(even, batch) if parts is None else lambda _world: np.array(parts)
    return [
        BatchesSampler(
            len(costs),
            batch=batch,
            schedule=ShareSchedule(first, world, 2),
            costs=Costs(costs, len(costs)),
            least=2,
            rank=rank,
            world=world,
            seed=3,
        )
        for rank in range(world)
    ]


@pytest.mark.parametrize("parts", [None, [12, 6, 6]])
def test_workers_take_parts_of_like_cost_and_each_sample_once_an_epoch(parts: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(5)
    costs = torch.randint(1, 100, (240,), generator=generator).tolist()
    wanted = [1 / 3] * 3 if parts is None else [part / 24 for part in parts]
    each = samplers(costs, 3, 24, parts)
    steps = list(zip(*each, strict=True))
    assert len(steps) == 10
    assert sorted(index for step in steps for batch in step for index in batch) == list(range(240))
    for step in steps:
        sums = [sum(costs[index] for index in batch) for batch in step]
        assert sum(map(len, step)) == 24
        assert all(abs(one - part * sum(sums)) <= 100 for one, part in zip(sums, wanted, strict=True))
    assert len({tuple(map(len, step)) for step in steps}) > 3


def test_reports_are_of_as_many_samples_as_cost_as_much_on_the_average() -> None:
    costs = [10, 30] * 8
    (sampler,) = samplers(costs, 1, 4)
    batch = next(iter(sampler))
    sampler.count(len(batch))
    assert sampler.under_way() == (1, sum(costs[index] for index in batch) / 20)


def test_a_place_in_an_epoch_is_loaded_with_its_costs() -> None:
    costs = list(range(1, 65))
    each = samplers(costs, 2, 8)
    loops = [iter(sampler) for sampler in each]
    seen = []
    for _ in range(3):
        for sampler, loop in zip(each, loops, strict=True):
            batch = next(loop)
            sampler.count(len(batch))
            sampler.committed()
            seen += batch
    state = each[0].state_dict([sampler.place() for sampler in each])
    rest = samplers(costs, 2, 8)
    for sampler in rest:
        sampler.load_state_dict(state)
    left = [index for sampler in rest for batch in sampler for index in batch]
    assert sorted([*seen, *left]) == list(range(64))


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ([1, 2, 3], "cost has 3 values, and the dataset has 4 samples"),
        (5, "cost has 1 values, and the dataset has 4 samples"),
        ([[1], [2, 3]], "cost "),
        ([1.5, 2.0, 3.0, 1.0], "a cost is a whole number from 1 to 2**31"),
        ([0, 2, 3, 1], "(int64, from 0 to 3)"),
        ([1, 2, 3, 2**31], "from 1 to 2147483648"),
    ],
)
def test_costs_that_are_none_are_one_line(costs: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        Costs(costs, 4)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_batch_of_tokens_has_as_many_samples_as_come_to_them_on_the_average() -> None:
    costs = Costs(torch.tensor([100, 300, 200, 200]), 4)
    assert batch_of(Sync(global_tokens=6400), costs) == 32
    assert batch_of(Sync(global_batch=8), costs) == 8
    with pytest.raises(UserError, match="give session.batches their number, cost=lengths"):
        batch_of(Sync(global_tokens=6400), None)
    with pytest.raises(UserError, match=r"write --set sync.global_batch=256"):
        batch_of(Sync(), costs)


def test_a_batch_by_samples_and_by_tokens_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="both say how large a step is: give one") as caught:
        load_config(settings=["sync.global_batch=32", "sync.global_tokens=4096"], environment={})
    assert "\n" not in str(caught.value)


def test_a_newcomer_that_gives_other_costs_than_the_others_is_refused() -> None:
    state = samplers([10, 30] * 8, 2, 4)[0].deal_state()
    samplers([10, 30] * 8, 2, 4)[1].check_deal_state(state)
    with pytest.raises(CheckpointError, match="this worker's cost is not that of the others"):
        samplers([30, 10] * 8, 2, 4)[1].check_deal_state(state)


def test_a_fill_has_as_many_samples_as_its_model_needs_and_weighs_nothing() -> None:
    for fill, expected in ((1, [0]), (2, [0, 1])):
        sampler = BatchesSampler(5, batch=2, rank=2, world=3, shuffle=False, fill=lambda fill=fill: fill)
        peers = PeerBatches(
            5,
            batch=2,
            node=2,
            nodes=range(3),
            stale_max=0,
            iteration=lambda: 0,
            shuffle=False,
            fill=lambda fill=fill: fill,
        )
        for each in (sampler, peers):
            assert next(iter(each)) == expected
            assert each.next_sizes() == {float(fill)}
            assert each.count(float(fill)) == 0.0
            assert each.next_sizes() == set()
