"""Sites whose shards are killed at each point of an iteration, the global ones and their own, and started
again: each contribution counts once, and where all is synchronous they end as they would have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mortal import ITERATIONS, assert_equal, counted
from mortal_shards import OF_STANDBYS, POINTS_OF_SHARDS
from mortal_sites import Kill, run_with

from atoll.core import points
from support.pool import WorkerPool

# What a site's shard comes by, whose chunks the global shards step.
AT_SITES = [
    "shard.hello", "shard.setup", "shard.staged", "shard.journalled", "shard.logged", "shard.answered",
    *sorted(point for point in points.POINTS if point.startswith("site.")),
]  # fmt: skip
AT_GLOBAL = [point for point in POINTS_OF_SHARDS if point not in OF_STANDBYS]


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
    told = (tmp_path / "paris" / "journal.jsonl").read_text()
    at = r"global shard 0 at tcp://127\.0\.0\.1:\d+"
    assert re.search(rf"site 'paris' lost {at}, and waits for it", told)
    assert re.search(rf"site 'paris': {at} is back, after \d", told)


@pytest.mark.soak
@pytest.mark.parametrize("who", ["paris", "shard 0"])
def test_edited_gradients_and_lazy_parameters_survive_too(pool: WorkerPool, tmp_path: Path, who: str) -> None:
    (expected, *_) = run_with(pool, tmp_path / "unharmed", [], lazy=True, edits=True)
    kills = [Kill(who, "shard.journalled", 2), Kill(who, "shard.logged", 4, nth=2)]
    for result in run_with(pool, tmp_path / "harmed", kills, lazy=True, edits=True):
        assert_equal(result, expected)


@pytest.fixture(scope="module")
def unharmed_alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """asp, with one site alone: nothing depends on who is faster."""
    (one, _) = run_with(pool, tmp_path_factory.mktemp("alone"), [], "asp", workers=2, sites=1, edits=True)
    return one


@pytest.mark.parametrize(
    "who_and_point",
    cases(
        [
            *(f"paris {point}" for point in [*AT_SITES, "shard.combined"]),
            *(f"shard 0 {point}" for point in AT_GLOBAL if point != "shard.combined"),
        ],
        "paris site.passed",
    ),
)
def test_asp_with_one_site_is_bit_equal(
    pool: WorkerPool, unharmed_alone: dict[str, Any], tmp_path: Path, who_and_point: str
) -> None:
    who, _, point = who_and_point.rpartition(" ")
    kills = [Kill(who, point, 2), Kill("paris", "site.answered", 5)]
    options: dict[str, Any] = {"workers": 2, "sites": 1, "edits": True, "snapshot_seconds": 0.1}
    for result in run_with(pool, tmp_path, kills, "asp", **options):
        assert_equal(result, unharmed_alone)


@pytest.mark.parametrize("consistency", ["asp", pytest.param("ssp", marks=pytest.mark.soak)])
def test_each_contribution_of_two_sites_counts_once(
    pool: WorkerPool, tmp_path: Path, consistency: str
) -> None:
    kills = [
        Kill("paris", "site.passed", 2),
        Kill("shard 0", "shard.logged", 3),
        Kill("berlin", "shard.combined", 4, nth=2),
        Kill("shard 1", "shard.stepped", 5),
    ]
    one, *others = run_with(pool, tmp_path, kills, consistency, snapshot_seconds=0.1)
    for other in others:
        assert_equal(other, one)
    names = ("worker 0", "worker 1", "worker 2", "site 'paris'", "site 'berlin'")
    assert counted(tmp_path) == dict.fromkeys(names, ITERATIONS)


# -- what is lost on the way up, and held back -------------------------------------------------------------


@pytest.fixture(scope="module", params=["bsp", pytest.param("asp", marks=pytest.mark.soak)])
def unharmed_losing(
    request: pytest.FixtureRequest, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    (one, *_) = run_losing(pool, tmp_path_factory.mktemp("losing"), [], request.param)
    return request.param, one


def run_losing(
    pool: WorkerPool, folder: Path, kills: list[Kill], consistency: str, **options: Any
) -> list[dict[str, Any]]:
    """Each payload loses what it loses, however often it is sent; under asp there is one site alone."""
    sites = 2 if consistency == "bsp" else 1
    return run_with(pool, folder, kills, consistency, workers=sites + 1, sites=sites, loses=True, **options)


LOSING = [
    ("shard.journalled", "site.answered"),
    ("site.passes", "shard.logged"),
    ("site.passed", "shard.answered"),
]


@pytest.mark.parametrize(
    ("first", "second"),
    [LOSING[0], *(pytest.param(*points, marks=pytest.mark.soak) for points in LOSING[1:])],
)
def test_what_a_site_holds_back_survives_its_shard(
    pool: WorkerPool,
    unharmed_losing: tuple[str, dict[str, Any]],
    tmp_path: Path,
    first: str,
    second: str,
) -> None:
    """Once it goes on from its journal from the beginning, and once from a state in there."""
    consistency, expected = unharmed_losing
    kills = [Kill("paris", first, 2), Kill("paris", second, 5, nth=2), Kill("shard 0", "shard.logged", 4)]
    for result in run_losing(pool, tmp_path, kills, consistency, snapshot_seconds=0.1):
        assert_equal(result, expected)
