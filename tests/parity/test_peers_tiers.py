"""Nodes without a server whose devices are under budgets: at sync.stale_max = 0 each step is that of plain
PyTorch on the global batch, to the bit, whatever each node's budget is.

One launch trains all families, as parts of one model: a node's CPU side takes seconds to start.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.train.api.place import Place
from support.families import batch, build, loss_of
from support.pool import WorkerPool
from support.tight import memory

pytestmark = pytest.mark.check

FEW = ("tied", "experts", "lstm", "lora")
ALL = ("gpt", "resnet", "thrice", *FEW)
STEPS, MICRO = 3, 2


def make(names: Sequence[str]) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    model = nn.ModuleDict({name: build(name) for name in names})
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2, fused=True)


def loss(model: nn.ModuleDict, rank: int, step: int, micro: int, world: int) -> Tensor:
    total = torch.zeros(())
    for name in model:
        inputs, targets = batch(name, (step * world + rank) * MICRO + micro)
        total = total + loss_of(model[name](inputs), targets)
    return total / MICRO


def bits(tensors: Iterable[Tensor]) -> list[bytes]:
    return [each.detach().clone().view(-1).view(torch.uint8).numpy().tobytes() for each in tensors]


def train_plain(names: Sequence[str], world: int, nodes: int) -> tuple[list[bytes], list[bytes]]:
    """The parameters after the steps of all workers, and worker 0's buffers: each node has its own. Gradients
    are added up by nodes."""
    model, optimizer = make(names)
    parameters = list(model.parameters())
    buffers = [[b.clone() for b in model.buffers()] for _ in range(world)]
    for step in range(STEPS):
        gradients: list[list[Tensor | None]] = []
        for rank in range(world):
            for own, held in zip(model.buffers(), buffers[rank], strict=True):
                own.copy_(held)
            for micro in range(MICRO):
                loss(model, rank, step, micro, world).backward()
            buffers[rank] = [b.clone() for b in model.buffers()]
            gradients.append([p.grad for p in parameters])
            optimizer.zero_grad()
        for parameter, each in zip(parameters, zip(*gradients, strict=True), strict=True):
            there = [None if g is None else g / world for g in each]
            size = world // nodes
            parameter.grad = total(total(there[n * size : (n + 1) * size]) for n in range(nodes))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return bits(parameters), bits(buffers[0])


def total(values: Iterable[Tensor | None]) -> Tensor | None:
    there = [value for value in values if value is not None]
    return torch.stack(there).sum(0) if there else None


def train(place: Place, names: Sequence[str], shares: list[float], nodes: int, folder: str) -> dict[str, Any]:
    """What a user writes; `shares` are the workers' budgets. After `STEPS` it saves, makes a step more,
    loads and makes that step again."""
    os.environ["ATOLL_POISON"] = "1"
    torch.set_num_threads(1)
    config = Config(
        run=Run(strategy="peers"),
        sync=Sync(timeout="120s", stale_max=0),
        groups=Groups(count=nodes),
    )
    model, optimizer = make(names)
    share = shares[place.rank]
    with atoll.join(config, place=place) as session:
        session.prepare(model, optimizer, memory=memory(model, share, step="auto"))

        def make_step(step: int) -> None:
            for micro in range(MICRO):
                with session.no_sync() if micro < MICRO - 1 else nullcontext():
                    loss(model, place.rank, step, micro, place.world).backward()
            session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

        for step in range(STEPS):
            make_step(step)
        found: dict[str, Any] = {
            "values": bits(model.parameters()),
            "buffers": bits(model.buffers()),
        }
        tiers = session._state.prepared[0].tiers
        if tiers is not None and tiers.fitted is not None:
            found["stats"] = tiers.fitted.stats()
        session.save(folder)
        make_step(STEPS)
        found["then"] = bits(model.parameters())
        session.load(folder)
        found["loaded"] = bits(model.parameters())
        make_step(STEPS)
        found["again"] = bits(model.parameters())
    return found


def check(found: list[dict[str, Any]], names: Sequence[str], nodes: int) -> None:
    values, buffers = train_plain(names, len(found), nodes)
    named = [name for name, _ in make(names)[0].named_parameters()]
    for rank, worker in enumerate(found):
        for name, expected, got in zip(named, values, worker["values"], strict=True):
            assert expected == got, f"{name} on worker {rank}"
        assert worker["values"] == worker["loaded"]
        assert worker["then"] == worker["again"] == found[0]["then"]
        assert worker["then"] != worker["values"]
    assert found[0]["buffers"] == buffers


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("names", "shares", "nodes"),
    [
        (FEW, [0.25, 0.5, 0.75, 0.25], 2),
        pytest.param(ALL, [0.25, 0.75], 2, marks=pytest.mark.soak),
        pytest.param(ALL, [0.5, 0.5], 2, marks=pytest.mark.soak),
        pytest.param(ALL, [0.25, 0.75], 1, marks=pytest.mark.soak),
    ],
    ids=["devices", "nodes", "nodes-half", "one-node"],
)
def test_nodes_under_unlike_budgets_train_as_plain_pytorch_does(
    pool: WorkerPool, names: Sequence[str], shares: list[float], nodes: int, tmp_path: Path
) -> None:
    found = pool.run(train, names, shares, nodes, str(tmp_path / "saved"), world=len(shares))
    check(found, names, nodes)
    plain, _ = make(names)
    plain.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    assert bits(plain.parameters()) == found[0]["values"]
    for worker in found:
        stats = worker["stats"]
        assert 0 < stats.device_peak <= stats.device_budget
        assert stats.steps == STEPS
        assert stats.step_blocks >= stats.optimum_blocks > 0
        assert stats.host_peak > 0
