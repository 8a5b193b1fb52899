"""Workers of unlike speed take unlike shares of a batch, and train as one process does on whole batches.

On a ring, and with shards under bsp: there reports on speed lie in commits and in the log's answer.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import Chunks, Config, Groups, Run, Sync
from atoll.core.errors import UserError
from atoll.core.memory import Memory
from atoll.hub.planner import GroupingSettings
from atoll.train.api.place import Place
from atoll.train.data.order import SampleOrder
from support.fetching import fetched
from support.pool import JobFailedError, WorkerPool
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.sampled

LENGTH, BATCH, EPOCHS = 250, 24, 3  # the last batch of an epoch has 10 samples
LEAST = 2  # samples of a worker that gets any
SECONDS = 10.0  # for each sample of a worker at full speed, by a clock that the test sets
Result = tuple[list[np.ndarray[Any, Any]], list[int]]


def config(shares: str | dict[str, float], strategy: str = "ring", caps: int | dict[str, int] = 0) -> Config:
    sync = Sync(timeout="120s", global_batch=BATCH, least=LEAST)
    sync = msgspec.structs.replace(sync, shares=shares, memory_cap=caps, consistency="bsp")
    return Config(
        run=Run(strategy=strategy),
        chunks=Chunks(size="2KiB"),
        groups=Groups(count=0 if strategy in ("ring", "server") else 2),
        sync=sync,
    )


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(LENGTH, 7, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(5, (LENGTH,), generator=generator))


def make(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 24), nn.Tanh(), nn.Linear(24, 5)).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def values(model: nn.Module) -> np.ndarray[Any, Any]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy().copy()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def plain(dtype: torch.dtype) -> list[np.ndarray[Any, Any]]:
    """In one process, without Atoll: the parameters after each step."""
    inputs, targets = dataset().tensors
    model, optimizer = make(dtype)
    trajectory = []
    for epoch in range(EPOCHS):
        for batch in SampleOrder(LENGTH, 4, True).of(epoch).split(BATCH):
            optimizer.zero_grad()
            loss_of(model, inputs[batch].to(dtype), targets[batch]).backward()
            optimizer.step()
            trajectory.append(values(model))
    return trajectory


def train(
    place: Place,
    how: Config,
    slower: tuple[float, ...],
    fetches: int,
    dtype: torch.dtype,
    address: str = "",
    memory: Memory | None = None,
    costs: list[int] | None = None,
) -> Result:
    """The parameters after each step, and the sizes of this worker's batches.

    The worker's clock goes on for each sample, `slower` times as far, by the worker's rank and the epoch.
    With `address` the workers are those of the hub there.
    """
    data, trajectory, sizes = dataset(), list[np.ndarray[Any, Any]](), list[int]()
    real, ahead = time.perf_counter, [0.0]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        joins: Any = {"place": place}
        if address:
            stack.enter_context(served_worker(address, place.rank))
            joins = {}
        patch.setattr(time, "perf_counter", lambda: real() + ahead[0])
        _train(joins, how, slower, fetches, dtype, data, ahead, trajectory, sizes, memory, costs)
    return trajectory, sizes


def _train(
    joins: Any,
    how: Config,
    slower: tuple[float, ...],
    fetches: int,
    dtype: torch.dtype,
    data: TensorDataset,
    ahead: list[float],
    trajectory: list[np.ndarray[Any, Any]],
    sizes: list[int],
    memory: Memory | None,
    costs: list[int] | None,
) -> None:
    with atoll.join(how, **joins) as session:
        model, optimizer = make(dtype)
        session.prepare(model, optimizer, memory=memory)
        assert len(session._state.tiers) == (memory is not None)
        loader = DataLoader(data, batch_sampler=session.batches(data, seed=4, cost=costs))
        for epoch in range(EPOCHS):
            for x, y in fetched(loader, fetches):
                optimizer.zero_grad()
                loss = loss_of(model, x.to(dtype), y)
                ahead[0] += SECONDS * len(x) * slower[(session.rank + epoch) % len(slower)]
                loss.backward()
                optimizer.step()
                trajectory.append(values(model))
                sizes.append(len(x))


def compare(results: list[Result], dtype: torch.dtype) -> list[tuple[int, ...]]:
    """See that each step is that of one process; return all workers' sizes at each step."""
    expected = plain(dtype)
    for trajectory, _ in results:
        assert len(trajectory) == len(expected)
        for after, wanted in zip(trajectory, expected, strict=True):
            np.testing.assert_allclose(after, wanted, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-4)
    steps = list(zip(*(sizes for _, sizes in results), strict=True))
    of_epoch = len(steps) // EPOCHS
    for number, step in enumerate(steps):
        assert sum(step) == (BATCH if number % of_epoch < of_epoch - 1 else LENGTH % BATCH)
    return steps


