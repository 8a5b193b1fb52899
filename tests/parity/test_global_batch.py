"""With `sync.global_batch`, any number of workers trains as one process does, to the epoch's short end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.core.errors import UserError
from atoll.train.api.place import Place
from atoll.train.data.order import SampleOrder
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

LENGTH, BATCH, EPOCHS = 50, 12, 2  # the last batch of an epoch has 2 samples: of 3 workers, one gets none
RING = Config(chunks=Chunks(size="2KiB"), sync=Sync(timeout="60s", global_batch=BATCH))
BSP = Config(
    run=Run(strategy="server"), chunks=Chunks(size="2KiB"), sync=Sync(timeout="60s", global_batch=BATCH)
)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(LENGTH, 7, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(5, (LENGTH,), generator=generator))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 24), nn.Tanh(), nn.Linear(24, 5)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def values(model: nn.Module) -> np.ndarray[Any, Any]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def plain() -> list[np.ndarray[Any, Any]]:
    """In one process, without Atoll: the parameters after each step."""
    data = dataset()
    model, optimizer = make()
    trajectory = []
    for epoch in range(EPOCHS):
        for batch in SampleOrder(LENGTH, 4, True).of(epoch).split(BATCH):
            optimizer.zero_grad()
            loss_of(model, *data[batch]).backward()  # type: ignore[arg-type]
            optimizer.step()
            trajectory.append(values(model))
    return trajectory


def train(place: Place, served: str) -> tuple[list[np.ndarray[Any, Any]], list[int]]:
    """The parameters after each step, and the sizes of this worker's batches."""
    data = dataset()
    if served:
        with served_worker(served, place.rank):
            return _train(atoll.join(BSP), data)
    return _train(atoll.join(RING, place=place), data)


def _train(session: Any, data: TensorDataset) -> tuple[list[np.ndarray[Any, Any]], list[int]]:
    trajectory, sizes = [], []
    with session:
        model, optimizer = make()
        session.prepare(model, optimizer)
        batches = session.batches(data, seed=4)
        loader = DataLoader(data, batch_sampler=batches)
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
                trajectory.append(values(model))
                sizes.append(len(x))
        assert len(loader) == -(-LENGTH // BATCH)
    return trajectory, sizes


def compare(results: list[tuple[list[np.ndarray[Any, Any]], list[int]]], world: int) -> None:
    expected = plain()
    for trajectory, _ in results:
        assert len(trajectory) == len(expected)
        for after, wanted in zip(trajectory, expected, strict=True):
            np.testing.assert_allclose(after, wanted, rtol=0, atol=1e-12)
    for step in range(len(expected)):
        together = sum(sizes[step] for _, sizes in results)
        assert together == (BATCH if step % 5 < 4 else max(2, world))  # a fill counts for nothing


@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_number_of_workers_trains_as_one_process(pool: WorkerPool, world: int) -> None:
    compare(pool.run(train, "", world=world), world)


def test_so_do_workers_of_a_parameter_server(pool: WorkerPool) -> None:
    with ServedRun(workers=3) as served:
        compare(pool.run(train, served.address, world=3), 3)


def test_batches_without_a_size_is_one_clear_line() -> None:
    with atoll.join(Config()) as session, pytest.raises(UserError, match="sync.global_batch=256"):
        session.batches(range(4))
