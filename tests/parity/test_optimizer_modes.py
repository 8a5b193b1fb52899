"""Optimizers with train() and eval(), which change the parameters by their state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn

import atoll
from atoll.core.errors import PrepareError
from atoll.tensors.checkpoint import read_checkpoint
from support.optimizers import ScheduleFreeSGD
from support.pool import WorkerPool
from support.runs import alone, model, run_at

WORLD, STEPS = 2, 5
PERMITTED = "support.optimizers:ScheduleFreeSGD"


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


KINDS = ["ring", "tiers", "server", "server tiers", "ps-hra"]


@pytest.mark.parametrize("kind", [*KINDS, pytest.param("hierarchical", marks=pytest.mark.soak)])
def test_every_worker_shows_the_average(pool: WorkerPool, kind: str) -> None:
    right = train(None)
    for found in run_at(pool, kind, train, world=WORLD, optimizer=PERMITTED):
        check_equal(found, right)


def steps(net: nn.Module, optimizer: ScheduleFreeSGD, ranks: list[int], numbers: range) -> None:
    optimizer.train()
    for step in numbers:
        for rank in ranks:
            made = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(4, 32, dtype=torch.float64, generator=made)
            (net(x).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.eval()


def saves(session: atoll.Session, folder: str) -> list[Tensor]:
    """Save in eval mode, change everything, and go on from the checkpoint."""
    net = model()
    optimizer = ScheduleFreeSGD(net.parameters())
    session.prepare(net, optimizer)
    steps(net, optimizer, [session.rank], range(3))
    session.save(folder)
    steps(net, optimizer, [session.rank], range(3, 5))
    session.load(folder)
    assert not optimizer.param_groups[0]["training"]
    loaded = [p.detach().clone() for p in net.parameters()]
    steps(net, optimizer, [session.rank], range(5, 7))
    session.barrier()
    return [*loaded, *(p.detach().clone() for p in net.parameters())]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_in_eval_mode_has_what_plain_torch_has(
    pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    net = model()
    optimizer = ScheduleFreeSGD(net.parameters())
    steps(net, optimizer, list(range(WORLD)), range(3))
    right = [p.detach().clone() for p in net.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    steps(net, optimizer, list(range(WORLD)), range(5, 7))
    folder = tmp_path / "saved"
    for found in run_at(pool, kind, saves, str(folder), world=WORLD, optimizer=PERMITTED):
        check_equal(found, [*right, *(p.detach() for p in net.parameters())])
    (saved,) = read_checkpoint(folder).trees["optimizer"]
    assert saved["param_groups"] == state["param_groups"]
    for number, of in state["state"].items():
        check_equal([saved["state"][number]["z"]], [of["z"]])


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
    "kind", ["asp", "lazy", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("ssp", "peers"))]
)
def test_where_no_written_parameters_are_taken_it_is_one_line(pool: WorkerPool, kind: str) -> None:
    sync = {"lazy": True} if kind == "lazy" else {}
    for said in run_at(pool, "server" if sync else kind, refused, world=WORLD, sync=sync):
        assert said.startswith(
            "optimizer ScheduleFreeSGD moves parameters by its state in train() and eval(), and strategy"
        )
