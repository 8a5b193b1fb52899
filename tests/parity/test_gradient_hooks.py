"""A script's own hooks do what they do under DistributedDataParallel, at every strategy and store.

One training tries all changes, each in a part of the model that has hooks of its own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.core.errors import PrepareError
from support.pool import WorkerPool
from support.runs import KINDS, alone, model, run_at

pytestmark = pytest.mark.sampled

STEPS = 4
WORLD = 2


def marked(*quick: str, without: Sequence[str] = ()) -> list[Any]:
    """All kinds of runs, of which `make test` takes the quick ones."""
    marks = {kind: [] if kind in quick else [pytest.mark.soak] for kind in KINDS if kind not in without}
    return [pytest.param(kind, marks=mark) for kind, mark in marks.items()]


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.002, 0.002)


def replace(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 3


def drop_some(parameter: Tensor) -> None:
    if parameter.dim() == 1:
        parameter.grad = None


def drop_all(parameter: Tensor) -> None:
    parameter.grad = None


CHANGES: dict[str, Callable[[Tensor], None]] = {
    change.__name__: change for change in (halve, clamp, replace, drop_some, drop_all)
}
PARTS = [f"{name} {when}" for name in CHANGES for when in ("before", "after")]


def build() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {part: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)) for part in PARTS}
    ).double()


def hook(net: nn.ModuleDict, when: str) -> None:
    """Register the changes of the parts whose hooks are set `when`."""
    for part, layers in net.items():
        if part.endswith(when):
            for parameter in layers.parameters():
                parameter.register_post_accumulate_grad_hook(CHANGES[part.split()[0]])


def backward(net: nn.ModuleDict, rank: int, step: int, micro: int) -> None:
    seed = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    inputs = torch.randn(4, 16, dtype=torch.float64, generator=seed)
    total: Tensor = sum(net[part](inputs).square().mean() for part in net)  # type: ignore[assignment]
    total.backward()  # type: ignore[no-untyped-call]


def train(session: atoll.Session) -> dict[str, Tensor]:
    """What a user writes; every other step accumulates over two batches."""
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    hook(net, "before")
    session.prepare(net, optimizer)
    hook(net, "after")
    for parameter in net["halve after"].parameters():  # what a script does that trains by stages
        parameter.requires_grad_(False).requires_grad_(True)
    for step in range(STEPS):
        if step % 2:
            with session.no_sync():
                backward(net, session.rank, step, 0)
        backward(net, session.rank, step, 1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@functools.cache
def expected(world: int) -> dict[str, Tensor]:
    """Each worker's own gradient as its hooks leave it, then the mean."""
    nets = [build() for _ in range(world)]
    optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1, momentum=0.9)
    for net in nets:
        hook(net, "before")
        hook(net, "after")
    for step in range(STEPS):
        for rank, net in enumerate(nets):
            net.load_state_dict(nets[0].state_dict())
            for micro in range(0 if step % 2 else 1, 2):
                backward(net, rank, step, micro)
        for same in zip(*(net.parameters() for net in nets), strict=True):
            there = [p.grad for p in same if p.grad is not None]
            same[0].grad = torch.stack(there).sum(0) / world if there else None
        optimizer.step()
        for net in nets:
            net.zero_grad()
    return {name: p.detach().clone() for name, p in nets[0].named_parameters()}


def check(found: dict[str, Tensor], world: int) -> None:
    off = {name: float((found[name] - value).abs().max()) for name, value in expected(world).items()}
    assert {name: each for name, each in off.items() if not each <= 1e-12} == {}


@pytest.mark.parametrize("kind", marked("ring", "ps-hra", "tiers", without=("asp",)))
def test_what_a_post_accumulate_hook_makes_of_a_gradient_is_reduced(pool: WorkerPool, kind: str) -> None:
    for found in run_at(pool, kind, train, world=WORLD):
        check(found, WORLD)


def test_alone_it_is_stepped_with(pool: WorkerPool) -> None:
    check(alone(train), 1)
    check(alone(train, tiers=True), 1)
    (found,) = run_at(pool, "asp", train, world=1)
    check(found, 1)


