"""Optimizers that hooks step within backward: their steps are made at its end, with the mean."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

import atoll
from atoll.core.errors import UserError
from support.pool import JobFailedError, WorkerPool
from support.runs import KINDS, alone, model, run_at

pytestmark = pytest.mark.sampled

WORLD, STEPS = 2, 5
HERE = tuple(kind for kind in KINDS if not kind.startswith("peers") and kind != "asp")
CASES = (
    "plain", "scheduled", "zeros", "every other time", "by layer", "unused", "unused at once",
    "scheduled apart", "checkpointed", "accumulated",
)  # fmt: skip


class Hooks:
    """Steps each parameter, or layer, as its gradients come, by an optimizer of its own."""

    def __init__(self, net: nn.Sequential, case: str) -> None:
        layers = [layer for layer in net if isinstance(layer, nn.Linear)]
        parts = [list(each.parameters()) for each in layers] if case == "by layer" else None
        self._case, self.step, self.is_on = case, 0, True
        self.optimizers: list[Optimizer] = []
        self._of: dict[Tensor, int] = {}
        self._came: dict[int, int] = {}
        for place, part in enumerate(parts or [[each] for each in net.parameters()]):
            self._of |= dict.fromkeys(part, place)
            kind = AdamW(part, lr=0.01) if place % 2 else SGD(part, lr=0.1, momentum=0.9)
            self.optimizers.append(kind)
        self._scheduled = [StepLR(each, 2, gamma=0.5) for each in self.optimizers]

    def register(self) -> None:
        for parameter in self._of:
            parameter.register_post_accumulate_grad_hook(self.came)  # type: ignore[attr-defined]

    def came(self, parameter: Tensor) -> None:
        if not self.is_on:
            return
        place = self._of[parameter]
        optimizer = self.optimizers[place]
        self._came[place] = self._came.get(place, 0) + 1
        if self._came[place] % len(optimizer.param_groups[0]["params"]):
            return
        if self._case == "every other time" and (place + self.step) % 2:
            return
        self.act(place)

    def act(self, place: int) -> None:
        optimizer = self.optimizers[place]
        optimizer.step()
        optimizer.zero_grad(set_to_none=self._case != "zeros")
        if self._case == "scheduled":
            self._scheduled[place].step()

    def end_step(self) -> None:
        for each in self._scheduled if self._case == "scheduled apart" else ():
            each.step()

    def due(self) -> list[int]:
        """The optimizers that the hooks of all workers together step in this backward."""
        places = range(len(self.optimizers))
        return [p for p in places if self._case != "every other time" or (p + self.step) % 2 == 0]


def backward(net: nn.Sequential, case: str, rank: int, step: int, micro: int = 0) -> None:
    seed = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x = torch.randn(4, 32, dtype=torch.float64, generator=seed)
    skipped: tuple[int, ...] = ()  # a linear layer and what follows it
    if case == "unused at once":  # each worker leaves out another one, from the first step on
        skipped = (2, 3) if (rank + step) % 2 else (4, 5)
    elif case in ("unused", "scheduled apart") and rank == 1 and step % 2:
        skipped = (2, 3)
    layers = [layer for index, layer in enumerate(net) if index not in skipped]
    if case == "checkpointed":
        x.requires_grad_()
        x = checkpoint(nn.Sequential(*layers[2:6]), nn.Sequential(*layers[:2])(x), use_reentrant=True)
        layers = layers[6:]
    for layer in layers:
        x = layer(x)
    x.square().mean().backward()  # type: ignore[no-untyped-call]


def train(session: atoll.Session, case: str, before: bool) -> list[list[Tensor]]:
    net = model()
    hooks = Hooks(net, case)
    if before:
        hooks.register()
    session.prepare(net, hooks.optimizers)
    if not before:
        hooks.register()
    seen = []
    for step in range(STEPS):
        hooks.step = step
        for micro in range(2 if case == "accumulated" else 1):
            is_last = micro == (case == "accumulated")
            hooks.is_on = is_last
            with nullcontext() if is_last else session.no_sync():
                backward(net, case, session.rank, step, micro)
        hooks.end_step()
        seen.append([each.detach().clone() for each in net.parameters()])
    return seen


@functools.cache
def expected(case: str, world: int) -> list[list[Tensor]]:
    """The mean of the workers' gradients, and then each optimizer's step."""
    nets = [model() for _ in range(world)]
    hooks = Hooks(nets[0], case)
    seen = []
    for step in range(STEPS):
        hooks.step = step
        own: list[list[Tensor | None]] = []
        for rank, net in enumerate(nets):
            net.load_state_dict(nets[0].state_dict())
            kept = [p.grad for p in net.parameters()]
            net.zero_grad()
            for micro in range(2 if case == "accumulated" else 1):
                backward(net, case, rank, step, micro)
            own.append([p.grad for p in net.parameters()])
            for parameter, gradient in zip(net.parameters(), kept, strict=True):
                parameter.grad = gradient
        for parameter, parts in zip(nets[0].parameters(), zip(*own, strict=True), strict=True):
            there = [each for each in parts if each is not None]
            if there:
                mean = torch.stack(there).sum(0) / world
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        for place in hooks.due():
            hooks.act(place)
        hooks.end_step()
        seen.append([each.detach().clone() for each in nets[0].parameters()])
    return seen


def cells() -> list[Any]:
    """All cases at all kinds, of which `make test` takes a few."""
    quick = {("plain", "ring"), ("scheduled", "tiers"), ("unused", "server"), ("by layer", "hierarchical")}
    quick |= {("unused at once", "ring"), ("checkpointed", "ring")}
    return [
        pytest.param(case, kind, marks=() if (case, kind) in quick else pytest.mark.soak)
        for case in CASES
        for kind in HERE
    ]


@pytest.mark.parametrize(("case", "kind"), cells())
def test_each_step_is_made_with_the_mean(pool: WorkerPool, case: str, kind: str) -> None:
    before = (CASES.index(case) + HERE.index(kind)) % 2 == 0
    for found in run_at(pool, kind, train, case, before, world=WORLD):
        for here, there in zip(found, expected(case, WORLD), strict=True):
            check_equal(here, there)


@pytest.mark.parametrize("tiers", [False, True])
def test_alone_each_step_is_made_once(tiers: bool) -> None:
    for case in CASES:
        found = alone(train, case, tiers, tiers=tiers)
        for here, there in zip(found, expected(case, 1), strict=True):
            check_equal(here, there)


def test_asp_makes_each_step(pool: WorkerPool) -> None:
    (found,) = run_at(pool, "asp", train, "scheduled", True, world=1)
    check_equal(found[-1], expected("scheduled", 1)[-1])


def hooked(session: atoll.Session, then: Callable[[Optimizer, Tensor], None], **how: Any) -> nn.Sequential:
    """A model whose hooks step each parameter by an optimizer of its own, and then do more."""
    net = model()
    each = {p: SGD([p], lr=0.1) for p in net.parameters()}
    session.prepare(net, list(each.values()))

    def step(parameter: Tensor) -> None:
        each[parameter].step(**how)  # type: ignore[index]
        then(each[parameter], parameter)  # type: ignore[index]

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return net


def drop(_: Optimizer, parameter: Tensor) -> None:
    parameter.grad = None


def zero(_: Optimizer, parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


def clamp(_: Optimizer, parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.clamp_(-0.1, 0.1)


def again(optimizer: Optimizer, _: Tensor) -> None:
    optimizer.step()


def nothing(_: Optimizer, __: Tensor) -> None: ...


def dropped(session: atoll.Session) -> None:
    backward(hooked(session, drop), "plain", session.rank, 0)


def zeroed(session: atoll.Session) -> None:
    backward(hooked(session, zero), "plain", session.rank, 0)


def written(session: atoll.Session) -> None:
    backward(hooked(session, clamp), "plain", session.rank, 0)


def twice(session: atoll.Session) -> None:
    backward(hooked(session, again), "plain", session.rank, 0)


def under_no_sync(session: atoll.Session) -> None:
    net = hooked(session, nothing)
    with session.no_sync():
        backward(net, "plain", session.rank, 0)


def of_one(session: atoll.Session) -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    net[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    backward(net, "plain", session.rank, 0)


def scaled(session: atoll.Session) -> None:
    net, scaler = model(), torch.amp.GradScaler("cpu")
    each = {p: SGD([p], lr=0.1) for p in net.parameters()}
    session.prepare(net, list(each.values()))
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: scaler.step(each[p]))
    scaler.scale(net(torch.ones(4, 32, dtype=torch.float64)).square().mean()).backward()


def on_one_worker(session: atoll.Session) -> None:
    """Worker 1's hooks leave a parameter out that has a gradient."""
    net = model()
    each = {p: SGD([p], lr=0.1) for p in net.parameters()}
    session.prepare(net, list(each.values()))
    left_out = net[2].weight if session.rank == 1 else None
    for parameter in net.parameters():
        if parameter is not left_out:
            parameter.register_post_accumulate_grad_hook(lambda p: each[p].step())
    for step in range(2):
        backward(net, "plain", session.rank, step)


