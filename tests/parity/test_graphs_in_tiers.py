"""Gradients that carry a graph (`backward(create_graph=True)`) under budgets of memory: each step against
plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import atoll
from atoll.memory.saved import hooks_are_active
from support.pool import WorkerPool
from support.runs import alone, model, run_at

pytestmark = [pytest.mark.usefixtures("poisoned"), pytest.mark.sampled]

STEPS, SAMPLES, WORLD = 3, 4, 2
TOLERANCE = 1e-12
Seen = list[list[Tensor]]


class Loop:
    """A script's model and optimizer, and its share of each batch."""

    def __init__(self, session: atoll.Session | None) -> None:
        self.session = session
        self.net = model()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.share = slice(None)
        if session is not None:
            session.prepare(self.net, self.optimizer)
            self.share = slice(session.rank, None, session.world)

    def loss(self, step: int, micro: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(2 * step + micro)
        x = torch.randn(SAMPLES * WORLD, 32, generator=generator, dtype=torch.float64)
        found: Tensor = self.net(x[self.share]).square().mean()
        return found

    def no_sync(self) -> object:
        return nullcontext() if self.session is None else self.session.no_sync()

    def clip(self, most: float) -> Tensor:
        if self.session is None:
            return torch.nn.utils.clip_grad_norm_(self.net.parameters(), most)
        return self.session.clip_grad_norm_(most)

    def gradients(self) -> Iterator[Tensor]:
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            yield parameter.grad

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.net.parameters()]


Body = Callable[[Loop, int], list[Tensor]]


def penalty_of(loop: Loop) -> Tensor:
    assert all(gradient.requires_grad for gradient in loop.gradients())
    return torch.stack([gradient.square().sum() for gradient in loop.gradients()]).sum()


def shown(loop: Loop) -> list[Tensor]:
    return [gradient.detach().clone() for gradient in loop.gradients()]


def step_of(loop: Loop, step: int) -> list[Tensor]:
    """The optimizer steps gradients that carry a graph."""
    loop.loss(step).backward(create_graph=True)
    found = shown(loop)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return found


def penalty(loop: Loop, step: int) -> list[Tensor]:
    """A penalty on the norm, of gradients that are zeroed before its backward."""
    loss = loop.loss(step)
    loss.backward(create_graph=True)
    total = loss + 0.1 * penalty_of(loop)
    loop.optimizer.zero_grad()
    total.backward()
    found = [*shown(loop), loop.clip(0.5)]
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return found


def added(loop: Loop, step: int) -> list[Tensor]:
    """A penalty whose gradient adds to the gradient that it is on."""
    loop.loss(step).backward(create_graph=True)
    (0.1 * penalty_of(loop)).backward()
    found = shown(loop)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return found


def kept(loop: Loop, step: int) -> list[Tensor]:
    """A penalty on gradients that the script has read before, clipped, and written to."""
    loop.loss(step).backward(create_graph=True)
    before = list(loop.gradients())
    loop.clip(0.5)
    with torch.no_grad():
        for gradient in loop.gradients():
            gradient.mul_(1.5)
    found = [each.detach().clone() for each in before] + shown(loop)
    total = penalty_of(loop)
    loop.optimizer.zero_grad()
    total.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    return found


def zeroed(loop: Loop, step: int) -> list[Tensor]:
    """Gradients with a graph are zeroed in place, and come again."""
    loop.loss(step).backward(create_graph=True)
    loop.optimizer.zero_grad(set_to_none=False)
    loop.loss(step, 1).backward(create_graph=step % 2 == 0)
    found = shown(loop)
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    return found


def summed(loop: Loop, step: int) -> list[Tensor]:
    """A penalty on the sum of the gradients of two backwards, each with its graph."""
    with loop.no_sync():
        loop.loss(step).backward(create_graph=True)
    loop.loss(step, 1).backward(create_graph=True)
    found = shown(loop)
    total = penalty_of(loop)
    loop.optimizer.zero_grad()
    total.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return [*found]


def one_by_one(loop: Loop, step: int) -> list[Tensor]:
    """Two backwards that are each reduced; the second alone, or the first alone, leaves a graph."""
    loop.loss(step).backward(create_graph=step % 2 == 0)
    first = list(loop.gradients())
    loop.loss(step, 1).backward(create_graph=True)
    del first
    found = shown(loop)
    total = penalty_of(loop)
    loop.optimizer.zero_grad()
    total.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return found


def product(loop: Loop, step: int) -> list[Tensor]:
    """A Hessian-vector product of the mean gradient, by this worker's part of it."""
    loop.loss(step).backward(create_graph=True)
    vectors = [torch.ones_like(parameter) for parameter in loop.net.parameters()]
    inner = torch.stack([(g * v).sum() for g, v in zip(loop.gradients(), vectors, strict=True)]).sum()
    products = torch.autograd.grad(inner, list(loop.net.parameters()))
    with torch.no_grad():
        for gradient, part in zip(loop.gradients(), products, strict=True):
            own = part if loop.session is None else loop.session.reduce(part)
            gradient.add_(own, alpha=0.1)
    found = shown(loop)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return found


def trained(session: atoll.Session | None, body: Body) -> Seen:
    loop = Loop(session)
    seen = []
    for step in range(STEPS):
        seen.append(body(loop, step))
        assert not hooks_are_active()
        seen[-1] += loop.values()
    if session is not None:
        session.barrier()
    return seen


def check(found: Seen, right: Seen) -> None:
    for step, (ours, theirs) in enumerate(zip(found, right, strict=True)):
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            off = float((a - b).abs().max())
            assert off <= TOLERANCE, f"step {step}, tensor {number}: {off:.3g}"


BODIES = [step_of, penalty, added, kept, zeroed, summed, one_by_one, product]


@pytest.mark.parametrize("body", BODIES)
def test_alone(body: Body) -> None:
    check(alone(trained, body, tiers=True), trained(None, body))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", ["tiers", "server tiers", "ring"])
def test_at_a_strategy(pool: WorkerPool, kind: str, body: Body) -> None:
    right = trained(None, body)
    found = run_at(pool, kind, trained, body, world=WORLD)
    for each in found:
        check(each, right)
    for one, other in zip(found[0], found[1], strict=True):  # no worker rounds by itself
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("body", [step_of, penalty])
def test_peers(pool: WorkerPool, body: Body) -> None:
    right = trained(None, body)
    for found in run_at(pool, "peers tiers", trained, body, world=1):
        check(found, right)


# A graph that is too old


def too_late(session: atoll.Session | None) -> None:
    loop = Loop(session)
    loop.loss(0).backward(create_graph=True)
    total = penalty_of(loop)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("tiers", [False, True])
def test_a_graph_does_not_outlive_the_step(tiers: bool) -> None:
    too_late(None)
    alone(too_late, tiers=tiers)


def assigned(session: atoll.Session | None) -> Seen:
    """A gradient that the script has made itself, with its graph."""
    loop = Loop(session)
    seen: Seen = []
    for step in range(STEPS):
        slopes = torch.autograd.grad(loop.loss(step), list(loop.net.parameters()), create_graph=True)
        for parameter, slope in zip(loop.net.parameters(), slopes, strict=True):
            parameter.grad = slope
        total = penalty_of(loop)
        loop.optimizer.zero_grad()
        total.backward()
        seen.append(shown(loop))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        seen[-1] += loop.values()
    return seen


def test_a_gradient_that_is_assigned() -> None:
    check(alone(assigned, tiers=True), assigned(None))
