"""An optimizer's own step may look at its state; several optimizers' states are read and changed together."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import atoll
from atoll.tensors.remotestate import RemoteState
from support.optimizers import Looking
from support.pool import WorkerPool
from support.runs import model, run_at

ELSEWHERE = ["server", "server tiers", "ps-hra", "peers", "peers tiers"]

pytestmark = pytest.mark.sampled


def step(net: nn.Module, optimizers: list[torch.optim.Optimizer], number: int) -> None:
    """A step on a batch that is the same on all workers."""
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    mse_loss(out := net(x), torch.ones_like(out)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def check(found: list[list[Tensor]], right: list[Tensor]) -> None:
    for worker in found:
        for mine, its in zip(worker, right, strict=True):
            assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12)


def look(session: atoll.Session | None, how: str) -> list[Tensor]:
    """Four steps, then the parameters and the states that they leave; no step brings a state here."""
    net = model()
    optimizer = Looking(net.parameters(), how=how)
    if session is not None:
        session.prepare(net, optimizer)
    with mock.patch.object(RemoteState, "_read", side_effect=AssertionError("a step has fetched a state")):
        for number in range(4):
            step(net, [optimizer], number)
    if session is not None:
        session.barrier()
    states = [optimizer.state[p]["buffer"].clone() for p in net.parameters()]
    return [*(p.detach().clone() for p in net.parameters()), *states]


@cache
def plain_look() -> list[Tensor]:
    return look(None, "")


@pytest.mark.parametrize("how", ["empty", "values", "replaced"])
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_a_step_that_looks_at_all_states_fetches_none(pool: WorkerPool, kind: str, how: str) -> None:
    check(run_at(pool, kind, look, how, optimizer="support.optimizers:Looking"), plain_look())


def halve(optimizer: torch.optim.Optimizer) -> None:
    """Replace the state by one in which each tensor is half as large."""
    halved: Any = {
        p: {key: value * 0.5 if value.ndim else value.clone() for key, value in state.items()}
        for p, state in optimizer.state.items()
    }
    optimizer.state = defaultdict(dict, halved)


def replace(session: atoll.Session | None, which: tuple[int, ...], loads: bool) -> list[Tensor]:
    """Two optimizers of one model, of which some are given another state after two steps."""
    net = model()
    parameters = list(net.parameters())
    both: list[torch.optim.Optimizer] = [
        torch.optim.Adam(each, lr=0.01) for each in (parameters[:6], parameters[6:])
    ]
    if session is not None:
        session.prepare(net, both)
    seen: list[Tensor] = []
    for number in range(4):
        step(net, both, number)
        if number == 1:
            for place in which:
                halve(both[place])
            if loads:
                both[0].load_state_dict(both[0].state_dict())
        seen += [p.detach().clone() for p in parameters]
    for optimizer in both:
        seen += [value.clone() for state in optimizer.state.values() for value in state.values()]
    return seen


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("kind", ["server", "server tiers", "ps-hra"])
def test_states_of_several_optimizers_that_are_replaced_count(
    pool: WorkerPool, kind: str, which: tuple[int, ...], loads: bool
) -> None:
    check(run_at(pool, kind, replace, which, loads), replace(None, which, loads))


def log_and_clear(session: atoll.Session) -> list[float]:
    """Worker 0 alone reads the second optimizer's state; then all clear the first one's."""
    net = model()
    parameters = list(net.parameters())
    both: list[torch.optim.Optimizer] = [
        torch.optim.Adam(each, lr=0.01) for each in (parameters[:6], parameters[6:])
    ]
    session.prepare(net, both)
    for number in range(2):
        step(net, both, number)
    if session.rank == 0:
        assert float(both[1].state[parameters[6]]["step"]) > 0
    session.barrier()
    both[0].state.clear()
    step(net, both, 2)
    session.barrier()
    return [float(both[0].state[parameters[0]]["step"]), float(both[1].state[parameters[6]]["step"])]


@pytest.mark.parametrize("kind", ["server", "asp", "ssp"])
def test_a_state_that_one_worker_has_read_is_no_change(pool: WorkerPool, kind: str) -> None:
    for first, second in run_at(pool, kind, log_and_clear):
        assert first < second


def look_twice(session: atoll.Session) -> list[int]:
    """Read all states, and take a state_dict, again and again without a step between."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # keeps no state
    session.prepare(net, optimizer)
    step(net, [optimizer], 0)
    found = [len(optimizer.state), len(optimizer.state_dict()["state"])]
    return [*found, len(optimizer.state), len(optimizer.state_dict()["state"])]


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_states_that_do_not_exist_are_read_again(pool: WorkerPool, kind: str) -> None:
    assert run_at(pool, kind, look_twice) == [[0, 0, 0, 0], [0, 0, 0, 0]]