@pytest.mark.parametrize(
    ("strategy", "world", "fetches", "dtype"),
    [
        ("ring", 3, 0, torch.float64),
        ("ring", 2, 2, torch.float32),
        ("ring", 3, 0, torch.bfloat16),  # the agreement is a message of its own
        ("hierarchical", 4, 0, torch.float64),
    ],
)
def test_shares_follow_speeds_and_each_step_is_that_of_one_process(
    pool: WorkerPool, strategy: str, world: int, fetches: int, dtype: torch.dtype
) -> None:
    slower = (12.0, *[1.0] * (world - 1))
    results = pool.run(train, config("auto", strategy), slower, fetches, dtype, world=world)
    if dtype == torch.bfloat16:
        steps = list(zip(*(sizes for _, sizes in results), strict=True))
    else:
        steps = compare(results, dtype)
    check_follow(steps, world)


@pytest.mark.parametrize("strategy", ["ring", "hierarchical"])
def test_shares_follow_speeds_of_members_that_hold_one_model(pool: WorkerPool, strategy: str) -> None:
    world = 2 if strategy == "ring" else 4
    slower, how = (12.0, *[1.0] * (world - 1)), config("auto", strategy)
    budgets = Memory(device="4KiB", chunk="512", step="host")
    results = pool.run(train, how, slower, 0, torch.float64, "", budgets, world=world)
    check_follow(compare(results, torch.float64), world)


@pytest.mark.parametrize(
    ("strategy", "world", "shards", "fetches", "memory"),
    [
        ("server", 3, 2, 0, None),
        ("server", 2, 1, 2, None),
        ("server", 2, 1, 0, Memory(device="4KiB", chunk="512")),
        ("ps-hra", 4, 1, 0, None),
    ],
)
def test_shares_follow_speeds_at_shards_too(
    pool: WorkerPool, strategy: str, world: int, shards: int, fetches: int, memory: Memory | None
) -> None:
    slower, how = (12.0, *[1.0] * (world - 1)), config("auto", strategy)
    grouping = GroupingSettings(count=2) if strategy == "ps-hra" else None
    with ServedRun(world, shards, grouping=grouping) as served:
        arguments = (how, slower, fetches, torch.float64, served.address, memory)
        results = pool.run(train, *arguments, world=world)
    assert not served.failures
    check_follow(compare(results, torch.float64), world)


def check_follow(steps: list[tuple[int, ...]], world: int) -> None:
    """See that the slow worker of each epoch, by rank, has the smallest part at the epoch's end."""
    assert len(set(steps)) > 4  # even, by speed in each epoch, and the short batches
    of_epoch = len(steps) // EPOCHS
    for epoch in range(EPOCHS):
        slow, latest = (-epoch) % world, steps[epoch * of_epoch + of_epoch - 2]
        assert latest[slow] == min(latest), steps
        assert latest[slow] <= BATCH // world // 2, steps
        assert min(latest) >= LEAST


@pytest.mark.parametrize("shares", ["even", "auto"])
def test_parts_by_cost_are_those_of_one_process_too(pool: WorkerPool, shares: str) -> None:
    costs = torch.randint(1, 50, (LENGTH,), generator=torch.Generator().manual_seed(6)).tolist()
    arguments = (config(shares), (4.0, 1.0, 1.0), 0, torch.float64, "", None, costs)
    steps = compare(pool.run(train, *arguments, world=3), torch.float64)
    assert len(set(steps)) > 10  # each batch is cut elsewhere
    assert min(map(min, steps)) >= LEAST


def test_parts_that_are_given_hold_from_the_first_step(pool: WorkerPool) -> None:
    parts = {"0": 0.5, "1": 0.125, "2": 0.375}
    steps = compare(pool.run(train, config(parts), (0.0,), 0, torch.float64, world=3), torch.float64)
    assert set(steps[:10]) == {(12, 3, 9)}


