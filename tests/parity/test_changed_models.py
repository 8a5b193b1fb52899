"""Models that change after `session.prepare`: frozen and unfrozen, grown, with another head, with LoRA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import atoll
from atoll.core.errors import PrepareError, UserError
from support.pool import WorkerPool
from support.runs import alone, model, run_at

pytestmark = pytest.mark.sampled

WORLD, STEPS, AT = 2, 6, (2, 4)
HERE = [
    "ring",
    "server",
    "ps-hra",
    "tiers",
    *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("hierarchical", "elastic", "server tiers")),
]
ELSEWHERE = ("peers", "peers tiers")


class Lora(nn.Module):
    """A linear layer that is frozen, and a product of two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        made = torch.Generator().manual_seed(7)
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=torch.float64, generator=made) / 8)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2, dtype=torch.float64))

    def forward(self, features: Tensor) -> Tensor:
        return self.base(features) + features @ self.down.T @ self.up.T


def plainly(net: nn.Sequential) -> Optimizer:
    return SGD(net.parameters(), lr=0.1, momentum=0.9)


def first_frozen(net: nn.Sequential) -> Optimizer:
    net[0].requires_grad_(False)
    return plainly(net)


def without_first(net: nn.Sequential) -> Optimizer:
    rest = [p for part in net[1:] for p in part.parameters()]
    return SGD(rest, lr=0.1, momentum=0.9)


def unfreeze(net: nn.Sequential, optimizer: Optimizer) -> Optimizer:
    net[0].requires_grad_(True)
    return optimizer


def freeze(net: nn.Sequential, optimizer: Optimizer) -> Optimizer:
    net[2].requires_grad_(False)
    for parameter in net[2].parameters():
        parameter.grad = None
    return optimizer


def freeze_then_unfreeze(net: nn.Sequential, optimizer: Optimizer) -> Optimizer:
    net[2].requires_grad_(not net[2].weight.requires_grad)
    return optimizer


def add_group(net: nn.Sequential, optimizer: Optimizer) -> Optimizer:
    if len(optimizer.param_groups) == 1:
        optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.02})
    return optimizer


def other_head(net: nn.Sequential, _optimizer: Optimizer) -> Optimizer:
    torch.manual_seed(3)
    net[-1] = nn.Linear(32, 4).double()
    return plainly(net)


def lora_and_back(net: nn.Sequential, optimizer: Optimizer) -> Optimizer:
    """Add LoRA to the first layer at the first call, and merge it at the second."""
    if isinstance(net[0], nn.Linear):
        net[0] = Lora(net[0])
        optimizer.add_param_group({"params": [net[0].down, net[0].up]})
        return optimizer
    with torch.no_grad():
        net[0].base.weight.add_(net[0].up @ net[0].down)
    net[0] = net[0].base.requires_grad_(True)
    return plainly(net)


CHANGES: dict[str, tuple[Callable[..., Optimizer], Callable[..., Optimizer]]] = {
    "unfrozen": (first_frozen, unfreeze),
    "frozen": (plainly, freeze),
    "frozen for a while": (plainly, freeze_then_unfreeze),
    "a param group": (without_first, add_group),
    "another head": (plainly, other_head),
    "LoRA": (plainly, lora_and_back),
}


def batch(rank: int, step: int) -> Tensor:
    made = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 32, dtype=torch.float64, generator=made)


