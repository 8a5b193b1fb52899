"""A graph that lives over a step of other parameters: the loop of PyTorch's DCGAN tutorial."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll
from support.pool import WorkerPool
from support.runs import KINDS, alone, run_at

WORLD = 2
QUICK = ("server", "peers", "server tiers")


def build() -> nn.ModuleList:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 8)] * 2
    generator = nn.Sequential(*[copy.deepcopy(layer) for layer in layers])
    return nn.ModuleList([generator, nn.Linear(8, 1)]).double()


def noise(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def discriminator_loss(both: nn.ModuleList, fake: Tensor) -> Tensor:
    return both[1](fake.detach()).square().mean()


def generator_loss(both: nn.ModuleList, fake: Tensor) -> Tensor:
    return (both[1](fake) - 1).square().mean()


def train(session: atoll.Session) -> list[Tensor]:
    both = build()
    optimizer = torch.optim.SGD(both.parameters(), lr=0.05)
    session.prepare(both, optimizer)
    for step in range(3):
        fake = both[0](noise(session.rank, step))
        discriminator_loss(both, fake).backward()
        optimizer.step()
        optimizer.zero_grad()
        generator_loss(both, fake).backward()
        for parameter in both[1].parameters():
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in both.parameters()]


@functools.cache
def plain(world: int) -> list[Tensor]:
    both = build()
    optimizer = torch.optim.SGD(both.parameters(), lr=0.05)
    for step in range(3):
        fakes = [both[0](noise(rank, step)) for rank in range(world)]
        losses: list[Any] = [discriminator_loss(both, fake) for fake in fakes]
        (sum(losses) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = [generator_loss(both, fake) for fake in fakes]
        (sum(losses) / world).backward()
        for parameter in both[1].parameters():
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in both.parameters()]


def check(found: list[Tensor], world: int) -> None:
    assert max(float((a - b).abs().max()) for a, b in zip(found, plain(world), strict=True)) <= 1e-12


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in QUICK else pytest.mark.soak) for k in KINDS if k != "asp"],
)
def test_a_step_leaves_parameters_without_a_gradient_alone(pool: WorkerPool, kind: str) -> None:
    for found in run_at(pool, kind, train, world=WORLD):
        check(found, WORLD)


@pytest.mark.parametrize("tiers", [False, True])
def test_alone_too(tiers: bool) -> None:
    check(alone(train, tiers=tiers), 1)
