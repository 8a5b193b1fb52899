"""`sync.nonfinite = "skip"`, where one worker's gradient holds NaN: what is said is what happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.core.events import Skipped
from atoll.observe.progress import describe_event
from support.pool import WorkerPool
from support.runs import EVERYWHERE, TOGETHER, run_at

pytestmark = [pytest.mark.quick, pytest.mark.sampled]

BAD = 3  # the iteration, on worker 1


def train(session: atoll.Session) -> tuple[list[float], list[str]]:
    """By how much each iteration moved the parameters, and the lines on skipped iterations."""
    moved: list[float] = []
    said: list[Any] = []
    session._records._bus.subscribe(said.append)
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(6):
        session.barrier()
        before = model.weight.detach().clone()
        session.barrier()  # nobody steps before all have looked
        value = float("nan") if (step, session.rank) == (BAD, 1) else 1.0
        model(torch.full((2, 3), value)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.barrier()
        moved.append(float((model.weight.detach() - before).abs().max()))
    return moved, [describe_event(each) for each in said if isinstance(each, Skipped)]


@pytest.mark.parametrize("where", EVERYWHERE)
def test_what_is_said_of_a_skipped_iteration_is_what_happens(pool: WorkerPool, where: str) -> None:
    found = run_at(pool, where, train, sync={"nonfinite": "skip"})
    lines = {line for _, said in found for line in said}
    blamed = "the gradient of 'weight' on worker 1 holds NaN or infinity"
    if where == "tiers":
        blamed = "the gradient of 'weight', summed over the workers, holds NaN or infinity"
    skipped = f"iteration {BAD} was skipped on every worker: {blamed}"
    left_out = f"iteration {BAD}: the contribution of {{}} was left out, and the others' count: {blamed}"
    if where in TOGETHER:
        assert lines == {skipped}
    elif where == "ps-hra asp":  # the two may be a group by then, and there is no other
        assert lines in ({left_out.format("worker 1")}, {left_out.format("workers 0 and 1")})
    else:
        assert lines == {left_out.format("worker 1")}
    for moved, _ in found:
        assert all(each > 0 for step, each in enumerate(moved) if step != BAD), moved
        assert (moved[BAD] == 0) == (lines != {left_out.format("worker 1")}), moved
