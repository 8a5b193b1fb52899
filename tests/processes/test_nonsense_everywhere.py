"""A worker that gives its gradients an absurd weight, where no shard looks at it: it is refused by name.

What shards refuse: test_nonsense_at_shards.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.core.errors import AtollError, UserError
from atoll.core.events import Decided, Warned
from atoll.testing.pool import WorkerPool
from atoll.testing.runs import run_at

pytestmark = pytest.mark.quick

BAD = 3  # the iteration, on worker 1
LINE = "a weight of 1e+300, more than 1,000,000 times the median of 4"


def train(session: atoll.Session) -> tuple[str, list[str], float]:
    """The error that ended it, the lines that were told, and by how much the parameters moved at most."""
    told: list[Any] = []
    session._records._bus.subscribe(told.append)
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    error, moved = "", 0.0
    try:
        session.prepare(model, optimizer)
        for step in range(8):
            before = model.weight.detach().clone()
            bad = (step, session.rank) == (BAD, 1)
            session.weight(1e300 if bad else 4.0)
            model(torch.full((2, 3), 1e3 if bad else 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            moved = max(moved, float((model.weight.detach() - before).abs().max()))
    except AtollError as raised:
        error = str(raised)
        if not isinstance(raised, UserError) and session.rank == 1:
            raise
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
