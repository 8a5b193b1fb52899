"""What shards keep for delay compensation survives them: a run of one worker, whose exchanges are in flight
while it computes, ends to the bit as if no shard had been killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mortal import assert_equal, counted
from mortal_shards import Kill, MortalRun
from torch import nn
from transports import LINK

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.served import served_worker

ITERATIONS = 8


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(deadline=120.0) as pool:
        yield pool


def train(place: Place, address: str) -> dict[str, Any]:
    """Gradients are the same wherever they are computed: whose answer is lost may get newer parameters."""
    torch.manual_seed(0)
    model = nn.Linear(20, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    data = torch.randn(ITERATIONS, 3, 20, generator=torch.Generator().manual_seed(1))
    sync = Sync(timeout="40s", consistency="asp", pipeline=1, compensation=5.0)
    config = Config(run=Run(strategy="server"), chunks=Chunks(size="4KiB"), sync=sync, link=LINK)
    with (
        served_worker(address, place.rank),
        atoll.join(config) as session,
    ):
        session.prepare(model, optimizer)
        for batch in data:
            optimizer.zero_grad()
            model(batch).mean().mul(100.0).backward()
            optimizer.step()
        state = optimizer.state_dict()["state"]
        session.barrier()
        return {
            "parameters": [parameter.detach().clone() for parameter in model.parameters()],
            "state": [state[index] for index in sorted(state)],
        }


def run_with(pool: WorkerPool, folder: Path, kills: list[Kill], **options: Any) -> dict[str, Any]:
    with MortalRun(folder, 1, 2, kills, **options) as run:
        (result,) = pool.run(train, run.address, world=1)
        assert not run.failures
        assert run.fired == kills
    assert counted(folder) == {"worker 0": ITERATIONS}
    return result


@pytest.mark.soak
def test_shards_that_come_back_and_standbys_compensate_alike(pool: WorkerPool, tmp_path: Path) -> None:
    unharmed = run_with(pool, tmp_path / "unharmed", [])
    kills = [Kill(0, "shard.stepped", 2), Kill(1, "shard.stepped", 5, nth=2)]
    back = run_with(pool, tmp_path / "back", kills, snapshot_seconds=0.05)
    assert_equal(back, unharmed)
    assert_equal(run_with(pool, tmp_path / "standby", kills, replicas=2, keeps=False), unharmed)
