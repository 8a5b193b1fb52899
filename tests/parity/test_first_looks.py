"""A look at a loader's first batch before training: every worker gets one, and each sample still counts once
an epoch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import atoll
from support.pool import WorkerPool
from support.runs import EVERYWHERE, model, run_at

SAMPLES, BATCH, WORLD, EPOCHS = 32, 4, 2, 2
SLOW = frozenset(kind for kind in EVERYWHERE if kind.startswith("peers"))  # each node starts a CPU side
KINDS = [pytest.param(kind, marks=[pytest.mark.check] if kind in SLOW else []) for kind in EVERYWHERE]


def train(session: atoll.Session, in_batches: bool) -> tuple[int, list[list[int]]]:
    """Look at a batch, then train; return the samples that were seen, and those trained on in each epoch."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session.prepare(net, optimizer)
    data = TensorDataset(torch.randn(SAMPLES, 32, dtype=torch.float64), torch.arange(SAMPLES))
    loader: DataLoader[Any]
    if in_batches:
        loader = DataLoader(data, batch_sampler=session.batches(data))
    else:
        loader = DataLoader(data, batch_size=BATCH, sampler=session.sampler(data))
    inputs, _ = next(iter(loader))
    session.barrier()
    epochs: list[list[int]] = []
    for _ in range(EPOCHS):
        epochs.append([])
        for batch, numbers in loader:
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            epochs[-1] += numbers.tolist()
    return len(inputs), epochs


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_look_before_training_costs_no_sample(pool: WorkerPool, kind: str, in_batches: bool) -> None:
    sync = {"global_batch": WORLD * BATCH} if in_batches else {}
    found = run_at(pool, kind, train, in_batches, world=WORLD, sync=sync)
    assert [seen for seen, _ in found] == [BATCH] * WORLD
    used = Counter(number for _, epochs in found for epoch in epochs for number in epoch)
    assert used == dict.fromkeys(range(SAMPLES), EPOCHS)
