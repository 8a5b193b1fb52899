"""Workers that come late at a site: what they are given, and whose samples count.

As test_survival_enter, with sites. Ranks 0 and 2 are at one site, 1 at the other.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forked_script import ForkedScript
from mortal_sites import Kill, MortalSites
from test_survival_enter import (
    BATCH,
    EPOCHS,
    LENGTH,
    PATIENCE,
    SCRIPT,
    Workers,
    assert_near,
    merged,
    plain,
)
from transports import LINK

from atoll.core.config import SITE_VARIABLE
from support.served import ServedRun

NAMES = ("paris", "berlin")


# A worker whose rank is in `after` stops between an iteration's backward and its step.
SCRIPT_AFTER = SCRIPT.replace(
    "            world = session.world\n",
    """            world = session.world
            while at >= plan["after"].get(me, 10**9):
                pathlib.Path(f"hangs-{name}").touch()
                time.sleep(0.05)
""",
)


class SiteWorkers(Workers):
    def __init__(self, folder: Path, address: str, sync: str, plan: dict[str, Any]) -> None:
        super().__init__(folder, address, "server", sync, plan)
        (folder / "script.py").write_text(SCRIPT_AFTER)

    def start(self, name: str, rank: int, **plan: Any) -> ForkedScript:
        plan = {"after": {}, **plan}
        with mock.patch.dict(os.environ, {SITE_VARIABLE: NAMES[rank % 2]}):
            return super().start(name, rank, **plan)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., SiteWorkers]]:
    """A run with its hub, two shards and two sites, and nobody in it."""
    runs: list[ServedRun] = []
    teams: list[SiteWorkers] = []

    def make(workers: int, sync: str, **plan: Any) -> SiteWorkers:
        sites = Counter(NAMES[rank % 2] for rank in range(workers))
        served = ServedRun(workers, 2, patience=PATIENCE, heartbeat=0.3, sites=sites, site_link=LINK)
        runs.append(served)
        runs[-1].__enter__()
        teams.append(SiteWorkers(tmp_path, runs[-1].address, sync, plan))
        return teams[-1]

    yield make
    for team in teams:
        team.close()
    for run in runs:
        run.stop()
        assert run.failures == []


def enters_again(workers: SiteWorkers, rank: int, **plan: Any) -> list[str]:
    """A run of three in which the worker of that rank is killed in iteration 5, and started again; the names
    of those who are there at the end."""
    names = ["zero", "one", "two"]
    for each, name in enumerate(names):
        workers.start(name, each, **plan)
    workers.kill(names[rank])
    workers.start("again", rank, late=True, hang={})
    workers.wait(lambda: bool(workers.notes("again")), "the new worker's first iteration")
    (workers.folder / "all-there").touch()
    left = [*(name for each, name in enumerate(names) if each != rank), "again"]
    workers.finish(*left)
    return left


@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.soak)])
def test_bsp_a_worker_of_a_site_is_killed_and_started_again(
    begin: Callable[..., SiteWorkers], rank: int
) -> None:
    """The run ends as if one process had trained on the same samples."""
    plan = {"hang": {str(rank): 5}, "pace": {str(2 - rank): 8}, "ready": ["again"]}
    workers = begin(3, f"global_batch = {BATCH}", **plan)
    ends_as_one_process(workers, enters_again(workers, rank))


def ends_as_one_process(workers: SiteWorkers, left: list[str]) -> None:
    """Who has come again did so between two iterations, and each has trained as one process would have."""
    one, again = workers.notes("one"), workers.notes("again")
    assert [at for at, *_ in one] == list(range(len(one)))
    assert again[0][0] > 5
    assert [at for at, *_ in again] == list(range(again[0][0], len(one)))  # from where it entered
    rates = {at: lr for at, _, lr, _ in one}
    assert all(lr == rates[at] for at, _, lr, _ in again)

    iterations = merged(workers, "zero", "one", "two", "again")
    used = Counter(index for samples in iterations.values() for index in samples)
    assert max(used.values()) == EPOCHS  # in each epoch once, but for what fell to the one who was away
    sizes = {at: len(samples) for at, samples in iterations.items()}
    whole = [at for at in sizes if at < 5 or at >= again[0][0]]
    assert {sizes[at] for at in whole} == {BATCH}
    assert len(one) == LENGTH * EPOCHS // BATCH
    parameters, average = plain(workers, iterations)
    for name in left:
        end = workers.end(name)
        assert_near(end["model"], parameters)
        assert_near(end["average"], average)
        assert end["seen"] == len(one)
    ends = [workers.end(name)["model"] for name in left]
    assert all(torch.equal(first, other) for first, other in zip(ends[0], ends[-1], strict=True))


@pytest.mark.soak
def test_asp_a_worker_of_a_site_is_killed_and_started_again(begin: Callable[..., SiteWorkers]) -> None:
    plan = {"hang": {"2": 5}, "pace": {"0": 8, "1": 8}, "ready": ["again"], "batches": False}
    workers = begin(3, "consistency = 'asp'", **plan)
    left = enters_again(workers, 2)
    again = workers.notes("again")
    assert again[0][0] > 5
    assert [at for at, *_ in again] == list(range(again[0][0], again[0][0] + len(again)))
    names = ("zero", "one", "two", "again")
    used = Counter(index for name in names for _, samples, *_ in workers.notes(name) for index in samples)
    assert used == Counter(dict.fromkeys(range(LENGTH), EPOCHS))
    assert left[-1] == "again"
    assert workers.end("again")["seen"] == again[-1][0] + 1


@pytest.mark.parametrize("consistency", ["bsp", pytest.param("asp", marks=pytest.mark.soak)])
def test_all_workers_of_a_site_are_killed_and_one_is_started_again(
    begin: Callable[..., SiteWorkers], consistency: str
) -> None:
    """Its site waits for it, and another site's worker gives it what is not at the shards."""
    bsp = consistency == "bsp"
    sync = f"global_batch = {BATCH}" if bsp else "consistency = 'asp'"
    plan = {"hang": {"1": 5}, "pace": {"0": 8, "2": 8}, "batches": bsp}
    workers = begin(3, sync, ready=[] if bsp else ["again"], **plan)
    left = enters_again(workers, 1)
    again = workers.notes("again")
    assert again[0][0] >= 5
    assert [at for at, *_ in again] == list(range(again[0][0], again[0][0] + len(again)))
    iterations = merged(workers, "zero", "one", "two", "again")
    used = Counter(index for samples in iterations.values() for index in samples)
    assert used == Counter(dict.fromkeys(range(LENGTH), EPOCHS))
    if bsp:  # the others have waited, and nothing is missing
        assert [at for at, *_ in again] == list(range(5, LENGTH * EPOCHS // BATCH))
        parameters, average = plain(workers, iterations)
        for name in left:
            end = workers.end(name)
            assert_near(end["model"], parameters)
            assert_near(end["average"], average)
            assert end["seen"] == LENGTH * EPOCHS // BATCH
    else:
        assert workers.end("again")["seen"] >= again[-1][0] + 1


@pytest.mark.soak
def test_a_site_whose_workers_die_with_the_mean_steps_as_the_others_say(
    begin: Callable[..., SiteWorkers],
) -> None:
    """What they had contributed counts; who comes back begins with the next iteration."""
    workers = begin(3, f"global_batch = {BATCH}", pace={"0": 8, "2": 8})
    left = enters_again(workers, 1, after={"1": 5})
    again, zero = workers.notes("again"), workers.notes("zero")
    assert [at for at, *_ in again] == list(range(6, LENGTH * EPOCHS // BATCH))
    assert len(zero) == LENGTH * EPOCHS // BATCH
    parts = {}
    for name in ("zero", "one", "two", "again"):
        parts |= {(name, at): samples for at, samples, *_ in workers.notes(name)}
    assert ("one", 5) not in parts  # it had no step, and its samples are in the others'
    iterations = merged(workers, "zero", "one", "two", "again")
    used = Counter(index for samples in iterations.values() for index in samples)
    missing = [index for index in range(LENGTH) if used[index] == EPOCHS - 1]
    assert sum(used.values()) + len(missing) == LENGTH * EPOCHS
    assert len(iterations[5]) + len(missing) == BATCH
    iterations[5] = sorted([*iterations[5], *missing])
    parameters, average = plain(workers, iterations)
    for name in left:
        assert_near(workers.end(name)["model"], parameters)
        assert_near(workers.end(name)["average"], average)


@pytest.mark.soak
@pytest.mark.parametrize("together", [False, True])
def test_shards_die_too_while_a_worker_comes_again(tmp_path: Path, together: bool) -> None:
    """Its site's shard as it says Hello, or with the worker itself; then others."""
    kills = [] if together else [Kill("paris", "shard.hello", 0, nth=3)]
    kills += [Kill("berlin", "site.passed", 20), Kill("shard 0", "shard.logged", 30)]
    (tmp_path / "run").mkdir()
    with MortalSites(tmp_path / "run", 3, kills, patience=PATIENCE) as run:
        plan = {"hang": {"2": 5}, "pace": {"0": 8}, "ready": ["again"]}
        workers = SiteWorkers(tmp_path, run.address, f"global_batch = {BATCH}", plan)
        try:
            names = ["zero", "one", "two"]
            for rank, name in enumerate(names):
                workers.start(name, rank)
            workers.kill("two")
            if together:
                run.kill("paris")
            workers.start("again", 2, late=True, hang={})
            workers.wait(lambda: bool(workers.notes("again")), "the new worker's first iteration")
            (workers.folder / "all-there").touch()
            workers.finish("zero", "one", "again")
        finally:
            workers.close()
        assert not run.failures
        assert run.fired == kills
    ends_as_one_process(workers, ["zero", "one", "again"])
