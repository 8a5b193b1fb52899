"""Sites whose shards are killed at each point of an iteration, the global ones and their own, and started
again: under bsp they end as they would have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mortal_sites import Kill, assert_equal, run_with

from atoll.core import points
from atoll.testing.pool import WorkerPool

# What a site's shard comes by, whose chunks the global shards step.
AT_SITES = [
    "shard.hello", "shard.setup", "shard.staged", "shard.journalled", "shard.logged", "shard.answered",
    *sorted(point for point in points.POINTS if point.startswith("site.")),
]  # fmt: skip
AT_GLOBAL = sorted(point for point in points.POINTS if point.startswith("shard."))


def cases(all_points: list[str], *first: str) -> list[Any]:
    """All points as cases of a test, of which `make test` takes the first, and `make soak` the others."""
    others = [point for point in all_points if point not in first]
    return [*first, *(pytest.param(point, marks=pytest.mark.soak) for point in others)]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(deadline=120.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def unharmed(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = run_with(pool, tmp_path_factory.mktemp("unharmed"), [])
    for each in results:
        assert_equal(each, results[0])
    return results[0]


@pytest.mark.parametrize("point", cases(AT_SITES, "site.passed"))
def test_bsp_is_bit_equal_whatever_point_a_site_s_shard_is_killed_at(
    pool: WorkerPool, unharmed: dict[str, Any], tmp_path: Path, point: str
) -> None:
    kills = [Kill("paris", point, 2), Kill("berlin", point, 4 if point != "site.met" else 3, nth=2)]
    if point in ("shard.hello", "shard.setup"):
        kills = [Kill("paris", point, 0), Kill("berlin", "site.answered", 4)]
    for result in run_with(pool, tmp_path, kills, snapshot_seconds=0.1):
        assert_equal(result, unharmed)


@pytest.mark.parametrize("point", cases(AT_GLOBAL, "shard.stepped"))
def test_bsp_is_bit_equal_whatever_point_a_global_shard_is_killed_at(
    pool: WorkerPool, unharmed: dict[str, Any], tmp_path: Path, point: str
) -> None:
    other = Kill("shard 0", point, 4) if point == "shard.met" else Kill("shard 1", point, 4, nth=2)
    for result in run_with(pool, tmp_path, [Kill("shard 0", point, 2), other], snapshot_seconds=0.1):
        assert_equal(result, unharmed)
