"""torch.func.functional_call on a prepared model: MAML's inner step, and the gradients of each sample."""

from __future__ import annotations

import functools

import pytest
import torch
from kinds import check_equal, in_step
from torch import Tensor, nn
from torch.func import functional_call

import atoll
from support.pool import WorkerPool
from support.runs import alone, run_at

WORLD = 2
QUICK = ("server", "tiers")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(32, 4)).double()


def outer_loss(net: nn.Sequential, rank: int, step: int) -> Tensor:
    """Of the parameters after an inner step; `net` itself, and then a part of it by its own name."""
    seed = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(4, 32, dtype=torch.float64, generator=seed)
    part = net if step % 2 == 0 else net[:4]
    inner = part(inputs).square().mean()
    gradients = torch.autograd.grad(inner, list(part.parameters()), create_graph=True)
    named = zip(part.named_parameters(), gradients, strict=True)
    fast = {name: parameter - 0.1 * gradient for (name, parameter), gradient in named}
    loss: Tensor = functional_call(part, fast, (inputs,)).square().mean()
    return loss


def train(session: atoll.Session) -> list[Tensor]:
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    for step in range(4):
        session.weight(1)
        outer_loss(net, session.rank, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


@functools.cache
def plain(world: int) -> list[Tensor]:
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        for rank in range(world):
            (outer_loss(net, rank, step) / world).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("kind", in_step(QUICK))
def test_an_inner_step_trains_as_in_plain_torch(pool: WorkerPool, kind: str) -> None:
    for found in run_at(pool, kind, train, world=WORLD):
        check_equal(found, plain(WORLD))


@pytest.mark.parametrize("tiers", [False, True])
def test_alone_too(tiers: bool) -> None:
    check_equal(alone(train, tiers=tiers), plain(1))


def test_another_models_parameters_may_take_part() -> None:
    net, other = build(), build()
    with atoll.join() as session:
        session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        inputs = torch.randn(4, 32, dtype=torch.float64)
        assert torch.equal(functional_call(net, dict(other.named_parameters()), (inputs,)), other(inputs))
        assert torch.equal(net(inputs), other(inputs))
