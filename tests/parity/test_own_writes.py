"""Values that a script writes into parameters between steps, as Wasserstein GANs clamp them and Lookahead
moves them: where all workers make each step together, the values count, at shards too."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import atoll
from support.pool import JobFailedError, WorkerPool
from support.runs import model, run_at

pytestmark = pytest.mark.sampled

WORLD, STEPS = 2, 6
KINDS = ("ring", "server", "ps-hra", "server tiers")


def clamp(net: nn.Module, _slow: list[Tensor], _step: int) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.clamp_(-0.1, 0.1)


def clamp_data(net: nn.Module, _slow: list[Tensor], _step: int) -> None:
    for parameter in net.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def clamp_one(net: nn.Module, _slow: list[Tensor], _step: int) -> None:
    with torch.no_grad():
        next(net.parameters()).clamp_(-0.05, 0.05)


def look_ahead(net: nn.Module, slow: list[Tensor], step: int) -> None:
    if step % 3 == 2:
        with torch.no_grad():
            for parameter, old in zip(net.parameters(), slow, strict=True):
                old.lerp_(parameter, 0.5)
                parameter.copy_(old)


def assign(net: nn.Module, _slow: list[Tensor], _step: int) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data * 0.99


WRITES: dict[str, Callable[[nn.Module, list[Tensor], int], None]] = {
    "clamped": clamp,
    "clamped by data": clamp_data,
    "one clamped": clamp_one,
    "Lookahead": look_ahead,
    "assigned": assign,
}


def make() -> tuple[nn.Module, list[Optimizer]]:
    net = model()
    parameters = list(net.parameters())
    return net, [SGD(parameters[:4], lr=0.1, momentum=0.9), SGD(parameters[4:], lr=0.1, momentum=0.9)]


def batch(rank: int, step: int) -> Tensor:
    made = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 32, dtype=torch.float64, generator=made)


def loop(
    net: nn.Module, optimizers: list[Optimizer], writes: str, before: bool, ranks: list[int]
) -> list[list[Tensor]]:
    """Train, and write after each step, or `before` it, between backward and step."""
    slow, seen = [p.detach().clone() for p in net.parameters()], []
    for step in range(STEPS):
        for rank in ranks:
            (net(batch(rank, step)).square().mean() / len(ranks)).backward()
        if before:
            WRITES[writes](net, slow, step)
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()
        if not before:
            WRITES[writes](net, slow, step)
        seen.append([p.detach().clone() for p in net.parameters()])
    return seen


def train(session: atoll.Session, writes: str, before: bool, several: bool) -> list[list[Tensor]]:
    net, optimizers = make()
    if not several:
        optimizers = [SGD(net.parameters(), lr=0.1, momentum=0.9)]
    session.prepare(net, optimizers)
    return loop(net, optimizers, writes, before, [session.rank])


@functools.cache
def plain(writes: str, before: bool) -> list[list[Tensor]]:
    net, optimizers = make()
    return loop(net, optimizers, writes, before, list(range(WORLD)))


def check(found: list[list[Tensor]], right: list[list[Tensor]]) -> None:
    assert len(found) == len(right)
    for mine, plainly in zip(found, right, strict=True):
        check_equal(mine, plainly)


@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_written_after_a_step_count(pool: WorkerPool, kind: str, writes: str) -> None:
    for found in run_at(pool, kind, train, writes, False, False, world=WORLD):
        check(found, plain(writes, False))


@pytest.mark.parametrize("writes", ["clamped by data", "assigned"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_written_before_a_step_count(pool: WorkerPool, kind: str, writes: str) -> None:
    for found in run_at(pool, kind, train, writes, True, False, world=WORLD):
        check(found, plain(writes, True))


@pytest.mark.parametrize("kind", KINDS[:3])  # under budgets one optimizer steps a model
def test_with_several_optimizers_too(pool: WorkerPool, kind: str) -> None:
    for found in run_at(pool, kind, train, "clamped", False, True, world=WORLD):
        check(found, plain("clamped", False))


def unlike(session: atoll.Session) -> Any:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    for step in range(2):
        net(batch(session.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if session.rank == 0:
            clamp(net, [], step)


def test_values_written_on_one_worker_alone_are_a_line(pool: WorkerPool) -> None:
    line = "they have written different values into parameters, or one of them has written none: write equal"
    with pytest.raises(JobFailedError, match=re.escape(line)):
        run_at(pool, "server", unlike, world=WORLD)


def draws(session: atoll.Session, then: str, where: str, folder: Path) -> tuple[list[str], list[Tensor]]:
    """Draw a layer's values anew after `prepare`, do `then`, and come to the call `where`; return the lines
    told and the values."""
    net, said = model(), list[str]()
    optimizer = SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    session._records.warn = said.append  # type: ignore[method-assign]
    torch.manual_seed(0 if then == "alike" else session.rank)
    layer = next(each for each in net.modules() if isinstance(each, nn.Linear))
    layer.reset_parameters()
    if then == "prepares":
        session.prepare(net, optimizer)
    calls = {"barrier": session.barrier, "save": partial(session.save, folder), "end": session.close}
    calls[where]()
    return said, [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("where", ["barrier", "save", "end"])
@pytest.mark.parametrize("kind", ["ring", "hierarchical"])
def test_copies_that_differ_are_told_once(pool: WorkerPool, kind: str, where: str, tmp_path: Path) -> None:
    line = "the workers hold different values of parameter '[^']+' and 1 more: after session.prepare the"
    (first, _), (second, _) = run_at(pool, kind, draws, "goes on", where, tmp_path / "saved", world=WORLD)
    assert len(first) == 1
    assert re.match(line, first[0])
    assert not second


@pytest.mark.parametrize("then", ["alike", "prepares"])
def test_equal_copies_are_no_line(pool: WorkerPool, then: str, tmp_path: Path) -> None:
    (said, values), (also_said, others) = run_at(pool, "ring", draws, then, "barrier", tmp_path, world=WORLD)
    assert not said + also_said
    check_equal(values, others)
