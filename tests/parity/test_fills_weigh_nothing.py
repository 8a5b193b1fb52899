"""A fill, a sample on which a worker trains in place of a part of a batch, weighs nothing, also where the
script gives each batch a weight by one rule for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.errors import UserError
from support.pool import WorkerPool
from support.runs import run_at

pytestmark = pytest.mark.sampled

LENGTH, BATCH, RATE = 9, 8, 0.5  # the second batch has 1 sample, for one of two workers
WEIGHT = 3.0  # for each sample, as a number of tokens


def train(session: atoll.Session, steps: str) -> tuple[list[float], float]:
    """The parameter after each step, and the mean of logged values. Each sample's gradient is its value."""
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    session.prepare(net, optimizer)
    data = TensorDataset(torch.arange(1.0, LENGTH + 1, dtype=torch.float64).unsqueeze(1))
    loader = DataLoader(data, batch_sampler=session.batches(data, shuffle=False))
    seen = []

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(x).mean()
        return loss

    for number, (x,) in enumerate(loader):
        is_last = number == 1
        if steps == "weight after the forward":
            loss = loss_of(x)
            session.weight(WEIGHT * len(x))
            loss.backward()
        elif steps == "two forwards":
            session.weight(WEIGHT * len(x))
            (0.5 * loss_of(x) + 0.5 * loss_of(x)).backward()
        elif steps == "accumulated" and not is_last:
            with session.no_sync():
                session.weight(WEIGHT * len(x))
                loss_of(x).backward()
        else:
            session.weight(WEIGHT * len(x))
            loss_of(x).backward()
        if steps != "accumulated" or is_last:
            optimizer.step()
            optimizer.zero_grad()
            seen.append(net.weight.item())
    session.barrier()
    return seen, net.weight.item()


def plain() -> list[float]:
    """In one process."""
    first, second = sum(range(1, BATCH + 1)) / BATCH, float(LENGTH)
    return [-RATE * first, -RATE * (first + second)]


@pytest.mark.parametrize("steps", ["weight before the forward", "weight after the forward", "two forwards"])
@pytest.mark.parametrize(
    "kind", ["ring", "server", "ps-hra", "tiers", "peers", "peers tiers", "hierarchical"]
)
def test_a_fill_weighs_nothing(pool: WorkerPool, kind: str, steps: str) -> None:
    for seen, _ in run_at(pool, kind, train, steps, world=2, sync={"global_batch": BATCH}):
        assert seen == pytest.approx(plain())


@pytest.mark.parametrize("kind", ["ring", "server", "peers"])
def test_a_fill_weighs_nothing_under_accumulation(pool: WorkerPool, kind: str) -> None:
    """Each worker's sum of means weighs by the samples of its batches: 5 and 4. Nothing is added to the sum
    of the worker without a part of the second batch."""
    found: Any = run_at(pool, kind, train, "accumulated", world=2, sync={"global_batch": BATCH})
    first, second = ([1, 3, 5, 7], [2, 4, 6, 8]) if kind != "peers" else ([1, 2, 3, 4], [5, 6, 7, 8])
    mean = (5 * (sum(first) / 4 + LENGTH) + 4 * sum(second) / 4) / 9
    for seen, _ in found:
        assert seen == pytest.approx([-RATE * mean])


def start(session: atoll.Session, value: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(net.weight, value)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    session.prepare(net, optimizer)
    return net, optimizer


def batches_of(session: atoll.Session, length: int = LENGTH) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(1.0, length + 1, dtype=torch.float64).unsqueeze(1))
    return DataLoader(data, batch_sampler=session.batches(data, shuffle=False))