@pytest.mark.parametrize(
    ("shares", "caps", "first"),
    [
        ("even", {"1": 3}, (11, 3, 10)),
        ({"0": 0.5, "1": 0.125, "2": 0.375}, {"0": 6}, (6, 5, 13)),
        ("auto", {"1": 9, "2": 13}, (8, 8, 8)),
        ("auto", {"0": 4}, (4, 10, 10)),
    ],
)
def test_no_part_is_above_a_worker_s_cap(
    pool: WorkerPool, shares: str | dict[str, float], caps: dict[str, int], first: tuple[int, ...]
) -> None:
    how = config(shares, caps=caps)
    steps = compare(pool.run(train, how, (12.0, 1.0, 1.0), 0, torch.float64, world=3), torch.float64)
    assert steps[0] == first
    for worker, cap in caps.items():
        sizes = [step[int(worker)] for step in steps]
        assert max(sizes) == cap, sizes  # which each reaches
    assert (len(set(steps)) > 4) == (shares == "auto")


def unlike_costs(place: Place) -> None:
    with atoll.join(config("even"), place=place) as session:
        session.batches(range(40), cost=[place.rank + 1] * 40)


def test_costs_that_differ_between_workers_are_one_line(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError, match="this worker's cost is not that of the others") as caught:
        pool.run(unlike_costs, world=2)
    assert len(caught.value.failures) == 2


def norms(place: Place) -> list[int]:
    """The sizes of this worker's batches, on which a model with BatchNorm trains."""
    how, data = config({"0": 0.5, "1": 0.25, "2": 0.25}), TensorDataset(torch.ones(BATCH + 2, 7))
    with atoll.join(how, place=place) as session:
        model = nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        sizes = []
        for (x,) in DataLoader(data, batch_sampler=session.batches(data)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            sizes.append(len(x))
    return sizes


def test_a_worker_without_a_part_trains_on_two_samples_if_batch_norm_needs_them(pool: WorkerPool) -> None:
    assert pool.run(norms, world=3) == [[12, 2], [6, 2], [6, 2]]


def first_size(place: Place, layers: str, given: int) -> int:
    """The size of this worker's part of the first batch."""
    sync = Sync(timeout="60s", global_batch=20, shares={"0": 0.9, "1": 0.05, "2": 0.05}, least=given)
    with atoll.join(Config(sync=sync), place=place) as session:
        norm = nn.BatchNorm1d(4) if layers == "norm" else nn.Tanh()
        model = nn.Sequential(nn.Linear(7, 4), norm, nn.Linear(4, 1))
        if layers:
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        sampler = session.batches(range(40))
        if not layers:
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return len(next(iter(sampler)))


@pytest.mark.parametrize(
    ("layers", "given", "sizes"),
    [
        ("norm", 0, [16, 2, 2]),
        ("no norm", 0, [18, 1, 1]),
        ("", 0, [16, 2, 2]),  # prepared later
        ("norm", 1, [18, 1, 1]),
        ("no norm", 3, [14, 3, 3]),
    ],
)
def test_the_least_part_is_by_the_model(pool: WorkerPool, layers: str, given: int, sizes: list[int]) -> None:
    assert pool.run(first_size, layers, given, world=3) == sizes


def refused(place: Place, how: Config) -> str:
    with atoll.join(how, place=place) as session:
        try:
            session.batches(range(40))
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        (
            {"shares": "auto", "global_batch": 5},
            "each of 3 workers 2 samples, the least of uneven parts (sync.least)",
        ),
        ({"shares": "auto", "global_batch": 24, "memory_cap": 7}, "leaves 21 samples to 3 workers"),
        ({"global_batch": 24, "memory_cap": {"0": 4, "1": 9, "2": 9}}, "leaves 22 samples to 3 workers"),
        ({"shares": {"0": 0.5, "1": 0.5}, "global_batch": 24}, "no part for worker 2"),
        ({"shares": {"0": 0.5, "1": 0.3, "2": 0.1, "3": 0.1}, "global_batch": 24}, "a part for worker 3"),
    ],
)
def test_a_batch_that_cannot_be_dealt_so_is_one_line(
    pool: WorkerPool, sync: dict[str, Any], words: str
) -> None:
    for said in pool.run(refused, Config(sync=Sync(timeout="60s", **sync)), world=3):
        assert words in said
        assert "\n" not in said
