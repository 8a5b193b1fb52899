"""Workers that lease their data wait for nobody who makes no step with it: in evaluations with gradients, and
where others leave a loop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.train.api.place import Place
from atoll.train.api.session import Session
from atoll.train.members.hub_client import HubClient
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

SAMPLES, BATCH = 120, 4
PATIENCE = 10.0  # seconds; a worker waits up to three times as long for samples that others hold
SHORT = 15.0  # seconds: more than a busy machine takes for a step, and far less than the wait


@contextmanager
def trained(
    address: str, rank: int, by: str
) -> Iterator[tuple[Session, nn.Module, torch.optim.Optimizer, DataLoader[Any]]]:
    """A session with a model and a loader of numbered samples."""
    sync = Sync(timeout="60s", consistency="asp", global_batch=2 * BATCH)
    config = Config(run=Run(strategy="server"), chunks=Chunks(size="2KiB"), sync=sync)
    with served_worker(address, rank), atoll.join(config) as session:
        model = nn.Linear(5, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 5))
        if by == "batches":
            yield session, model, optimizer, DataLoader(data, batch_sampler=session.batches(data))
        else:
            yield session, model, optimizer, DataLoader(data, BATCH, sampler=session.sampler(data))


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    for sampler in (loader.sampler, loader.batch_sampler):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def waited(session: Session) -> float:
    """The seconds for which this worker has waited for the hub's leases."""
    hub = session._runtime.hub
    assert isinstance(hub, HubClient)
    return hub.seconds_waited


def evaluates(place: Place, address: str, by: str, backwards: bool) -> tuple[list[list[int]], float]:
    """An epoch in which losses are computed, with gradients on, and one of training; twice."""
    with trained(address, place.rank, by) as (session, model, optimizer, loader):
        epochs = []
        for epoch in range(4):
            seen: list[int] = []
            set_epoch(loader, epoch)
            for indices, x in loader:
                time.sleep(0.01 * place.rank)
                loss = model(x).square().mean()
                if backwards or epoch % 2:
                    loss.backward()
                if epoch % 2:
                    optimizer.step()
                optimizer.zero_grad()
                seen += indices.tolist()
            epochs.append(seen)
            session.barrier()
        return epochs, waited(session)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("by", ["sampler", "batches"])
def test_nobody_waits_in_an_evaluation_with_gradients(pool: WorkerPool, by: str, backwards: bool) -> None:
    with ServedRun(2, patience=PATIENCE) as served:
        results = pool.run(evaluates, served.address, by, backwards, world=2)
    assert not served.failures
    for epoch in range(4):
        count = Counter(index for epochs, _ in results for index in epochs[epoch])
        assert count == Counter(range(SAMPLES)), f"epoch {epoch}"
    assert max(seconds for _, seconds in results) < SHORT


def leaves(place: Place, address: str, by: str) -> tuple[list[list[int]], float]:
    """Worker 0 leaves each epoch but the last after two batches, and sets the next; worker 1 comes to each
    one's end."""
    with trained(address, place.rank, by) as (session, model, optimizer, loader):
        epochs = []
        for epoch in range(4):
            seen: list[int] = []
            set_epoch(loader, epoch)
            for number, (indices, x) in enumerate(loader):
                if place.rank == 0 and number == 2 and epoch < 3:
                    break
                time.sleep(0.05 if place.rank == 0 else 0.01)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen += indices.tolist()
            epochs.append(seen)
        session.barrier()  # nobody has left before, which would free all leases
        return epochs, waited(session)


@pytest.mark.parametrize("by", ["sampler", "batches"])
def test_what_a_worker_has_leased_in_an_epoch_that_it_leaves_goes_to_others(
    pool: WorkerPool, by: str
) -> None:
    with ServedRun(2, patience=PATIENCE) as served:
        results = pool.run(leaves, served.address, by, world=2)
    assert not served.failures
    for epoch in range(4):
        count = Counter(index for epochs, _ in results for index in epochs[epoch])
        assert count == Counter(range(SAMPLES)), f"epoch {epoch}"
    assert max(seconds for _, seconds in results) < SHORT