def among_others(session: atoll.Session, what: str) -> list[float]:
    """Steps in which a forward that is no fill comes beside one, before one, or after an epoch with one."""
    seen = []
    if what == "critic":
        critic, _ = start(session, 1.0)
        net, optimizer = start(session)
        for _ in batches_of(session):
            critic(net(torch.ones(16, 1, dtype=torch.float64))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            critic.zero_grad()
            seen.append(net.weight.item())
    elif what == "other data beside":
        net, optimizer = start(session)
        for (x,) in batches_of(session):
            other = torch.full((4, 1), 1.0 + session.rank, dtype=torch.float64)
            session.weight(4)
            (net(x).mean() * 0 + net(other).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(net.weight.item())
    else:
        net, optimizer = start(session)
        for (x,) in batches_of(session):
            net(x).sum().backward()
            optimizer.zero_grad()
        size = 1 if "like a fill" in what else 4
        own = torch.full((2 * size, 1), 1.0 + session.rank, dtype=torch.float64)
        in_loader = DataLoader(TensorDataset(own), batch_size=size)
        for (x,) in zip(own.split(size)) if "by hand" in what else in_loader:
            if "weighed" in what:
                session.weight(len(x))
            net(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(net.weight.item())
    session.barrier()
    return seen


@pytest.mark.parametrize(
    ("what", "mean"),
    [
        ("critic", 1.0),
        ("other data beside", 1.5),
        ("other data after", 1.5),
        ("other data after, weighed", 1.5),
        ("other data after, like a fill", 1.5),
        ("other data after, like a fill, by hand, weighed", 1.5),
    ],
)
@pytest.mark.parametrize("kind", ["ring", "server", "tiers"])
def test_what_is_no_fill_counts(pool: WorkerPool, kind: str, what: str, mean: float) -> None:
    for seen in run_at(pool, kind, among_others, what, world=2, sync={"global_batch": BATCH}):
        assert seen == pytest.approx([-RATE * mean, -2 * RATE * mean])


def ahead(session: atoll.Session, length: int) -> list[float]:
    """The next batch is fetched before one is used, for two forwards."""
    net, optimizer = start(session)
    batches, seen = iter(batches_of(session, length)), []
    following = next(batches, None)
    while following is not None:
        (x,), following = following, next(batches, None)
        session.weight(WEIGHT * len(x))
        (0.5 * net(x).mean() + 0.5 * net(x).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(net.weight.item())
    session.barrier()
    return seen


@pytest.mark.parametrize(("length", "batch"), [(LENGTH, BATCH), (5, 2)])
@pytest.mark.parametrize("kind", ["ring", "server", "peers"])
def test_a_batch_before_a_fill_that_is_fetched_ahead_counts(
    pool: WorkerPool, kind: str, length: int, batch: int
) -> None:
    """Also where it has as many samples as the fill."""
    values = list(range(1, length + 1))
    means = [sum(part) / batch for part in zip(*[iter(values)] * batch, strict=False)]
    wanted = [-RATE * sum(means[: step + 1]) for step in range(len(means))]
    for seen in run_at(pool, kind, ahead, length, world=2, sync={"global_batch": batch}):
        assert seen[:-1] == pytest.approx(wanted)


def passes(session: atoll.Session, _: str) -> list[float]:
    """Two passes over batches that the script keeps, each worker's of one sample."""
    net, optimizer = start(session)
    kept, seen = [x for (x,) in batches_of(session, 5)], []
    for x in kept * 2:
        session.weight(len(x))
        before = net.weight.item()
        net(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(net.weight.item() - before)
    session.barrier()
    return seen


def test_batches_that_a_script_keeps_count_in_each_pass(pool: WorkerPool) -> None:
    for seen in run_at(pool, "ring", passes, "", world=2, sync={"global_batch": 2}):
        assert [*seen[:2], *seen[3:5]] == pytest.approx([-RATE * 1.5, -RATE * 3.5] * 2)


def penalised(session: atoll.Session, _: str) -> str:
    """Two backwards before a step, each with a penalty on gradients, which does not pass the output."""
    net, _ = start(session)
    for (x,) in batches_of(session):
        out = net(x.requires_grad_())
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        try:
            (out.mean() + slope.square().mean()).backward()
        except UserError as error:
            return str(error)
    return ""


def test_peers_refuse_a_fill_whose_gradients_do_not_pass_the_output(pool: WorkerPool) -> None:
    found = run_at(pool, "peers", penalised, "", world=2, sync={"global_batch": BATCH})
    assert sum("batch of weight 0" in line for line in found) == 1
