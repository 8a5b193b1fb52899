"""Workers that step with other hyperparameters than each other: found at the next step, and named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from said import errors_to
from torch import nn

import atoll
from atoll.core.config import Chunks, Config, Groups, Run, Sync
from atoll.core.memory import Memory
from atoll.hub.planner import GroupingSettings
from atoll.train.api.place import Place
from atoll.train.api.session import Session
from support.parity import ALONE, await_groups
from support.pool import JobFailedError, WorkerPool
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.quick

WIDTH = 32
CHUNKS = Chunks(size="2KiB")
TIERS = Memory(device="48KiB", chunk="8448", step="host")  # of 90 KB of parameters in ten layers
AT = 2  # the step at which the workers part


def build(layers: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).double()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.1)


def halve_rate(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def decay_others(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["weight_decay"] = 0.25


def other_betas(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.999)


def tensor_rate(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = torch.tensor(0.0625)


def no_change(_optimizer: torch.optim.Optimizer) -> None:
    """The workers stay alike."""


CHANGES: dict[str, tuple[Callable[[torch.optim.Optimizer], None], str]] = {
    "lr": (
        halve_rate,
        r"worker 0 steps with lr 0.1, worker 1 with lr 0.05 at step 2 \(param group 0\)",
    ),
    "weight_decay": (
        decay_others,
        r"worker 0 steps with weight_decay 0, worker 1 with weight_decay 0.25 at step 2 \(param group 1\)",
    ),
    "betas": (
        other_betas,
        r"worker 0 steps with betas \(0.9, 0.999\), worker 1 with betas \(0.5, 0.999\) at step 2",
    ),
    "tensor": (
        tensor_rate,
        r"worker 0 steps with lr 0.1, worker 1 with lr 0.0625 at step 2 \(param group 1\)",
    ),
}


def train(session: Session, change: str, meets: str, folder: Path, memory: Memory | None = None) -> int:
    """Worker 1 changes a hyperparameter before step `AT`; how many steps were made after that one."""
    model, optimizer = session.prepare(*build(2 if memory is None else 10), memory=memory)
    for step in range(AT + 1 if meets else AT + 6):
        if session.rank == 1 and step == AT:
            CHANGES[change][0](optimizer) if change else None
        x = torch.randn(4, WIDTH, dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step > AT + 1 and change:
            raise AssertionError(f"worker {session.rank} made step {step}")
    if meets == "save":
        session.save(folder / "checkpoint")
    elif meets == "barrier":
        session.barrier()
    return session.iteration


def in_ring(place: Place, change: str, meets: str, folder: Path, groups: int, tiers: bool) -> int:
    run = Run(strategy="hierarchical" if groups else "ring")
    config = Config(run=run, chunks=CHUNKS, sync=Sync(timeout="60s"), groups=Groups(count=groups))
    with atoll.join(config, place=place) as session:
        return train(session, change, meets, folder, TIERS if tiers else None)


def refused(pool: WorkerPool, job: Callable[..., Any], *arguments: Any, change: str, world: int = 2) -> None:
    with pytest.raises(JobFailedError) as caught:
        pool.run(job, *arguments, world=world)
    assert re.search(CHANGES[change][1], str(caught.value).replace("node ", "worker "))
    kinds = [failure.kind for failure in caught.value.failures.values()]
    assert len(kinds) == world
    assert set(kinds) <= {"UserError", "MismatchError"}
    assert ("scheduler.step(session.reduce(loss))" in str(caught.value)) == (change != "weight_decay")


@pytest.mark.parametrize(
    ("change", "meets", "groups", "tiers"),
    [
        ("lr", "", 0, False),
        ("weight_decay", "save", 0, False),
        ("betas", "the end", 0, False),
        ("tensor", "barrier", 0, False),
        ("betas", "", 2, False),
        ("lr", "save", 2, False),
        pytest.param("weight_decay", "", 0, True, marks=pytest.mark.soak),
        ("lr", "the end", 0, True),
    ],
)
def test_members_of_a_ring_that_step_with_other_hyperparameters_are_told_so(
    pool: WorkerPool, tmp_path: Path, change: str, meets: str, groups: int, tiers: bool
) -> None:
    refused(pool, in_ring, change, meets, tmp_path, groups, tiers, change=change)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("tiers", [False, True])
def test_members_that_stay_alike_pass(pool: WorkerPool, tmp_path: Path, tiers: bool) -> None:
    assert pool.run(in_ring, "", "save", tmp_path, 0, tiers, world=2) == [AT + 1] * 2


def at_server(place: Place, change: str, address: str, strategy: Any, consistency: Any) -> int:
    config = Config(
        run=Run(strategy=strategy), chunks=CHUNKS, sync=Sync(timeout="60s", consistency=consistency)
    )
    with served_worker(address, place.rank), atoll.join(config) as session:
        return train(session, change, "", Path())


@pytest.mark.parametrize(
    "change", ["lr", *(pytest.param(each, marks=pytest.mark.soak) for each in ("weight_decay", "betas"))]
)
def test_workers_of_a_server_that_step_with_other_hyperparameters_are_told_so(
    pool: WorkerPool, change: str
) -> None:
    with ServedRun(workers=2, shards=2) as served:
        refused(pool, at_server, change, served.address, "server", "bsp", change=change)


def at_own_pace(place: Place, change: str, folder: Path, address: str, consistency: Any) -> None:
    """Worker 1 steps with another hyperparameter from step `AT` on, and hears of it, or worker 0 does."""
    config = Config(run=Run(strategy="server"), sync=Sync(timeout="60s", consistency=consistency))
    said = folder / f"{place.rank}.log"
    with errors_to(said), served_worker(address, place.rank), atoll.join(config) as session:
        model, optimizer = session.prepare(*build())
        if change == "by schedule":
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)
        for step in range(AT + 4):
            if session.rank == 1 and step == AT:
                CHANGES["lr" if change == "by schedule" else change][0](optimizer)
            model(torch.ones(4, WIDTH, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.barrier()


@pytest.mark.parametrize(
    ("change", "consistency"), [("lr", "asp"), ("weight_decay", "ssp"), ("by schedule", "asp")]
)
def test_workers_at_their_own_pace_are_told_once(
    pool: WorkerPool, tmp_path: Path, change: str, consistency: str
) -> None:
    """Where a scheduler is attached, rates may be of different times."""
    with ServedRun(workers=2) as served:
        pool.run(at_own_pace, change, tmp_path, served.address, consistency, world=2)
    said = "".join((tmp_path / f"{rank}.log").read_text() for rank in range(2))
    key = {"by schedule": "lr"}.get(change, change)
    if change == "by schedule":
        assert "steps with" not in said
    else:
        assert 1 <= said.count(f"steps with {key}") <= 2


def in_a_group(place: Place, change: str, address: str, consistency: Any) -> None:
    """Worker 1 changes a hyperparameter once both are in one group."""
    config = Config(
        run=Run(strategy="ps-hra"),
        sync=Sync(timeout="60s", consistency=consistency),
        groups=Groups(probe=ALONE - 1),
    )
    with served_worker(address, place.rank), atoll.join(config) as session:
        model, optimizer = session.prepare(*build())
        for step in range(ALONE + 5):
            await_groups(session, step)
            if session.rank == 1 and step == ALONE + 2:
                CHANGES[change][0](optimizer)
            model(torch.ones(4, WIDTH, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("change", "consistency"), [("lr", "asp"), ("weight_decay", "bsp")])
def test_members_of_a_group_that_step_with_other_hyperparameters_are_told_so(
    pool: WorkerPool, change: str, consistency: Any
) -> None:
    """One of them speaks for all, with its own hyperparameters."""
    settings = GroupingSettings(1, consistency=consistency, regroup=False)
    with ServedRun(workers=2, grouping=settings) as served, pytest.raises(JobFailedError) as caught:
        pool.run(in_a_group, change, served.address, consistency, world=2)
    assert {failure.kind for failure in caught.value.failures.values()} == {"UserError"}
    assert re.search(CHANGES[change][1].split(" at step")[0], str(caught.value))


def as_peers(place: Place, change: str, nodes: int) -> int:
    config = Config(
        run=Run(strategy="peers"),
        chunks=CHUNKS,
        sync=Sync(timeout="60s", stale_max=0),
        groups=Groups(count=nodes),
    )
    with atoll.join(config, place=place) as session:
        return train(session, change, "", Path())


@pytest.mark.parametrize(
    ("change", "nodes"), [("lr", 0), pytest.param("weight_decay", 0, marks=pytest.mark.soak), ("betas", 1)]
)
def test_nodes_that_step_with_other_hyperparameters_are_told_so(
    pool: WorkerPool, change: str, nodes: int
) -> None:
    """Between nodes, and between one node's devices."""
    refused(pool, as_peers, change, nodes, change=change)
