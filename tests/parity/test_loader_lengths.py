"""`len(loader)` of `session.batches` is the number of the batches of a loop, before it and at each batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from support.pool import WorkerPool
from support.runs import run_at

BATCH, LENGTH = 8, 25  # samples: four batches, the last of 1


def lengths(session: atoll.Session, _: str) -> list[tuple[int, list[int]]]:
    """Of two epochs: the loader's length before the loop, and at each batch."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    data = TensorDataset(torch.ones(LENGTH, 1))
    loader, found = DataLoader(data, batch_sampler=session.batches(data)), []
    for _epoch in range(2):
        before, within = len(loader), []
        for (x,) in loader:
            within.append(len(loader))
            net(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((before, within))
    session.barrier()
    return found


@pytest.mark.parametrize("kind", ["ring", "server", "peers", "peers stale"])
def test_a_loader_is_as_long_in_its_loop_as_before(pool: WorkerPool, kind: str) -> None:
    """Scripts that accumulate step at `i == len(loader) - 1`."""
    for found in run_at(pool, kind, lengths, "", world=2, sync={"global_batch": BATCH}):
        assert found == [(4, [4] * 4)] * 2
