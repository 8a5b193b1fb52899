"""Shards that are killed at each point of an iteration, and started again: bsp ends as it would have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mortal import assert_equal
from mortal_shards import Kill, kills_at, points_of_shards, run_with

from support.pool import WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(deadline=120.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def unharmed(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    one, other = run_with(pool, tmp_path_factory.mktemp("unharmed"), [])
    assert_equal(one, other)
    return one


@pytest.mark.parametrize("point", points_of_shards("shard.stepped"))
def test_bsp_is_bit_equal_whatever_point_a_shard_is_killed_at(
    pool: WorkerPool, unharmed: dict[str, Any], tmp_path: Path, point: str
) -> None:
    for result in run_with(pool, tmp_path, kills_at(point), snapshot_seconds=0.1):
        assert_equal(result, unharmed)


@pytest.mark.parametrize(
    "points",
    [("shard.staged", "shard.answered")]
    + [pytest.param(each, marks=pytest.mark.soak) for each in (("shard.combined", "shard.logged"),)],
)
def test_workers_under_budgets_read_their_gradients_once_more(
    pool: WorkerPool, unharmed: dict[str, Any], tmp_path: Path, points: tuple[str, str]
) -> None:
    """And end, to the bit, as without budgets."""
    kills = [Kill(0, points[0], 2), Kill(1, points[1], 4, nth=2)]
    for result in run_with(pool, tmp_path, kills, tiers=True, snapshot_seconds=0.1):
        assert_equal(result, unharmed)
        assert result["came_back"] == 2


@pytest.mark.parametrize("snapshot_seconds", [0.1, 60.0])
def test_a_state_that_the_script_has_loaded_outlives_its_shards(
    pool: WorkerPool, tmp_path: Path, snapshot_seconds: float
) -> None:
    """As the snapshot has it, and as the journal has."""
    right, other = run_with(pool, tmp_path / "unharmed", [], loads=True)
    assert_equal(right, other)
    kills = [Kill(0, "shard.stepped", 3), Kill(1, "shard.answered", 4)]
    for result in run_with(pool, tmp_path / "killed", kills, loads=True, snapshot_seconds=snapshot_seconds):
        assert_equal(result, right)
        assert result["came_back"] == 2


@pytest.mark.soak
def test_one_shard_that_is_killed_again_and_again_under_lazy_parameters(
    pool: WorkerPool, unharmed: dict[str, Any], tmp_path: Path
) -> None:
    kills = [Kill(0, "shard.answered", iteration, nth=iteration) for iteration in range(1, 5)]
    for result in run_with(pool, tmp_path, kills, shards=1, lazy=True, snapshot_seconds=0.1):
        assert_equal(result, unharmed)
