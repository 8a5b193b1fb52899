"""Shards that are killed at each point of an iteration, and started again: each contribution counts once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mortal import ITERATIONS, counted
from mortal_shards import kills_at, points_of_shards, run_with

from support.pool import WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(deadline=120.0) as pool:
        yield pool


@pytest.mark.parametrize("point", points_of_shards("shard.logged", but="shard.combined"))
def test_each_contribution_counts_once_whatever_point_a_shard_is_killed_at(
    pool: WorkerPool, tmp_path: Path, point: str
) -> None:
    consistency = "ssp" if point == "shard.stepped" else "asp"
    for result in run_with(pool, tmp_path, kills_at(point), consistency, snapshot_seconds=0.1):
        assert set(result["versions"].values()) == {2 * ITERATIONS}  # on every shard
    assert counted(tmp_path) == {"worker 0": ITERATIONS, "worker 1": ITERATIONS}
