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

pytestmark = pytest.mark.sampled

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


# -- where another worker changes parameters meanwhile -------------------------------------------------------

AT_OWN_PACE = ("asp", "ssp", "ps-hra asp")


def meet(session: atoll.Session) -> None:
    session.gather(0)  # unlike a barrier it fetches no parameters


def generator_step(both: nn.ModuleList, optimizer: torch.optim.Optimizer, fake: Tensor) -> None:
    generator_loss(both, fake).backward()
    for parameter in both[1].parameters():
        parameter.grad = None
    optimizer.step()
    optimizer.zero_grad()


def overtaken(session: atoll.Session) -> tuple[list[Tensor], list[Tensor]]:
    """Worker 0 has a generator's graph while worker 1 makes a step of the generator.

    Returns worker 0's gradients of the generator and those that plain torch computes from the values that
    its forward used. On worker 1 both are empty.
    """
    both = build()
    optimizer = torch.optim.SGD(both.parameters(), lr=0.05)
    session.prepare(both, optimizer)
    found: list[Tensor] = []
    right: list[Tensor] = []
    if session.rank == 1:
        meet(session)
        generator_step(both, optimizer, both[0](noise(1, 0)))
        meet(session)
    else:
        fake = both[0](noise(0, 0))
        twin = copy.deepcopy(both[0])
        meet(session)
        meet(session)
        discriminator_loss(both, fake).backward()
        optimizer.step()
        optimizer.zero_grad()
        plainly = nn.ModuleList([twin, copy.deepcopy(both[1])])
        generator_loss(plainly, twin(noise(0, 0))).backward()
        generator_loss(both, fake).backward()
        found, right = ([p.grad.clone() for p in net.parameters()] for net in (both[0], twin))
        optimizer.zero_grad()
    session.barrier()
    return found, right


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k == "asp" else pytest.mark.soak) for k in ("asp", "ssp")]
)
def test_a_graph_keeps_the_values_that_its_forward_used(pool: WorkerPool, kind: str) -> None:
    (found, right), _ = run_at(pool, kind, overtaken, world=WORLD)
    assert len(found) == 8
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def converge(session: atoll.Session) -> list[Tensor]:
    both = build()
    optimizer = torch.optim.SGD(both.parameters(), lr=0.05)
    session.prepare(both, optimizer)
    for step in range(10):
        fake = both[0](noise(session.rank, step))
        discriminator_loss(both, fake).backward()
        optimizer.step()
        optimizer.zero_grad()
        generator_step(both, optimizer, fake)
    session.barrier()
    return [p.detach().clone() for p in both.parameters()]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k == "ps-hra asp" else pytest.mark.soak) for k in AT_OWN_PACE]
)
def test_workers_at_their_own_pace_end_with_equal_values(pool: WorkerPool, kind: str) -> None:
    first, second = run_at(pool, kind, converge, world=WORLD)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Branches(nn.Module):
    """Two layers, of which a worker uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)]).double()

    def forward(self, features: Tensor, which: int) -> Tensor:
        return self.layers[which](features)


def branches(session: atoll.Session) -> list[Tensor]:
    """Each worker trains a layer of its own.

    Returns the layers after its step, in the next forward of the model, and as the shards have them.
    """
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session.prepare(model, optimizer)
    for turn in (1, 0):  # the second worker steps before the first one does
        if session.rank == turn:
            model(noise(session.rank, 0), session.rank).square().mean().backward()
            optimizer.step()
        meet(session)
    before = [layer.weight.detach().clone() for layer in model.layers]
    model(noise(session.rank, 1), session.rank)
    then = [layer.weight.detach().clone() for layer in model.layers]
    session.barrier()
    return [*before, *then, *(layer.weight.detach().clone() for layer in model.layers)]


def test_the_next_forward_of_the_model_shows_what_others_trained(pool: WorkerPool) -> None:
    first, _ = run_at(pool, "asp", branches, world=WORLD)
    start = Branches().layers[1].weight
    assert torch.equal(first[1], start)  # after worker 0's step, before its next forward
    assert torch.equal(first[3], first[5])
    assert not torch.equal(first[3], start)
