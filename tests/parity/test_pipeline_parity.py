"""`sync.pipeline` = 1 against plain PyTorch: one worker trains as one process does whose gradients come one
step late, to the bit, and delay compensation is what its formula says."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import atoll
from atoll.core.config import Chunks, Config, Groups, Run, Sync
from atoll.hub.planner import GroupingSettings
from atoll.train.api.place import Place
from support.parity import ALONE, await_groups
from support.pool import JobFailedError, WorkerPool
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.sampled

STEPS, MEETING = 7, 4


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 4), nn.Linear(4, 1)).double()
    if name == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def values_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def put(model: nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def delayed(name: str, compensation: float) -> list[list[Tensor]]:
    """Plain PyTorch, with each gradient of the parameters one step before those that it is applied to: what
    the worker has after each step, and the last parameters."""
    model, optimizer = make(name)
    worker = copy.deepcopy(model)
    newest = clock = 0  # steps made; those in the worker's parameters
    made, seen = [values_of(model)], []
    for step in range(STEPS):
        if step == MEETING:
            put(worker, made[newest])
            clock = newest
        worker.zero_grad()
        loss_of(worker, step).backward()
        nn.utils.clip_grad_norm_(worker.parameters(), 1.0)
        for parameter, own, now, then in zip(
            model.parameters(), worker.parameters(), made[newest], made[clock], strict=True
        ):
            assert own.grad is not None
            # What it began with no shard knows: until one has answered a contribution, nothing is made up.
            moved = now - then if clock else torch.zeros_like(now)
            parameter.grad = own.grad + compensation * own.grad * own.grad * moved
        optimizer.step()
        put(worker, made[newest])  # what was in flight while it computed
        clock, newest = newest, newest + 1
        made.append(values_of(model))
        seen.append(values_of(worker))
    return [*seen, made[newest]]


def train(
    place: Place, address: str, name: str, compensation: float
) -> tuple[list[list[Tensor]], list[float], int]:
    """The same under Atoll; the staleness that each step showed, and how often state was looked at."""
    sync = Sync(consistency="asp", timeout="60s", pipeline=1, compensation=compensation)
    seen, staleness, looked = [], [], 0
    with (
        served_worker(address, place.rank),
        atoll.join(Config(run=Run(strategy="server"), chunks=Chunks(size="1KiB"), sync=sync)) as session,
    ):
        model, optimizer = session.prepare(*make(name))
        assert session._runtime.member is not None
        for step in range(STEPS):
            if step == MEETING:
                session.barrier()
            loss = loss_of(model, step)
            before = values_of(model)
            state = optimizer.state_dict()["state"] if step == 2 else {}  # waits, and changes no parameter
            torch.autograd.backward(loss)
            assert all(map(torch.equal, before, values_of(model)))
            session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(values_of(model))
            staleness.append(session._runtime.member.staleness)
            looked = max(looked, len(state))
    return [*seen, values_of(model)], staleness, looked


@pytest.mark.parametrize(
    ("name", "compensation"), [("sgd", 0.0), ("adamw", 0.0), ("sgd", 3.0), ("adamw", 3.0)]
)
def test_one_worker_trains_as_plain_pytorch_with_gradients_one_step_late(
    pool: WorkerPool, name: str, compensation: float
) -> None:
    with ServedRun(1, shards=2) as served:
        ((seen, staleness, looked),) = pool.run(train, served.address, name, compensation, world=1)
    assert not served.failures
    for step, (plain, own) in enumerate(zip(delayed(name, compensation), seen, strict=True)):
        for one, other in zip(plain, own, strict=True):
            if compensation:  # the formula's order of operations is the shard's own
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
            else:
                assert torch.equal(one, other), step
    assert staleness == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]  # of the contribution that was answered last
    assert looked == 6  # parameters


def differing(place: Place, address: str, key: str, values: list[Any]) -> None:
    sync = Sync(consistency="asp", timeout="60s", **{key: values[place.rank]})
    with (
        served_worker(address, place.rank),
        atoll.join(Config(run=Run(strategy="server"), sync=sync)) as session,
    ):
        session.prepare(*make("sgd"))


def test_workers_of_unlike_compensation_are_refused(pool: WorkerPool) -> None:
    with (
        ServedRun(2) as served,
        pytest.raises(JobFailedError, match="'sync.compensation' is 1.0 on worker 0"),
    ):
        pool.run(differing, served.address, "compensation", [1.0, 2.0], world=2)


def epochs(place: Place, address: str, consistency: Any, folder: str) -> tuple[int, list[list[Tensor]]]:
    """Two epochs of leased data with worker 1 slower, then a meeting; samples trained on, and parameters
    after the meeting, as saved, and after a load."""
    sync = Sync(consistency=consistency, slack=0, timeout="60s", pipeline=1, compensation=0.5)
    with (
        served_worker(address, place.rank),
        atoll.join(Config(run=Run(strategy="server"), chunks=Chunks(size="1KiB"), sync=sync)) as session,
    ):
        model, optimizer = session.prepare(*make("adamw"))
        sampler = session.sampler(range(50), seed=1)
        loader = DataLoader(range(50), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
        count = 0
        for _ in range(2):
            for batch in loader:
                session.weight(len(batch))
                loss_of(model, int(batch[0])).backward()
                time.sleep(0.005 * place.rank)
                optimizer.step()
                optimizer.zero_grad()
                count += len(batch)
            seen = []
            session.barrier()
            seen.append(values_of(model))
            session.save(folder)
            seen.append(values_of(model))
            loss_of(model, 0).backward()  # something is in flight when all is put back
            optimizer.step()
            optimizer.zero_grad()
            session.load(folder)
            seen.append(values_of(model))
        return count, seen


@pytest.mark.parametrize("consistency", ["asp", "ssp"])
def test_epochs_end_whole_and_meetings_bring_all_the_same(
    pool: WorkerPool, tmp_path: Path, consistency: str
) -> None:
    with ServedRun(2, shards=2) as served:
        counts, seen = zip(
            *pool.run(epochs, served.address, consistency, str(tmp_path / "saved"), world=2), strict=True
        )
    assert not served.failures
    assert sum(counts) == 2 * 50
    first = seen[0][0]
    for values in (*seen[0], *seen[1]):
        assert all(map(torch.equal, first, values))


def in_a_group(place: Place, address: str, uplink: Any) -> list[float]:
    """The staleness that steps in the group showed, but for the first ones; after the third is a meeting."""
    config = Config(
        run=Run(strategy="ps-hra"),
        chunks=Chunks(size="1KiB"),
        sync=Sync(consistency="asp", timeout="60s", pipeline=1, uplink=uplink),
        groups=Groups(probe=ALONE - 1),
    )
    staleness: list[float] = []
    step = grouped = 0
    with served_worker(address, place.rank), atoll.join(config) as session:
        model, optimizer = session.prepare(*make("sgd"))
        assert session._runtime.member is not None
        while len(staleness) < STEPS:
            await_groups(session, step)
            # The log has fenced who was alone; the first word in a group settles once more.
            grouped += (session.group.size, session.group.count) == (2, 1)
            loss_of(model, 2 * step + place.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if grouped > 3:
                staleness.append(session._runtime.member.staleness)
            if len(staleness) == 3:
                session.barrier()
    return staleness


@pytest.mark.parametrize("uplink", ["leader", "members"])
def test_a_groups_contributions_are_late_by_the_one_in_flight(pool: WorkerPool, uplink: str) -> None:
    settings = GroupingSettings(1, regroup=False)
    with ServedRun(2, shards=2, grouping=settings) as served:
        for seen in pool.run(in_a_group, served.address, uplink, world=2):
            # Of the contribution that was answered last; after the meeting none was in flight.
            assert seen == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert not served.failures
