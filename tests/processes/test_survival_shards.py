"""Shards that are killed at each point of an iteration and started again: nothing is lost, none counts twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mortal_shards import Kill, MortalRun
from torch import nn

import atoll
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.core.points import POINTS
from atoll.testing.pool import WorkerPool
from atoll.testing.served import served_worker
from atoll.train.place import Place
from atoll.wire.messages import Parameters

ITERATIONS = 8
SHARDS = 2
POINTS_OF_SHARDS = sorted(point for point in POINTS if point.startswith("shard."))


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(deadline=120.0) as pool:
        yield pool


def config(consistency: Any, lazy: bool = False) -> Config:
    sync = Sync(timeout="40s", consistency=consistency, slack=1, lazy=lazy)
    return Config(run=Run(strategy="server"), chunks=Chunks(size="4KiB"), sync=sync)


def train(place: Place, address: str, consistency: str, iterations: int, lazy: bool) -> dict[str, Any]:
    """What a worker ends with: parameters, the optimizer's state, each chunk's version at its shard."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 60), nn.Linear(60, 60), nn.Linear(60, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(iterations, 2, 3, 20, generator=torch.Generator().manual_seed(1))
    versions: dict[int, int] = {}
    with served_worker(address, place.rank), atoll.join(config(consistency, lazy)) as session:
        session.prepare(model, optimizer)
        shards = session._service.shards  # type: ignore[union-attr]
        staged = shards._handlers[Parameters]

        def look(shard: int, message: Any, payload: memoryview | None) -> None:
            versions[message.chunk] = max(versions.get(message.chunk, 0), message.version)
            staged(shard, message, payload)

        shards.on(Parameters, look)
        for iteration in range(iterations):
            optimizer.zero_grad()
            model(data[iteration, place.rank]).square().mean().backward()
            session.clip_grad_norm_(1.0)
            optimizer.step()
        session.barrier()
        state = optimizer.state_dict()["state"]
        return {
            "parameters": [parameter.detach().clone() for parameter in model.parameters()],
            "state": [state[index] for index in sorted(state)],
            "versions": versions,
            "came_back": shards.come_back,
        }


def run_with(
    pool: WorkerPool,
    folder: Path,
    kills: list[Kill],
    consistency: str = "bsp",
    shards: int = SHARDS,
    lazy: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    with MortalRun(folder, 2, shards, kills, **options) as run:
        results = pool.run(train, run.address, consistency, ITERATIONS, lazy, world=2)
        assert not run.failures
        assert run.fired == kills
    return results


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for mine, theirs in zip(one["parameters"], other["parameters"], strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(one["state"], other["state"], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine)


def counted(folder: Path) -> dict[str, int]:
    """How many iterations of each worker counted, by the log's word to the hub."""
    told = [json.loads(line) for line in (folder / "hub" / "decisions.jsonl").read_text().splitlines()]
    return {
        each["choice"].partition(",")[0]: int(each["reason"].split()[0])
        for each in told
        if each["what"] == "fenced"
    }


@pytest.fixture(scope="module")
def unharmed(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    one, other = run_with(pool, tmp_path_factory.mktemp("unharmed"), [])
    assert_equal(one, other)
    return one


@pytest.mark.parametrize("point", POINTS_OF_SHARDS)
def test_bsp_is_bit_equal_whatever_point_a_shard_is_killed_at(
    pool: WorkerPool, unharmed: dict[str, Any], tmp_path: Path, point: str
) -> None:
    kills = [Kill(0, point, 2), Kill(1, point, 4, nth=2)]
    for result in run_with(pool, tmp_path, kills, snapshot_seconds=0.2):
        assert_equal(result, unharmed)
        assert result["came_back"] >= 2
