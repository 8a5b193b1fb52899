"""`p.data.clamp_(...)`, as Wasserstein GANs have it, raises no version: it counts, or the script is told."""

from __future__ import annotations

import pytest
import torch

import atoll
from support.pool import JobFailedError, WorkerPool
from support.runs import model, run_at

pytestmark = pytest.mark.sampled


def train(session: atoll.Session, first: int, steps: int) -> float:
    """Clamp all values from step `first` on; returns the greatest at the end."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    for step in range(steps):
        net(torch.full((2, 32), 1.0 + session.rank, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in net.parameters() if step >= first else ():
            parameter.data.clamp_(-0.01, 0.01)
    session.barrier()
    return max(float(parameter.detach().abs().max()) for parameter in net.parameters())


@pytest.mark.parametrize("kind", ["ring", "hierarchical", "tiers", "server", "ps-hra", "server tiers"])
def test_the_values_count(pool: WorkerPool, kind: str) -> None:
    assert max(run_at(pool, kind, train, 0, 3)) <= 0.01


ELSEWHERE = ["asp", "peers", "peers tiers"]


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_where_other_processes_step_the_script_is_told(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(JobFailedError, match="was changed by the script after session.prepare"):
        run_at(pool, kind, train, 0, 3)


def write_first(session: atoll.Session) -> None:
    """Write values between `prepare` and the first step."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    for parameter in net.parameters():
        parameter.data.fill_(0.01)
    for _ in range(3):
        net(torch.ones(2, 32, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_values_written_before_the_first_step_are_not_lost_in_silence(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(JobFailedError, match="was changed by the script after session.prepare"):
        run_at(pool, kind, write_first)


@pytest.mark.parametrize("kind", ["server", "peers"])
def test_a_script_that_begins_late_is_told_too(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(JobFailedError, match="was changed by the script"):
        run_at(pool, kind, train, 10, 90)
