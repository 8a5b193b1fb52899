"""Optimizers of the script's own, in chunks: alone over tiers, and in a session's."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_optimizer
import pytest
import torch
from torch import nn

import atoll
from atoll.core.config import Config
from atoll.core.errors import PrepareError
from support import runs
from support.pool import WorkerPool, ring_of_one

LAYERS, WIDTH, STEPS = 6, 64, 5
RIGHT = [own_optimizer.RenewedMomentum, own_optimizer.TwoInTurn, own_optimizer.DecaysGradients]


class Twins:
    """A model and its optimizer, and a plain twin of both."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.model = copy.deepcopy(self.plain)
        self.plain_optimizer, self.optimizer = make(self.plain.parameters()), make(self.model.parameters())

    def train(self, *, keep_gradients: bool = False) -> None:
        for number in range(STEPS):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            for model, optimizer in ((self.plain, self.plain_optimizer), (self.model, self.optimizer)):
                model(x).square().mean().backward()
                optimizer.step()
                if not keep_gradients:
                    optimizer.zero_grad()

    def assert_equal(self) -> None:
        for (name, a), b in zip(self.plain.named_parameters(), self.model.parameters(), strict=True):
            assert torch.equal(a, b), name
        left, right = self.plain_optimizer.state_dict()["state"], self.optimizer.state_dict()["state"]
        for index, state in left.items():
            for key, value in state.items():
                assert torch.equal(value, right[index][key]), (index, key)


@pytest.mark.parametrize("keep_gradients", [False, True], ids=["cleared", "kept"])
@pytest.mark.parametrize("make", RIGHT)
def test_over_tiers(make: type[torch.optim.Optimizer], keep_gradients: bool, tmp_path: Path) -> None:
    twins = Twins(make)
    memory = atoll.Memory(device="48KiB", host="160KiB", disk=f"{tmp_path}:16MiB")
    with atoll.memory.fit(twins.model, twins.optimizer, memory=memory):
        twins.train(keep_gradients=keep_gradients)
    twins.assert_equal()


@pytest.mark.parametrize("make", RIGHT)
def test_in_a_ring(make: type[torch.optim.Optimizer]) -> None:
    twins = Twins(make)
    with atoll.join(Config(), place=ring_of_one()) as session:
        session.prepare(twins.model, twins.optimizer)
        twins.train()
        twins.assert_equal()


def test_one_that_gives_parameters_other_memory_is_refused_in_a_line() -> None:
    twins = Twins(own_optimizer.ReplacesData)
    said = "it sets p.data to another tensor; let it write into p, as p.sub_\\(\\) does"
    with pytest.raises(PrepareError, match=said):
        atoll.memory.fit(twins.model, twins.optimizer, memory=atoll.Memory(device="48KiB", step="host"))
    with atoll.join(Config(), place=ring_of_one()) as session, pytest.raises(PrepareError, match=said):
        session.prepare(twins.model, twins.optimizer)


def of_the_script(session: atoll.Session) -> tuple[str, float]:
    """Prepare an optimizer whose class is in the script itself; return the error, and its seconds."""

    class Lion(torch.optim.SGD):
        pass

    Lion.__module__, Lion.__qualname__ = "__main__", "Lion"
    net = runs.model()
    began = time.monotonic()
    with pytest.raises(PrepareError) as caught:
        session.prepare(net, Lion(net.parameters(), lr=0.1))
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("kind", ["server", "asp", "ps-hra", "peers"])
def test_a_class_that_no_other_process_can_import_is_refused_in_prepare(pool: WorkerPool, kind: str) -> None:
    for said, seconds in runs.run_at(pool, kind, of_the_script):
        assert "which cannot import Lion: it is defined in the script itself; put it into a module" in said
        assert seconds < 30  # nobody waits for another worker, or for a shard


def by_its_base(session: atoll.Session | None) -> list[torch.Tensor]:
    """Train with an optimizer whose step calls that of its base, where torch runs the hooks of both."""
    net = runs.model()
    torch.optim.SGD(net.parameters())
    optimizer = own_optimizer.ByItsBase(net.parameters(), lr=0.1, momentum=0.9)
    rank, world = 0, 1
    if session is not None:
        session.prepare(net, optimizer)
        rank, world = session.rank, session.world
    for step in range(STEPS):
        x = torch.randn(8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        net(x[rank::world]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert session is None or session.iteration == STEPS
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("kind", ["ring", "tiers", "peers"])
def test_a_step_that_calls_the_one_of_its_base_is_one_step(pool: WorkerPool, kind: str) -> None:
    right = by_its_base(None)
    for found in runs.run_at(pool, kind, by_its_base):
        for value, expected in zip(found, right, strict=True):
            assert torch.allclose(value, expected, rtol=0, atol=1e-12)
