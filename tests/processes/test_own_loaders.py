"""Epochs that mix are reported where no sampler of the session deals the data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import atoll
from support.pool import WorkerPool
from support.runs import TOGETHER, model, run_at

BATCHES, FEWER, EPOCHS = 6, 4, 3
LOOPS = ("plain", "loader", "distributed", "restarted")


def step(session: atoll.Session, net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def endless(loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def train(session: atoll.Session, loop: str, uneven: bool) -> list[str]:
    """Make 12 steps, worker 1 with epochs of four batches for six where `uneven`; returns the warnings."""
    told: list[str] = []
    session._records.warn = told.append  # type: ignore[method-assign]
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session.prepare(net, optimizer)
    fewer = uneven and session.rank == 1
    data = torch.ones(2 * BATCHES * session.world, 32, dtype=torch.float64)
    own = data[: 2 * (FEWER if fewer else BATCHES)]
    made = 0
    if loop == "plain":
        for epoch in range(EPOCHS):
            torch.manual_seed(epoch)
            for x in own.split(2):
                if made < 12:
                    step(session, net, optimizer, x)
                    made += 1
    elif loop == "loader":
        loader = DataLoader(own, batch_size=2)  # type: ignore[arg-type, var-annotated]
        for _ in range(EPOCHS):
            for x in loader:
                if made < 12:
                    step(session, net, optimizer, x)
                    made += 1
    elif loop == "distributed":
        sampler = DistributedSampler(data, session.world, session.rank)  # type: ignore[arg-type, var-annotated]
        loader = DataLoader(data, batch_size=3 if fewer else 2, sampler=sampler)  # type: ignore[arg-type]
        for number in range(EPOCHS):
            sampler.set_epoch(number)
            for x in loader:
                if made < 12:
                    step(session, net, optimizer, x)
                    made += 1
    else:
        batches = endless(DataLoader(own, batch_size=2))  # type: ignore[arg-type]
        while made < 12:
            step(session, net, optimizer, next(batches))
            made += 1
    assert session.iteration == 12
    return told


@pytest.mark.parametrize("kind", [*TOGETHER, "elastic", "server tiers", "peers tiers"])
def test_it_is_said_at_the_first_such_step(pool: WorkerPool, kind: str) -> None:
    for loop in LOOPS:
        first, second = run_at(pool, kind, train, loop, True)
        (line,) = (each for each in first if "together" in each)
        assert not [each for each in second if "together" in each]
        counts_from, of = (0, "its epoch") if loop == "plain" else (1, "pass")
        for rank, number in ((0, counts_from), (1, counts_from + 1)):
            assert f"worker {rank} is at the gradients of step {FEWER} of {of} {number}" in line, line
        assert f"({__name__}.py:" in line
        assert (
            "give every worker equally many batches in an epoch (session.sampler deals equal shares" in line
        )


@pytest.mark.parametrize("kind", TOGETHER)
def test_equal_loops_are_no_mistake(pool: WorkerPool, kind: str) -> None:
    for loop in LOOPS:
        assert not any("together" in line for told in run_at(pool, kind, train, loop, False) for line in told)


def train_otherwise(session: atoll.Session) -> list[str]:
    """What else scripts do with DataLoaders: none of it mixes epochs, although workers differ."""
    told: list[str] = []
    session._records.warn = told.append  # type: ignore[method-assign]
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session.prepare(net, optimizer)
    data = torch.ones(12, 32, dtype=torch.float64)
    loader = DataLoader(data, batch_size=2)  # type: ignore[arg-type, var-annotated]
    second = DataLoader(data, batch_size=1)  # type: ignore[arg-type, var-annotated]
    if session.is_main:
        next(iter(loader))  # to look at a batch
    for _ in range(2):
        for number, x in enumerate(loader):
            step(session, net, optimizer, x)
            if (
                session.is_main and number % 2
            ):  # worker 0 alone evaluates, within the epoch, on the same loader
                with torch.no_grad():
                    for y in loader:
                        net(y)
    for _ in range(4):  # one batch at random, which a worker without one leaves out
        optimizer.zero_grad()
        if session.is_main:
            net(next(iter(second))).mean().backward()
        optimizer.step()
    for _ in range(4):
        step(session, net, optimizer, next(iter(second)))
    for x, _ in zip(loader, second, strict=False):
        step(session, net, optimizer, x)
    return told


@pytest.mark.parametrize("kind", TOGETHER)
def test_other_loops_are_no_mistake(pool: WorkerPool, kind: str) -> None:
    assert not any("together" in line for told in run_at(pool, kind, train_otherwise) for line in told)


@pytest.mark.parametrize("kind", ["asp", "ssp"])
def test_at_their_own_pace_nothing_is_said(pool: WorkerPool, kind: str) -> None:
    assert not any("together" in line for told in run_at(pool, kind, train, "loader", True) for line in told)
