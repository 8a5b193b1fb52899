"""With a GradScaler too, a worker without a batch skips forward and backward and makes all other calls."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.train.gradients import watch
from support.pool import WorkerPool
from support.runs import KINDS, PACES, TOGETHER, alone, model, run_at

pytestmark = pytest.mark.sampled

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
# Worker 1 has its first batch late, and the first step of all is skipped.
LATE = [((0,), (), ""), ((0,), (0,), "session"), ((0,), (), "session"), ((0, 1), (), ""), ((1,), (), "")]
HOW: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "fused": {"fused": True}}


def optimizer_of(net: nn.Module, how: str) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, **HOW[how])


Script = list[tuple[tuple[int, ...], tuple[int, ...], str]]


def loss_of(net: nn.Module, script: Script, step: int, rank: int) -> Tensor:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    loss: Tensor = (net(x) - 1).square().mean()
    return loss * math.inf if rank in script[step][1] else loss


def plain(how: str, script: Script = SCRIPT) -> list[Tensor]:
    net = model()
    optimizer = optimizer_of(net, how)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step, (who, _, clip) in enumerate(script):
        scaler.scale(torch.stack([loss_of(net, script, step, rank) for rank in who]).mean()).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def train(
    session: atoll.Session, how: str, script: Script = SCRIPT, on_gpu: bool = False
) -> tuple[list[Tensor], int, float]:
    """`on_gpu`: no look at gradients, as on a GPU."""
    with patch.object(watch, "_READABLE", frozenset() if on_gpu else watch._READABLE):
        return _train(session, how, script)


def _train(session: atoll.Session, how: str, script: Script) -> tuple[list[Tensor], int, float]:
    net = model()
    optimizer = optimizer_of(net, how)
    session.prepare(net, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step, (who, _, clip) in enumerate(script):
        if session.rank in who:
            scaler.scale(loss_of(net, script, step, session.rank)).backward()
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


def check(found: list[Any], right: list[Tensor]) -> None:
    for parameters, _, _ in found:  # under peers each node's scaler is its own
        for parameter, expected in zip(parameters, right, strict=True):
            torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [*TOGETHER, "elastic", "server tiers", "peers tiers"])
def test_a_worker_may_have_its_first_batch_late(pool: WorkerPool, kind: str, how: str) -> None:
    check(run_at(pool, kind, train, how, LATE), plain(how, LATE))


@pytest.mark.parametrize("kind", [*TOGETHER, "elastic", "server tiers", "peers tiers"])
def test_zeros_of_zero_grad_are_seen_without_a_look_at_them(pool: WorkerPool, kind: str) -> None:
    """As on a GPU, where a look waits for it."""
    check(run_at(pool, kind, train, "fused", SCRIPT, True), plain("fused"))


@pytest.mark.parametrize("of", ["optimizer", "module"])
@pytest.mark.parametrize("kind", ["ring", "tiers"])
def test_zeros_count_only_while_nothing_is_written_to_them(pool: WorkerPool, kind: str, of: str) -> None:
    for seen in run_at(pool, kind, zeros, of):
        assert seen == [False, True, False, True, False]


def zeros(session: atoll.Session, of: str) -> list[bool]:
    """Whether gradients are known to be zeros: at first, after `zero_grad`, after a write, and once more."""
    net = model()
    optimizer = optimizer_of(net, "loop")
    session.prepare(net, optimizer)
    known, its = session._state.prepared[0].reducer.watch, optimizer if of == "optimizer" else net
    with patch.object(watch, "_READABLE", frozenset()):
        net(torch.ones(2, 32, dtype=torch.float64)).sum().backward()
        seen = [known.is_left_out()]
        its.zero_grad(set_to_none=False)
        seen.append(known.is_left_out())
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(1.0)
        seen.append(known.is_left_out())
        its.zero_grad(set_to_none=False)
        seen.append(known.is_left_out())
        first = next(parameter for parameter in net.parameters() if parameter.grad is not None)
        first.grad = torch.ones_like(first)
        seen.append(known.is_left_out())
        optimizer.zero_grad()
    return seen


def unscaled(session: atoll.Session) -> str:
    net = model()
    optimizer = optimizer_of(net, "loop")
    session.prepare(net, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    net(torch.ones(2, 32, dtype=torch.float64)).sum().backward()
    with pytest.raises(AssertionError) as raised:
        scaler.step(optimizer)
    optimizer.step()
    return str(raised.value)


def test_a_script_that_forgets_to_scale_is_told_so_by_torch() -> None:
    assert "your script did not use scaler.scale" in alone(unscaled)


@pytest.mark.parametrize("kind", [kind for kind in (*KINDS, *PACES) if kind in ("asp", "ssp", "ps-hra asp")])
def test_at_their_own_pace_each_makes_its_steps(pool: WorkerPool, kind: str) -> None:
    for parameters, _, _ in run_at(pool, kind, train, "loop"):
        assert all(parameter.isfinite().all() for parameter in parameters)
