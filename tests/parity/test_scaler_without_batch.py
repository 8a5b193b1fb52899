"""With a GradScaler too, a worker without a batch skips forward and backward and makes all other calls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.testing.pool import WorkerPool
from atoll.testing.runs import KINDS, PACES, TOGETHER, model, run_at

# Step by step: who has a batch, whose loss is infinite, and how the script clips.
SCRIPT: list[tuple[tuple[int, ...], tuple[int, ...], str]] = [
    ((0, 1), (), ""),
    ((0,), (), ""),
    ((0,), (), "session"),
    ((0,), (0,), ""),
    ((0, 1), (), ""),
    ((0,), (0,), "session"),
    ((1,), (), "session"),
    ((0, 1), (), ""),
]
HOW: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "fused": {"fused": True}}


def optimizer_of(net: nn.Module, how: str) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, **HOW[how])


def loss_of(net: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    loss: Tensor = (net(x) - 1).square().mean()
    return loss * math.inf if rank in SCRIPT[step][1] else loss


def plain(how: str) -> list[Tensor]:
    net = model()
    optimizer = optimizer_of(net, how)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step, (who, _, clip) in enumerate(SCRIPT):
        scaler.scale(torch.stack([loss_of(net, step, rank) for rank in who]).mean()).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def train(session: atoll.Session, how: str) -> tuple[list[Tensor], int, float]:
    net = model()
    optimizer = optimizer_of(net, how)
    session.prepare(net, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step, (who, _, clip) in enumerate(SCRIPT):
        if session.rank in who:
            scaler.scale(loss_of(net, step, session.rank)).backward()
        if clip:
            scaler.unscale_(optimizer)
            session.clip_grad_norm_(0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=how == "loop")
    session.barrier()
    return (
        [parameter.detach().clone() for parameter in net.parameters()],
        session.iteration,
        scaler.get_scale(),
    )


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [*TOGETHER, "elastic", "server tiers", "peers tiers"])
def test_it_is_plain_pytorch(pool: WorkerPool, kind: str, how: str) -> None:
    right = plain(how)
    for parameters, _, _ in run_at(pool, kind, train, how):
        for parameter, expected in zip(parameters, right, strict=True):
            torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in (*KINDS, *PACES) if kind in ("asp", "ssp", "ps-hra asp")])
def test_at_their_own_pace_each_makes_its_steps(pool: WorkerPool, kind: str) -> None:
    for parameters, _, _ in run_at(pool, kind, train, "loop"):
        assert all(parameter.isfinite().all() for parameter in parameters)
