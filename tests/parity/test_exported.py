"""A trained model is exported: the program gives what the model gives, and training goes on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import atoll
from support.pool import WorkerPool
from support.runs import model, run_at

pytestmark = pytest.mark.sampled


def train_and_export(session: atoll.Session, strict: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Export between two steps; returns the program's output, the model's, and the values at the end."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    x = torch.linspace(-1, 1, 6 * 32, dtype=torch.float64).view(6, 32)
    found = own = torch.empty(0)
    for step in range(2):
        net(x[session.rank :: 2]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            session.barrier()
            program = torch.export.export(net, (x,), strict=strict).module()
            with torch.no_grad():
                found, own = program(x), net(x)
    session.barrier()
    return found, own, [parameter.detach().clone() for parameter in net.parameters()]


TRIED = [(kind, strict) for kind in ("ring", "hierarchical", "server", "peers") for strict in (False, True)]


@pytest.mark.parametrize(("kind", "strict"), [*TRIED, ("tiers", False)])
def test_an_exported_program_gives_what_the_model_gives(pool: WorkerPool, kind: str, strict: bool) -> None:
    first, second = run_at(pool, kind, train_and_export, strict)
    for found, own, values in (first, second):
        torch.testing.assert_close(found, own, rtol=0, atol=1e-12)
        torch.testing.assert_close(values, first[2], rtol=0, atol=0)
