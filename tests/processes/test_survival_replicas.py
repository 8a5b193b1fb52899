"""Shards that are held twice: a primary that is killed is followed by its standby, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mortal_shards import Kill, assert_equal, run_with

from atoll.testing.pool import WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(deadline=120.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def unharmed(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    one, other = run_with(pool, tmp_path_factory.mktemp("unharmed"), [], replicas=2, keeps=False)
    assert_equal(one, other)
    return one


def test_a_primary_of_each_shard(pool: WorkerPool, unharmed: dict[str, Any], tmp_path: Path) -> None:
    kills = [Kill(0, "shard.stepped", 2), Kill(1, "shard.stepped", 4, nth=2)]
    for result in run_with(pool, tmp_path, kills, replicas=2, keeps=False):
        assert_equal(result, unharmed)