def train(session: atoll.Session, change: str) -> list[list[Tensor]]:
    net = model()
    make, alter = CHANGES[change]
    optimizer, seen = make(net), []
    session.prepare(net, optimizer)
    for step in range(STEPS):
        if step in AT:
            optimizer = alter(net, optimizer)
            assert session.prepare(net, optimizer) == (net, optimizer)
        net(batch(session.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([p.detach().clone() for p in net.parameters()])
    assert session.iteration == STEPS
    return seen


@functools.cache
def plain(world: int, change: str) -> list[list[Tensor]]:
    net = model()
    make, alter = CHANGES[change]
    optimizer, seen = make(net), []
    for step in range(STEPS):
        if step in AT:
            optimizer = alter(net, optimizer)
        for rank in range(world):
            (net(batch(rank, step)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([p.detach().clone() for p in net.parameters()])
    return seen


def check(found: list[list[Tensor]], right: list[list[Tensor]]) -> None:
    assert len(found) == len(right)
    for mine, theirs in zip(found, right, strict=True):
        assert len(mine) == len(theirs)
        check_equal(mine, theirs)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", HERE)
def test_training_goes_on_with_the_changed_model(pool: WorkerPool, kind: str, change: str) -> None:
    for found in run_at(pool, kind, train, change, world=WORLD):
        check(found, plain(WORLD, change))


@pytest.mark.parametrize("change", ["unfrozen", "LoRA"])
def test_a_single_worker_of_shards_at_its_own_pace_goes_on_too(pool: WorkerPool, change: str) -> None:
    (found,) = run_at(pool, "asp", train, change, world=1)
    check(found, plain(1, change))


def at_own_paces(session: atoll.Session) -> list[Tensor]:
    """Make unequal numbers of steps before the change, and take the newest values at its end."""
    net = model()
    optimizer = first_frozen(net)
    session.prepare(net, optimizer)
    for step in range(6 if session.rank else 2):
        net(batch(session.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.prepare(net, unfreeze(net, optimizer))
    begun = [p.detach().clone() for p in net.parameters()]
    for step in range(2):
        net(batch(session.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.barrier()
    return [*begun, *(p.detach().clone() for p in net.parameters())]


def test_workers_at_unequal_iterations_change_together(pool: WorkerPool) -> None:
    first, second = run_at(pool, "asp", at_own_paces, world=WORLD)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))
    half = len(first) // 2
    assert bool((first[0] == model()[0].weight).all())  # frozen until the change
    assert bool((first[half] != first[0]).any())


@pytest.mark.parametrize("change", CHANGES)
def test_alone_too(change: str) -> None:
    check(alone(train, change), plain(1, change))


def unprepared(session: atoll.Session, change: str) -> str:
    """Change the model and go on without another call of session.prepare."""
    net = model()
    make, alter = CHANGES[change]
    optimizer = make(net)
    session.prepare(net, optimizer)
    optimizer = alter(net, optimizer)
    net(batch(session.rank, 0)).square().mean().backward()
    try:
        optimizer.step()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("unfrozen", "'0.weight' was frozen when session.prepare saw it"),
        ("a param group", "param group 1 was changed after session.prepare"),
        ("LoRA", "param group 1 was changed after session.prepare"),
    ],
)
def test_a_change_that_was_not_prepared_is_a_line(pool: WorkerPool, change: str, line: str) -> None:
    for said in (
        *run_at(pool, "ring", unprepared, change, world=WORLD),
        *run_at(pool, "server", unprepared, change, world=WORLD),
    ):
        assert line in said
        assert "call session.prepare again after the change, on every worker" in said


def unseen_head(session: atoll.Session) -> str:
    net = model()
    optimizer = plainly(net)
    session.prepare(net, optimizer)
    other_head(net, optimizer)
    net(batch(session.rank, 0)).square().mean().backward()
    with pytest.raises(PrepareError) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_head_that_was_not_prepared_is_named(pool: WorkerPool) -> None:
    for said in run_at(pool, "ring", unseen_head, world=WORLD):
        assert "parameter '10.weight' came into the model after session.prepare" in said


def prepared_again(session: atoll.Session) -> str:
    net = model()
    optimizer = plainly(net)
    session.prepare(net, optimizer)
    with pytest.raises(PrepareError) as caught:
        session.prepare(net, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_elsewhere_a_second_prepare_is_refused(pool: WorkerPool, kind: str) -> None:
    for said in run_at(pool, kind, prepared_again, world=WORLD):
        assert "make the change before session.prepare" in said


def test_not_between_backward_and_step() -> None:
    net = model()
    optimizer = plainly(net)
    with atoll.join() as session:
        session.prepare(net, optimizer)
        net(batch(0, 0)).square().mean().backward()
        with pytest.raises(PrepareError, match="between a backward and optimizer.step"):
            session.prepare(net, optimizer)
        optimizer.step()
        session.prepare(net, optimizer)


def with_schedule(session: atoll.Session) -> list[Any]:
    """A schedule by samples, the iteration and a checkpoint go on through the change."""
    net = model()
    optimizer = first_frozen(net)
    session.prepare(net, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    session.schedule(scheduler, total=4 * 4 * session.world, steps=4)
    rates = []
    for step in range(4):
        if step == 2:
            session.prepare(net, unfreeze(net, optimizer))
        net(batch(session.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    return [rates, session.iteration]


def test_schedules_and_the_iteration_go_on(pool: WorkerPool) -> None:
    for rates, iteration in run_at(pool, "ring", with_schedule, world=WORLD):
        assert rates == pytest.approx([0.05, 0.025, 0.0125, 0.00625])
        assert iteration == 4
