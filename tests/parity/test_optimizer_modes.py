"""Optimizers with train() and eval(), which change the parameters by their state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kinds import check_equal
from torch import Tensor

import atoll
from atoll.core.errors import PrepareError
from support.optimizers import ScheduleFreeSGD
from support.pool import WorkerPool
from support.runs import alone, model, run_at

WORLD, STEPS = 2, 5


def train(session: atoll.Session | None, early: bool = False) -> list[Tensor]:
    """Train, evaluate after the third step, and end in eval mode. `early`: train() comes before prepare."""
    net = model()
    optimizer = ScheduleFreeSGD(net.parameters())
    if early:
        optimizer.train()
    rank, world = 0, 1
    if session is not None:
        session.prepare(net, optimizer)
        rank, world = session.rank, session.world
    optimizer.train()
    shown = []
    for step in range(STEPS):
        x = torch.randn(8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(step))[
            rank::world
        ]
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            optimizer.eval()
            if session is not None:
                session.barrier()  # as docs/memory.md says of reads after writes, where members hold parts
            shown += [p.detach().clone() for p in net.parameters()]
            optimizer.train()
    optimizer.eval()
    if session is not None:
        session.barrier()
    return [*shown, *(p.detach().clone() for p in net.parameters())]


@pytest.mark.parametrize("kind", ["ring", "tiers", pytest.param("hierarchical", marks=pytest.mark.soak)])
def test_every_worker_shows_the_average(pool: WorkerPool, kind: str) -> None:
    right = train(None)
    for found in run_at(pool, kind, train, world=WORLD):
        check_equal(found, right)


@pytest.mark.parametrize("early", [False, True])
def test_alone_in_tiers(early: bool) -> None:
    check_equal(alone(train, early, tiers=True), train(None, early))


class Unready(torch.optim.SGD):
    """An optimizer that cannot step before the script has made it ready."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("It wants a warm-up first. Call warm_up()")


def unready(session: atoll.Session) -> str:
    net = model()
    try:
        session.prepare(net, Unready(net.parameters(), lr=0.1))
    except PrepareError as error:
        return str(error)
    return ""


def refused(session: atoll.Session) -> str:
    try:
        train(session)
    except PrepareError as error:
        session._leaving.leave()
        return str(error)
    return ""


def test_in_tiers_it_must_be_ready() -> None:
    said = alone(unready, tiers=True)
    assert "Unready" in said
    assert "It wants a warm-up first" in said


@pytest.mark.parametrize(
    "kind", ["server", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("asp", "ps-hra", "peers"))]
)
def test_where_its_state_lies_elsewhere_it_is_one_line(pool: WorkerPool, kind: str) -> None:
    for said in run_at(pool, kind, refused, world=WORLD):
        assert said.startswith(
            "optimizer ScheduleFreeSGD changes parameters by its state in train() and eval()"
        )