WAITS = r"which waits for the mean at the end of backward; "
IN_PIECE = "SGD.step() was called inside a piece of session.pieces"


def in_a_piece(session: atoll.Session) -> None:
    net = model()
    each = {p: SGD([p], lr=0.1) for p in net.parameters()}
    session.prepare(net, list(each.values()))
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: each[p].step())
    for piece in session.pieces(torch.ones(4, 32, dtype=torch.float64)):
        with piece as x:
            net(x).square().mean().backward()


ZERO = WAITS + r"call the optimizer's zero_grad\(\) there in its place"
REFUSALS: dict[str, tuple[Callable[[atoll.Session], None], str, str]] = {
    "dropped": (
        dropped,
        "UserError",
        r"10\.(bias|weight)\.grad was set to None within backward after SGD\.step\(\), " + ZERO,
    ),
    "zeroed": (
        zeroed,
        "UserError",
        r"10\.(bias|weight)\.grad was written into within backward after SGD\.step\(\), " + ZERO,
    ),
    "written": (
        written,
        "UserError",
        r"parameter '10\.(bias|weight)' was written into within backward after SGD\.step\(\), "
        + WAITS
        + "do it after backward",
    ),
    "twice": (
        twice,
        "UserError",
        r"SGD\.step\(\) was called twice within one backward, at whose end it is made once; give each "
        r"parameter an optimizer of its own, or call step\(\) when the last gradient has come",
    ),
    "under no_sync": (
        under_no_sync,
        "UserError",
        r"SGD\.step\(\) was called within a backward under session\.no_sync\(\), which leaves the mean to a "
        r"later backward; let the hook step in the last backward alone, which is outside no_sync",
    ),
    "of one": (
        of_one,
        "PrepareError",
        r"SGD\.step\(\) was called within backward, when the mean over the workers is not there yet; call it "
        r"after backward, or step each parameter by an optimizer of its own \(docs/from-ddp\.md\)",
    ),
    "scaled": (
        scaled,
        "PrepareError",
        r"GradScaler\.unscale_ of SGD was called within backward, when the mean over the workers is not "
        r"there yet; call it after backward",
    ),
    "in a piece": (in_a_piece, "UserError", re.escape(IN_PIECE)),
    "on one worker": (
        on_one_worker,
        "UserError",
        r"iteration 0: worker 0 stepped or clipped 11 times after that and made the steps of optimizers .*, "
        r"and worker 1 stepped or clipped 10 times after that and made the steps of optimizers",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_wait_is_refused(pool: WorkerPool, name: str) -> None:
    script, error, line = REFUSALS[name]
    with pytest.raises(JobFailedError, match=line) as caught:
        run_at(pool, "ring", script, world=WORLD, sync={"memory_cap": 2, "global_batch": 8})
    assert error in str(caught.value)


@pytest.mark.parametrize("name", ["dropped", "zeroed", "written"])
def test_it_is_refused_in_tiers_too(name: str) -> None:
    script, _, line = REFUSALS[name]
    with pytest.raises(UserError, match=line):
        alone(script, tiers=True)


class StopError(Exception):
    """Raised by a script's hook."""


def after_an_error(session: atoll.Session) -> list[Tensor]:
    """The first backward raises after a few steps were called in it, and comes again."""
    net = model()
    hooks = Hooks(net, "plain")
    session.prepare(net, hooks.optimizers)
    hooks.register()

    def stop(_: Any) -> None:
        raise StopError

    last = net[4].weight.register_post_accumulate_grad_hook(stop)
    with pytest.raises(StopError):
        backward(net, "plain", 0, 0)
    last.remove()
    net.zero_grad()
    for step in range(STEPS):
        backward(net, "plain", 0, step)
    return [each.detach().clone() for each in net.parameters()]


def test_steps_of_a_backward_that_raised_are_forgotten() -> None:
    check_equal(alone(after_an_error, tiers=True), expected("plain", 1)[-1])


def given_back(session: atoll.Session) -> tuple[nn.Module, list[Optimizer]]:
    net = model()
    hooks = Hooks(net, "plain")
    session.prepare(net, hooks.optimizers)
    return net, hooks.optimizers


def test_after_the_session_the_optimizers_methods_are_their_classes() -> None:
    net, optimizers = alone(given_back)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    for each in optimizers:
        each.step()
        each.zero_grad()
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all("zero_grad" not in vars(each) for each in optimizers)