# Other optimizers than the prepared one


def step_in_backward(session: atoll.Session, before: bool) -> str:
    """What the first backward ends with, where a hook steps each parameter as its gradient comes."""
    net = model()
    each = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

    def step(parameter: Tensor) -> None:
        each[parameter].step()  # type: ignore[index]
        each[parameter].zero_grad()  # type: ignore[index]

    def register() -> None:
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(step)

    if before:
        register()
    session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    if not before:
        register()
    inputs = torch.randn(4, 32, dtype=torch.float64)
    with pytest.raises(PrepareError) as caught:
        net(inputs).square().mean().backward()
    session._leaving.leave()  # as an error does that leaves the `with`
    return str(caught.value)


@pytest.mark.parametrize("kind", marked("asp", "peers tiers"))
def test_an_optimizer_in_backward_is_refused_at_its_first_step(pool: WorkerPool, kind: str) -> None:
    before = list(KINDS).index(kind) % 2 == 0
    for said in run_at(pool, kind, step_in_backward, before, world=WORLD):
        step = re.sub(r"py:\d+", "py:LINE", said).replace("weight", "bias")
        assert step == (
            "SGD.step() of parameter '10.bias' within backward (test_gradient_hooks.py:LINE): "
            "session.prepare was not given this optimizer, so each worker would step by itself and the "
            "workers' models would part; give session.prepare a list with all optimizers that step the model"
        )


def steps_beside(session: atoll.Session) -> tuple[list[str], Tensor]:
    """A second optimizer steps a parameter after each backward, the last of which is under no_sync. What the
    user was told, and the parameter as the steps with the mean have left it."""
    net, said, value = model(), list[str](), torch.zeros(0)
    first = net[0].weight
    groups = [{"params": [p for p in net.parameters() if p is not first]}, {"params": [first], "lr": 0.0}]
    optimizer, second = torch.optim.SGD(groups, lr=0.1), torch.optim.SGD([first], lr=0.1)
    session.prepare(net, optimizer)
    session._records.warn = said.append  # type: ignore[method-assign]
    torch.manual_seed(session.rank)
    try:
        for step in range(3):
            with session.no_sync() if step == 2 else nullcontext():
                net(torch.randn(4, 32, dtype=torch.float64)).square().mean().backward()
            second.step()
            optimizer.step()
            optimizer.zero_grad()
            value = first.detach().clone()
    except PrepareError as error:
        said.append(str(error))
        session._leaving.leave()
    return said, value


@pytest.mark.parametrize("kind", marked("elastic", "server tiers"))
def test_another_optimizer_steps_with_the_mean_or_not_at_all(pool: WorkerPool, kind: str) -> None:
    (said, value), (also_said, other) = run_at(pool, kind, steps_beside, world=WORLD)
    assert said == also_said
    *warned, refused = said
    begin = r"SGD\.step\(\) of parameter '0\.weight' \(test_gradient_hooks\.py:\d+\): session\.prepare"
    assert re.match(begin + " was not given this optimizer, so each worker would step by itself", refused)
    if kind in ("ring", "hierarchical", "elastic"):
        (line,) = warned
        assert re.match(begin + " was not given this optimizer, so its state is in no checkpoint", line)
        assert torch.equal(value, other)
    else:
        assert not warned


def drops_everything(session: atoll.Session) -> list[str]:
    """What the user is told where hooks leave no gradient: they may have used it up by themselves."""
    net, said = model(), list[str]()
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(drop_all)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    session._records.warn = said.append  # type: ignore[method-assign]
    for _ in range(2):
        net(torch.randn(4, 32, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return said


@pytest.mark.parametrize(
    "kind", ["ring", *(pytest.param(k, marks=pytest.mark.soak) for k in ("tiers", "server"))]
)
def test_where_hooks_leave_no_gradient_it_is_said_once(pool: WorkerPool, kind: str) -> None:
    for said in run_at(pool, kind, drops_everything, world=WORLD):
        (line,) = said
        assert line.startswith("the script's hooks have set every gradient of a backward to None, so it adds")
