"""Batches of different epochs are never trained together: the run ends, and says who is in which epoch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import atoll
from atoll.core.errors import MismatchError
from support.pool import JobFailedError, WorkerPool
from support.runs import TOGETHER, run_at


def train(session: atoll.Session, by: str, how: str) -> int:
    """Three epochs of six batches; worker 1 leaves its first one after four of them, or has larger ones.
    Returns how many iterations were made."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    data = torch.ones(48, 2)
    uneven = session.rank == 1 and how != "even"
    if by == "batches":
        loader = DataLoader(data, batch_sampler=session.batches(data, ahead=0))  # type: ignore[arg-type, var-annotated]
    else:
        size = 6 if uneven and how == "sizes" else 4
        loader = DataLoader(data, batch_size=size, sampler=session.sampler(data))  # type: ignore[arg-type, var-annotated]
    for epoch in range(3):
        for number, x in enumerate(loader):
            if uneven and how == "break" and epoch == 0 and number == 4:
                break
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch + 1)
        if hasattr(loader.batch_sampler, "set_epoch"):
            loader.batch_sampler.set_epoch(epoch + 1)
    return session.iteration


@pytest.mark.parametrize("where", TOGETHER)
def test_workers_in_different_epochs_end_at_once(pool: WorkerPool, where: str) -> None:
    for by, how in (("sampler", "break"), ("sampler", "sizes"), ("batches", "break")):
        with pytest.raises(JobFailedError) as raised:
            run_at(pool, where, train, by, how, sync={"global_batch": 8})
        assert raised.value.failures.keys() == {0, 1}
        for failure in raised.value.failures.values():
            assert failure.kind == MismatchError.__name__, failure.message
            assert f"worker 0 is at the gradients of step 4 of epoch 0 ({__name__}.py:" in failure.message
            assert f"worker 1 is at the gradients of step 4 of epoch 1 ({__name__}.py:" in failure.message
            assert "give every worker equally many batches in an epoch" in failure.message


@pytest.mark.parametrize("where", TOGETHER)
def test_workers_in_one_epoch_go_on(pool: WorkerPool, where: str) -> None:
    for by in ("sampler", "batches"):
        found = run_at(pool, where, train, by, "even", sync={"global_batch": 8})
        assert found == [18, 18]
