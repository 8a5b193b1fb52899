"""Optimizers that call the script's closure several times in a step: each call gives the workers' mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn

import atoll
from atoll.core.errors import PrepareError
from support.pool import JobFailedError, WorkerPool
from support.runs import alone, model, run_at

WORLD, STEPS = 2, 3
RINGS = ("ring", "hierarchical", "elastic")
ELSEWHERE = ("server", "asp", "ps-hra", "peers", "tiers", "server tiers", "peers tiers")
QUICK = ("ring", "server")


class Sam(torch.optim.Optimizer):
    """SGD by the gradient at a place uphill; it calls the closure there."""

    def __init__(self, parameters: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "rho": rho})

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
                uphill = [p.grad * (group["rho"] / norm) for p in group["params"]]
                for p, way in zip(group["params"], uphill, strict=True):
                    p.add_(way)
                with torch.enable_grad():
                    closure()
                for p, way in zip(group["params"], uphill, strict=True):
                    p.sub_(way).sub_(p.grad, alpha=group["lr"])
        return loss


class SamAround(torch.optim.Optimizer):
    """SAM around another optimizer, as in the package of that name: its closure is optional by its signature
    alone, and computes the second gradient; the script has computed the first one before the step."""

    def __init__(self, parameters: Any, rho: float = 0.05, **settings: Any) -> None:
        super().__init__(parameters, {"rho": rho, **settings})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM requires closure"
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in parameters]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.add_(p.grad, alpha=float(self.param_groups[0]["rho"] / norm))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)
        self.base_optimizer.step()


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def sam(parameters: Any) -> torch.optim.Optimizer:
    return Sam(parameters)


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, x[:, :4].sin()


def train(session: atoll.Session | None, make: Any, uneven: bool = False) -> tuple[list[Tensor], list[float]]:
    net = model()
    optimizer = make(net.parameters())
    rank, world = (0, 1) if session is None else (session.rank, session.world)
    if session is not None:
        session.prepare(net, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        if world > 1:
            rows = slice(0, 9) if rank == 0 else slice(9, 12)
            x, y = (x[rows], y[rows]) if uneven else (x[rank::world], y[rank::world])

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            if session is not None and uneven:
                session.weight(len(x))
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
    return [p.detach().clone() for p in net.parameters()], losses


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("make", [lbfgs, sam])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.soak) for kind in RINGS]
)
def test_each_call_gives_the_mean_over_the_workers(
    pool: WorkerPool, kind: str, make: Any, uneven: bool
) -> None:
    right, losses = train(None, make)
    found = run_at(pool, kind, train, make, uneven, world=WORLD)
    for values, shown in found:
        assert max(float((a - b).abs().max()) for a, b in zip(values, right, strict=True)) <= 1e-9
        assert shown == pytest.approx(losses, abs=1e-12)
    check_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]  # or the line searches would part


def train_around(session: atoll.Session | None, prepares_inner: bool, uneven: bool = False) -> list[Tensor]:
    """Train with SamAround; `prepares_inner`: the optimizer that it wraps is given to `session.prepare`."""
    net = model()
    optimizer = SamAround(net.parameters(), lr=0.1, momentum=0.9)
    rank, world = (0, 1) if session is None else (session.rank, session.world)
    if session is not None:
        session.prepare(net, optimizer.base_optimizer if prepares_inner else optimizer)
    for step in range(STEPS):
        x, y = batch(step)
        if world > 1:
            rows = slice(0, 9) if rank == 0 else slice(9, 12)
            x, y = (x[rows], y[rows]) if uneven else (x[rank::world], y[rank::world])

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            if session is not None and uneven:
                session.weight(len(x))
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            return loss

        optimizer.zero_grad()
        closure()
        optimizer.step(closure)
    assert session is None or session.iteration == STEPS
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("prepares_inner", [False, True])
def test_a_closure_that_is_called_after_the_parameters_have_moved(
    pool: WorkerPool, prepares_inner: bool
) -> None:
    right = train_around(None, prepares_inner)
    assert all(map(torch.equal, alone(train_around, prepares_inner), right))
    for uneven in (False, True):
        found = run_at(pool, "ring", train_around, prepares_inner, uneven, world=WORLD)
        for values in found:
            assert max(float((a - b).abs().max()) for a, b in zip(values, right, strict=True)) <= 1e-9
        check_equal(*found)


class TwiceByFormula(torch.optim.SGD):
    """Element-wise; calls its closure twice."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        return super().step(closure)


def train_twice(session: atoll.Session | None, unit: Literal["tensor"] | None) -> list[Tensor]:
    net = model()
    optimizer = TwiceByFormula(net.parameters(), lr=0.1)
    if session is not None:
        session.prepare(net, optimizer, step=unit)
    for step in range(STEPS):
        x, y = batch(step)
        x, y = (
            (x, y)
            if session is None
            else (x[session.rank :: session.world], y[session.rank :: session.world])
        )

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            return loss

        optimizer.zero_grad()
        optimizer.step(closure)
    return [p.detach().clone() for p in net.parameters()]


def test_a_second_call_is_one_line_or_computed(pool: WorkerPool) -> None:
    """Where the closure runs before the step, a second call would have given no new gradients, in silence."""
    line = r"TwiceByFormula.step\(\) calls its closure several times, and here .* step='tensor'"
    with pytest.raises(JobFailedError, match=line):
        run_at(pool, "ring", train_twice, None)
    for unit in (None, "tensor"):
        assert all(map(torch.equal, alone(train_twice, unit), train_twice(None, None)))


@pytest.mark.parametrize("make", [lbfgs, sam])
def test_alone_it_is_plain_torch(make: Any) -> None:
    right, losses = train(None, make)
    found, shown = alone(train, make)
    assert all(map(torch.equal, found, right))
    assert shown == losses


def rates(session: atoll.Session, make: Any) -> list[float]:
    """Return the learning rate of each step; it falls from 1 by a tenth with each step's samples."""
    net = model()
    optimizer = make(net.parameters())
    session.prepare(net, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    session.schedule(scheduler, total=10 * 12, steps=10)
    seen = []
    for step in range(STEPS):
        x, y = (part[session.rank :: session.world] for part in batch(step))

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            session.weight(len(x))
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            return loss

        seen.append(optimizer.param_groups[0]["lr"] / optimizer.param_groups[0]["initial_lr"])
        optimizer.step(closure)  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize("make", [lbfgs, sam])
def test_a_step_counts_its_samples_once(pool: WorkerPool, make: Any) -> None:
    """However often it calls the closure: a schedule by samples would run ahead."""
    right = pytest.approx([1.0, 0.9, 0.8])
    assert alone(rates, make) == right
    for seen in run_at(pool, "ring", rates, make, world=WORLD):
        assert seen == right


def refused(session: atoll.Session) -> str:
    net = model()
    try:
        session.prepare(net, lbfgs(net.parameters()))
    except PrepareError as error:
        session._leaving.leave()
        return str(error)
    return ""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.soak) for kind in ELSEWHERE]
)
def test_elsewhere_it_is_one_line(pool: WorkerPool, kind: str) -> None:
    for said in run_at(pool, kind, refused, world=WORLD):
        assert said.startswith("optimizer LBFGS calls the script's closure several times in a step, and ")
        assert said.endswith("such as torch.optim.AdamW or SGD")
