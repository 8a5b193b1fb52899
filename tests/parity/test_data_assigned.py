"""`p.data = tensor`, as SAM's and averaged weights' idioms have it: the values count, as in plain PyTorch."""

from __future__ import annotations

import functools

import pytest
import torch
from kinds import check_equal, in_step
from torch import Tensor, nn

import atoll
from atoll.core.errors import BindingError
from support.pool import WorkerPool
from support.runs import alone, model, run_at

WORLD = 2
QUICK = ("ring", "peers")


def share(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 32, dtype=torch.float64, generator=generator)


def perturbed(net: nn.Module) -> list[Tensor]:
    """SAM's first half; the values as they were."""
    kept = [p.data.clone() for p in net.parameters()]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.01)
    return kept


def evaluate_with_average(net: nn.Module) -> None:
    """Averaged weights swapped in for a forward, and out again."""
    kept = [p.data for p in net.parameters()]
    for parameter in net.parameters():
        parameter.data = torch.zeros_like(parameter.data)
    assert not net(share(0, 0)).any()
    for parameter, values in zip(net.parameters(), kept, strict=True):
        parameter.data = values


def train(session: atoll.Session) -> list[Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    for step in range(3):
        kept = perturbed(net)
        if session.config.memory.is_given and session.config.run.strategy == "ring":
            session.barrier()  # as the line says that ends a script without: each member holds a part
        net(share(session.rank, step)).square().mean().backward()
        for parameter, values in zip(net.parameters(), kept, strict=True):
            parameter.data = values
        optimizer.step()
        optimizer.zero_grad()
        if not session.config.memory.is_given:  # under budgets all must fit that is kept
            evaluate_with_average(net)
    return [p.detach().clone() for p in net.parameters()]


@functools.cache
def plain(world: int) -> list[Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        kept = perturbed(net)
        for rank in range(world):
            (net(share(rank, step)).square().mean() / world).backward()
        for parameter, values in zip(net.parameters(), kept, strict=True):
            parameter.data = values
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("kind", in_step(QUICK))
def test_values_are_taken_in_at_the_step(pool: WorkerPool, kind: str) -> None:
    for found in run_at(pool, kind, train, world=WORLD):
        check_equal(found, plain(WORLD))


@pytest.mark.parametrize("tiers", [False, True])
def test_alone_too(tiers: bool) -> None:
    check_equal(alone(train, tiers=tiers), plain(1))


def test_a_step_between_the_swaps_is_one_line() -> None:
    """It would be written over what the script has kept."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with atoll.join() as session:
        session.prepare(net, optimizer)
        kept = net[0].weight.data
        net[0].weight.data = torch.zeros_like(kept)
        net(share(0, 0)).square().mean().backward()
        with pytest.raises(BindingError, match=r"'0\.weight' was given other memory.*p\.data\.copy_"):
            optimizer.step()
        net[0].weight.data = kept
        optimizer.step()
