"""A batch of a session's sampler is used once, however often and in which parts a script calls its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import atoll
from atoll.core.config import Config, Sync
from atoll.tensors.checkpoint import read_checkpoint
from atoll.train.api.place import Place

BATCH, STEPS, LENGTH = 16, 5, 16 * 12 + 5
DATA = TensorDataset(torch.arange(4.0 * LENGTH).reshape(LENGTH, 4) / LENGTH)

Model = nn.Module
Way = Callable[[Model, Tensor], None]


def once(net: Model, x: Tensor) -> None:
    net(x).sum().backward()


def two_views(net: Model, x: Tensor) -> None:
    (net(x) - net(x + 1)).square().sum().backward()


def negatives(net: Model, x: Tensor) -> None:
    """Four other samples for each."""
    (net(x).sum() + net(x.repeat(4, 1)).sum()).backward()


def two_backwards(net: Model, x: Tensor) -> None:
    net(x).sum().backward()
    net(-x).sum().backward()


def parts(net: Model, x: Tensor) -> None:
    for part in x.split(6):
        net(part).sum().backward()


def parts_twice(net: Model, x: Tensor) -> None:
    parts(net, x)
    parts(net, x)


def sequence_first(net: Model, x: Tensor) -> None:
    net(x.expand(40, *x.shape)).sum().backward()


def batches(session: atoll.Session, workers: int) -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=session.batches(DATA), num_workers=workers)


def indices(session: atoll.Session, workers: int) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=BATCH, sampler=session.sampler(DATA), num_workers=workers)


def own_batches(session: atoll.Session, workers: int) -> DataLoader[Any]:
    of_indices = BatchSampler(session.sampler(DATA), BATCH, drop_last=False)
    return DataLoader(DATA, batch_sampler=of_indices, num_workers=workers)


def places_after(
    path: Path, make: Any, workers: int, way: Way, *, collected: int = 1, again: int = 1
) -> tuple[int, int]:
    """Return, after `STEPS` batches, the place in the epoch of a checkpoint, and the steps of a schedule by
    samples that makes one for each batch. The script takes `collected` batches at once, and trains `again`
    times on each."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    with atoll.join(Config(sync=Sync(global_batch=BATCH)), place=Place()) as session:
        session.prepare(net, optimizer)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
        session.schedule(scheduler, total=2 * STEPS * BATCH)
        given = iter(make(session, workers))
        left = STEPS
        while left:
            took = [next(given)[0] for _ in range(min(left, collected))]
            left -= len(took)
            for x in took:
                for _ in range(again):
                    optimizer.zero_grad()
                    way(net, x)
                    optimizer.step()
        session.save(path)
        del given
    place: int = read_checkpoint(path).trees["state"]["samplers"][0]["offset"]
    return place, scheduler.last_epoch


WAYS = [once, two_views, negatives, two_backwards, parts, parts_twice, sequence_first]


@pytest.mark.parametrize("make", [batches, indices, own_batches])
@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_and_schedules_have_the_samples_trained_on(tmp_path: Path, make: Any, way: Way) -> None:
    """With processes that fetch batches ahead, too: the samples between would never be trained on."""
    assert places_after(tmp_path / "c", make, 2, way) == (STEPS * BATCH, STEPS)
    assert places_after(tmp_path / "d", make, 0, way) == (STEPS * BATCH, STEPS)


@pytest.mark.parametrize("make", [batches, indices, own_batches])
@pytest.mark.parametrize("way", [once, two_views])
def test_batches_that_are_collected_and_batches_that_are_trained_on_again(
    tmp_path: Path, make: Any, way: Way
) -> None:
    assert places_after(tmp_path / "c", make, 2, once, collected=3) == (STEPS * BATCH, STEPS)
    assert places_after(tmp_path / "d", make, 2, way, again=3) == (STEPS * BATCH, STEPS)
