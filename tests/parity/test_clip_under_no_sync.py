"""torch's clip_grad_norm_ before the reduction clips each worker's own gradients, and is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import atoll
from support.pool import WorkerPool
from support.runs import KINDS, alone, model, run_at

NAMED = "# named"
LINES = Path(__file__).read_text().splitlines()
CLIPS = 1 + next(number for number, line in enumerate(LINES) if line.endswith(f"  {NAMED}"))
QUICK = ("ring", "server tiers")


def backward(net: nn.Module) -> None:
    net(torch.randn(4, 32, dtype=torch.float64)).square().mean().backward()


def train(session: atoll.Session) -> list[list[str]]:
    """What the user is told in two iterations that zero gradients between backwards, in one that changes a
    single gradient, and in two that clip."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    told: list[list[str]] = []

    def iteration() -> None:
        told.append([])
        session._records.warn = told[-1].append  # type: ignore[method-assign]

    for set_to_none in (True, False):
        iteration()
        with session.no_sync():
            backward(net)
        net.zero_grad(set_to_none)
        with session.no_sync():
            backward(net)
            backward(net)
        backward(net)
        optimizer.step()
        optimizer.zero_grad()
    iteration()
    with session.no_sync():
        backward(net)
    assert net[0].weight.grad is not None
    net[0].weight.grad.mul_(2)
    backward(net)
    session.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(2):
        iteration()
        with session.no_sync():
            backward(net)
            clip_grad_norm_(net.parameters(), 0.01)  # named
            backward(net)
        backward(net)
        optimizer.step()
        optimizer.zero_grad()
    return told


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.soak) for kind in KINDS]
)
def test_it_is_said_once_with_the_way_out(pool: WorkerPool, kind: str) -> None:
    for told in run_at(pool, kind, train, world=2):
        *before, (line,), after = told
        assert before == [[], [], []]
        assert after == []
        assert line.startswith(
            "all gradients were changed between a backward under no_sync and test_clip_under_no_sync.py:"
        )
        assert f"by torch.nn.utils.clip_grad_norm_ (test_clip_under_no_sync.py:{CLIPS})" in line
        assert line.endswith("call session.clip_grad_norm_ after the last backward, which is outside no_sync")


def test_alone_it_is_as_in_plain_torch() -> None:
    assert alone(train) == [[]] * 5
