"""A worker that gives its gradients an absurd weight, at every strategy: it is refused by name, and the model
of the others is unmoved by it. The same of NaN that a worker pushes without having looked.

What shards refuse, message by message: test_nonsense_at_shards.py.
"""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import atoll
from atoll.core.errors import AtollError, UserError
from atoll.core.events import Decided, Warned
from atoll.train.gradients import clipping
from support.pool import JobFailedError, WorkerPool
from support.runs import run_at

pytestmark = pytest.mark.quick

BAD = 3  # the iteration, on worker 1
LINE = "a weight of 1e+300, more than 1,000,000 times the median of 4"
USUAL = LINE.replace("1,000,000", "1,000")  # where what is usual is known


def train(session: atoll.Session, what: str = "weight") -> tuple[str, list[str], float]:
    """The error that ended it, the lines that were told, and by how much the parameters moved at most.

    Worker 1 does something absurd: its "weight", or "nan" in its gradients, for which it does not look.
    """
    told: list[Any] = []
    session._records._bus.subscribe(told.append)
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    error, moved = "", 0.0
    if what == "nan" and session.rank == 1:
        patch.object(clipping, "all_finite", lambda _gradients: True).start()
    try:
        session.prepare(model, optimizer)
        for step in range(8):
            before = model.weight.detach().clone()
            bad = (step, session.rank) == (BAD, 1)
            session.weight(1e300 if bad and what == "weight" else 4.0)
            far = 1e3 if what == "weight" else math.nan
            model(torch.full((2, 3), far if bad else 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            moved = float(torch.tensor([moved, *(model.weight.detach() - before).abs().view(-1)]).max())
    except AtollError as raised:
        error = str(raised)
        if not isinstance(raised, UserError) and session.rank == 1:
            raise
    finally:
        patch.stopall()
    lines = [
        f"{each.reason if isinstance(each, Decided) else each.message}"
        for each in told
        if isinstance(each, (Decided, Warned))
    ]
    return error, lines, moved


@pytest.mark.parametrize("where", ["ring", "hierarchical", "tiers", "peers"])
def test_an_absurd_weight_is_refused_by_name(pool: WorkerPool, where: str) -> None:
    found = run_at(pool, where, train)
    lines = [line for error, told, _ in found for line in (error, *told) if LINE in line]
    assert lines, found
    assert all("\n" not in line for line in lines)
    whose = "node 1's contribution" if "peers" in where else f"worker 1's gradients of iteration {BAD}"
    assert all(whose in line for line in lines), lines
    assert where == "peers" or len(lines) == 2  # a ring ends on every worker, for the same reason
    for _, _, moved in found:
        assert moved < 10, found


SERVED = ("server", "asp", "ssp", "ps-hra", "ps-hra asp")


def train_or_raise(session: atoll.Session, what: str) -> None:
    """A script that does not catch what it is refused."""
    error, _, moved = train(session, what)
    assert moved < 10, moved
    if error:
        raise UserError(error)


def refusals(pool: WorkerPool, where: str, what: str) -> dict[int, str]:
    """What each worker's script ended with, by rank; of those that did not end well."""
    with pytest.raises(JobFailedError) as raised:
        run_at(pool, where, train_or_raise, what)
    return {rank: failure.message for rank, failure in raised.value.failures.items()}


@pytest.mark.parametrize("where", SERVED)
def test_shards_refuse_an_absurd_weight_by_name(pool: WorkerPool, where: str) -> None:
    ended = refusals(pool, where, "weight")
    if "ps-hra" in where:  # a group adds its members' weights up, in float32
        assert "worker 1 commits with weight inf, which is no number" in ended[1], ended
    else:
        assert LINE in ended[1] or USUAL in ended[1], ended
        assert f"worker 1's gradients of iteration {BAD}" in ended[1]
    assert "\n" not in ended[1]
    assert len(ended) == 1, ended  # the other one goes on


@pytest.mark.parametrize("where", ["asp", "ssp"])
def test_shards_refuse_nan_by_its_sender(pool: WorkerPool, where: str) -> None:
    ended = refusals(pool, where, "nan")
    assert f"worker 1 pushed a gradient of 'weight' with NaN or infinity, in iteration {BAD}" in ended[1]
    assert len(ended) == 1, ended
