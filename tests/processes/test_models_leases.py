"""Leased samples count with the next step after they were trained on, whichever of several models steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.train.api.place import Place
from atoll.train.api.session import Session
from atoll.train.members.hub_client import HubClient
from support.fetching import fetched
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

SAMPLES, BATCH, EPOCHS = 120, 4, 2
PATIENCE = 60.0  # seconds; a worker waits up to three times as long for samples that others hold
SHORT = 20.0  # seconds: more than a busy machine takes for a step, and far less than the wait


@contextmanager
def joined(address: str, rank: int, consistency: str, **sync: Any) -> Iterator[Session]:
    options: dict[str, Any] = {"timeout": "60s", "consistency": consistency, **sync}
    config = Config(run=Run(strategy="server"), chunks=Chunks(size="2KiB"), sync=Sync(**options))
    with served_worker(address, rank), atoll.join(config) as session:
        yield session


def waited(session: Session) -> float:
    """The seconds for which this worker has waited for the hub's leases."""
    hub = session._runtime.hub
    assert isinstance(hub, HubClient)
    return hub.seconds_waited


def loader_of(session: Session, by: str) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 5))
    if by == "batches":
        return DataLoader(data, batch_sampler=session.batches(data, seed=3))
    return DataLoader(data, BATCH, sampler=session.sampler(data, seed=3))


def linear(inputs: int, outputs: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(inputs, outputs)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def pair(session: Session) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """A generator and a critic, prepared in this order."""
    return [session.prepare(*linear(3, 5)), session.prepare(*linear(5, 1))]


def critic_steps(critic: nn.Module, optimizer: torch.optim.Optimizer, real: Tensor, fake: Tensor) -> None:
    optimizer.zero_grad()
    (critic(real).mean() - critic(fake).mean()).backward()
    optimizer.step()


def gan(
    place: Place, address: str, consistency: str, by: str, ahead: int, every: int, slow: float
) -> tuple[list[list[int]], float]:
    """The indices of each epoch, and the seconds waited. Batches are fetched `ahead` of their use. The
    generator steps after every `every`th batch; never if 0. Worker 1 takes `slow` seconds more."""
    with joined(address, place.rank, consistency, slack=1000, global_batch=2 * BATCH) as session:
        (generator, og), (critic, oc) = pair(session)
        loader = loader_of(session, by)
        epochs = []
        for _ in range(EPOCHS):
            seen: list[int] = []
            for number, (indices, real) in enumerate(fetched(loader, ahead), 1):
                time.sleep(slow * place.rank)
                critic_steps(critic, oc, real, generator(torch.randn(len(real), 3)).detach())
                if every and number % every == 0:
                    og.zero_grad()
                    (-critic(generator(torch.randn(len(real), 3)))).mean().backward()
                    og.step()
                seen += indices.tolist()
            epochs.append(seen)
        return epochs, waited(session)


def assert_each_once(
    results: list[tuple[list[list[int]], float]], samples: Sequence[int] = range(SAMPLES)
) -> None:
    for epoch in range(EPOCHS):
        count = Counter(index for epochs, _ in results for index in epochs[epoch])
        assert count == Counter(samples), f"epoch {epoch}"
    for _, seconds in results:
        assert seconds < SHORT


@pytest.mark.parametrize("every", [1, 3, 0])
@pytest.mark.parametrize(
    ("consistency", "by", "ahead"),
    [("asp", "sampler", 0), ("asp", "batches", 0), ("asp", "batches", 2), ("ssp", "sampler", 0)],
)
def test_the_second_model_s_steps_count_what_they_have_trained_on(
    pool: WorkerPool, consistency: str, by: str, ahead: int, every: int
) -> None:
    with ServedRun(2, shards=2, patience=PATIENCE) as served:
        results = pool.run(gan, served.address, consistency, by, ahead, every, 0.02, world=2)
    assert not served.failures
    assert_each_once(results)


def of_two_loaders(
    place: Place, address: str, models: int, by: str, together: bool
) -> tuple[list[list[int]], float]:
    """Two loaders at once, the second of samples numbered from 1000 on, which one model or two train on."""
    with joined(address, place.rank, "asp", global_batch=2 * BATCH) as session:
        both = pair(session) if models == 2 else [session.prepare(*linear(5, 1))] * 2
        loaders = [loader_of(session, by) for _ in range(2)]
        epochs = []
        for _ in range(EPOCHS):
            seen: list[int] = []
            for batches in zip_longest(*loaders):
                time.sleep(0.02 * place.rank)
                losses = []
                for number, batch in enumerate(batches):
                    if batch is not None:
                        model = both[number][0]
                        seen += (batch[0] + 1000 * number).tolist()
                        losses.append(model(batch[1][:, : next(iter(model.parameters())).shape[1]]).mean())
                        if not together:
                            losses.pop().backward()
                if together:
                    torch.stack(losses).sum().backward()
                for _, optimizer in both[:models]:
                    optimizer.step()
                    optimizer.zero_grad()
            epochs.append(seen)
        return epochs, waited(session)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("models", "by"), [(1, "sampler"), (1, "batches"), (2, "sampler"), (2, "batches")])
def test_samples_of_two_loaders_count(pool: WorkerPool, models: int, by: str, together: bool) -> None:
    with ServedRun(2, shards=2, patience=PATIENCE) as served:
        results = pool.run(of_two_loaders, served.address, models, by, together, world=2)
    assert not served.failures
    assert_each_once(results, [*range(SAMPLES), *range(1000, 1000 + SAMPLES)])


def folds(place: Place, address: str, by: str) -> tuple[list[list[int]], float]:
    """Two models, each of which trains for an epoch on a loader of its own, one after the other."""
    with joined(address, place.rank, "asp", global_batch=2 * BATCH) as session:
        models = [session.prepare(*linear(5, 1)) for _ in range(2)]
        loaders = [loader_of(session, by) for _ in range(2)]
        epochs = []
        for (model, optimizer), loader in zip(models, loaders, strict=True):
            seen: list[int] = []
            for indices, x in loader:
                time.sleep(0.02 * place.rank)
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen += indices.tolist()
            epochs.append(seen)
            session.barrier()
        return epochs, waited(session)


@pytest.mark.parametrize("by", ["sampler", "batches"])
def test_models_that_train_one_after_another_each_on_samples_of_its_own(pool: WorkerPool, by: str) -> None:
    with ServedRun(2, shards=2, patience=PATIENCE) as served:
        results = pool.run(folds, served.address, by, world=2)
    assert not served.failures
    assert_each_once(results)
