"""Shards that are held twice: a primary that is killed is followed by its standby, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from losing import lost_by_content
from mortal import DEADLINE, ITERATIONS, assert_equal, config, counted
from mortal_shards import POINTS_OF_SHARDS, Kill, MortalRun, run_with
from torch import nn

import atoll
from atoll.core.config import Chunks
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.served import served_worker

TURNS = 4
OTHERS = ("shard.held", "shard.promoted", "shard.copied", "shard.snapshot")  # have tests of their own
POINTS = [point for point in POINTS_OF_SHARDS if point not in OTHERS]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(deadline=120.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def unharmed(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    one, other = run_with(pool, tmp_path_factory.mktemp("unharmed"), [])
    assert_equal(one, other)
    return one


# -- a table of kills --------------------------------------------------------------------------------------


def kills_of_primaries(point: str) -> list[Kill]:
    """Of shard 0, and later of shard 1; only shard 0 keeps meetings."""
    if point == "shard.met":
        return [Kill(0, point, 2)]
    return [Kill(0, point, 2), Kill(1, point, 4, nth=2)]


@pytest.mark.soak
def test_under_bsp_primaries_are_killed_without_directories(
    pool: WorkerPool, unharmed: dict[str, Any], tmp_path: Path
) -> None:
    kills = kills_of_primaries("shard.stepped")
    for result in run_with(pool, tmp_path, kills, replicas=2, keeps=False):
        assert_equal(result, unharmed)


@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS)
def test_under_bsp_primaries_are_killed_at_each_point(
    pool: WorkerPool, unharmed: dict[str, Any], tmp_path: Path, point: str
) -> None:
    for keeps in (False, True):
        folder = tmp_path / str(keeps)
        for result in run_with(pool, folder, kills_of_primaries(point), replicas=2, keeps=keeps):
            assert_equal(result, unharmed)


@pytest.mark.soak
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("point", ["shard.staged", "shard.logged", "shard.stepped"])
def test_of_what_was_lost_the_successor_makes_the_same(
    pool: WorkerPool, tmp_path: Path, point: str, replicas: int
) -> None:
    """Also where it is the same shard, started again: then with its directory."""
    expected, _ = run_with(pool, tmp_path / "unharmed", [], loses=lost_by_content)
    without, _ = run_with(pool, tmp_path / "without", [])
    assert not all(map(torch.equal, expected["parameters"], without["parameters"]))
    options = {"replicas": replicas, "keeps": replicas == 1, "loses": lost_by_content}
    for result in run_with(pool, tmp_path / "harmed", kills_of_primaries(point), **options):
        assert_equal(result, expected)


@pytest.mark.soak
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_standbys_are_killed_and_come_again(
    pool: WorkerPool, unharmed: dict[str, Any], tmp_path: Path, consistency: str
) -> None:
    kills = [Kill(0, "shard.held", 2, half=1), Kill(1, "shard.held", 4, half=1)]
    for result in run_with(pool, tmp_path, kills, consistency, replicas=2):
        if consistency == "bsp":
            assert_equal(result, unharmed)
    assert counted(tmp_path) == {"worker 0": ITERATIONS, "worker 1": ITERATIONS}


@pytest.mark.soak
@pytest.mark.parametrize("point", [point for point in POINTS if point != "shard.combined"])
def test_under_asp_each_contribution_counts_once(pool: WorkerPool, tmp_path: Path, point: str) -> None:
    consistency = "ssp" if point == "shard.stepped" else "asp"
    kills = kills_of_primaries(point)
    for result in run_with(pool, tmp_path, kills, consistency, replicas=2, keeps=False):
        assert set(result["versions"].values()) == {2 * ITERATIONS}
    assert counted(tmp_path) == {"worker 0": ITERATIONS, "worker 1": ITERATIONS}


@pytest.mark.soak
@pytest.mark.parametrize("point", ["shard.copied", "shard.promoted"])
def test_the_successor_is_killed_while_it_is_alone(
    pool: WorkerPool, unharmed: dict[str, Any], tmp_path: Path, point: str
) -> None:
    """Its directory goes on, and not that of the first, which comes back meanwhile."""
    kills = [Kill(0, "shard.stepped", 2), Kill(0, point, 0, half=1)]
    for result in run_with(pool, tmp_path, kills, replicas=2, snapshot_seconds=0.1):
        assert_equal(result, unharmed)


# -- one thing after another -------------------------------------------------------------------------------


def train_in_turns(place: Place, address: str, consistency: str, folder: Path, turns: int) -> dict[str, Any]:
    """Two iterations in each turn; a turn begins when the test has made the file `turn-N`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 60), nn.Linear(60, 60), nn.Linear(60, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(2 * turns, 2, 3, 20, generator=torch.Generator().manual_seed(1))
    with served_worker(address, place.rank), atoll.join(config(consistency)) as session:
        session.prepare(model, optimizer)
        for iteration in range(2 * turns):
            if iteration % 2 == 0:
                (folder / f"at-{iteration // 2}-{place.rank}").touch()
                until = time.monotonic() + DEADLINE
                while not (folder / f"turn-{iteration // 2}").exists():
                    assert time.monotonic() < until
                    time.sleep(0.005)
            optimizer.zero_grad()
            model(data[iteration, place.rank]).square().mean().backward()
            optimizer.step()
        session.barrier()
        return {"parameters": [parameter.detach().clone() for parameter in model.parameters()], "state": []}


class InTurns:
    """A run whose workers wait for the test before each of `turns` turns."""

    def __init__(
        self, pool: WorkerPool, run: MortalRun, folder: Path, turns: int, consistency: str = "bsp"
    ) -> None:
        self._folder, self._turns, self._made = folder, turns, 0
        folder.mkdir()
        self._threads = ThreadPoolExecutor(1)
        job = (train_in_turns, run.address, consistency, folder, turns)
        self._results = self._threads.submit(lambda: pool.run(*job, world=2))

    def turn(self) -> float:
        """Let them make the next turn; gives the seconds that it took."""
        self._wait_for(self._made)
        began = time.monotonic()
        (self._folder / f"turn-{self._made}").touch()
        self._made += 1
        if self._made < self._turns:
            self._wait_for(self._made)
        else:
            self.results()
        return time.monotonic() - began

    def _wait_for(self, turn: int) -> None:
        until = time.monotonic() + DEADLINE
        while len(list(self._folder.glob(f"at-{turn}-*"))) < 2:
            assert time.monotonic() < until, f"turn {turn}"
            assert not self._results.done(), self._results.result(0)
            time.sleep(0.005)

    def results(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._results.result(DEADLINE)
        self._threads.shutdown()
        return found


@pytest.fixture(scope="module")
def unharmed_turns(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("turns")
    with MortalRun(folder, 2, 2, []) as run:
        course = InTurns(pool, run, folder / "turns", TURNS)
        for _ in range(TURNS):
            course.turn()
        return course.results()


def test_a_primary_is_killed_and_then_its_successor_and_the_run_goes_on_within_seconds(
    pool: WorkerPool, unharmed_turns: list[dict[str, Any]], tmp_path: Path
) -> None:
    with MortalRun(tmp_path, 2, 2, [], replicas=2, keeps=False) as run:
        course = InTurns(pool, run, tmp_path / "turns", TURNS)
        course.turn()
        run.kill(0, 0)
        first = course.turn()
        run.wait_for_decisions("shard 0", 2, "in sync")  # the first process again, as the standby
        run.kill(0, 1)
        second = course.turn()
        run.wait_for_decisions("shard 0", 3, "in sync")
        run.kill(1, 0)
        third = course.turn()
        results = course.results()
        assert not run.failures
    for result, expected in zip(results, unharmed_turns, strict=True):
        assert_equal(result, expected)
    print(f"went on after {first:.2f}, {second:.2f} and {third:.2f} s")
    assert max(first, second, third) < 5.0


@pytest.mark.soak
def test_a_primary_that_stood_still_too_long_is_replaced_and_can_do_nothing_when_it_wakes(
    pool: WorkerPool, unharmed_turns: list[dict[str, Any]], tmp_path: Path
) -> None:
    with MortalRun(tmp_path, 2, 2, [], replicas=2) as run:
        course = InTurns(pool, run, tmp_path / "turns", TURNS)
        course.turn()
        course.turn()
        os.kill(run.pid(0, 0), signal.SIGSTOP)
        course.turn()
        os.kill(run.pid(0, 0), signal.SIGCONT)
        run.wait_for_decisions("shard 0", 2, "in sync")  # it has ended, and came again as the standby
        course.turn()
        results = course.results()
        assert not run.failures
        assert "it was given up" in run.log(0, 0)
    for result, expected in zip(results, unharmed_turns, strict=True):
        assert_equal(result, expected)


def test_a_directory_that_another_has_overtaken_is_not_gone_on_from(
    pool: WorkerPool, unharmed_turns: list[dict[str, Any]], tmp_path: Path
) -> None:
    with MortalRun(tmp_path, 2, 2, [], replicas=2, snapshot_seconds=0.2) as run:
        course = InTurns(pool, run, tmp_path / "turns", TURNS)
        course.turn()
        run.restarts = False
        run.kill(0, 0)
        course.turn()  # of which the first process's directory knows nothing
        run.kill(0, 1)
        run.wait_for_decisions("shard died", 2)
        run.start(0, 0)
        run.wait_for_decisions("shard joined", 5)  # it waits, for it may not go on
        run.start(0, 1)
        course.turn()
        course.turn()
        results = course.results()
        assert not run.failures
        assert "goes on from" in run.log(0, 1)
        assert "goes on from" not in run.log(0, 0)
    for result, expected in zip(results, unharmed_turns, strict=True):
        assert_equal(result, expected)


@pytest.mark.soak
def test_a_standby_that_is_killed_for_good_holds_nobody_up(
    pool: WorkerPool, unharmed_turns: list[dict[str, Any]], tmp_path: Path
) -> None:
    with MortalRun(tmp_path, 2, 2, [], replicas=2) as run:
        run.restarts = False
        course = InTurns(pool, run, tmp_path / "turns", TURNS)
        course.turn()
        course.turn()
        run.kill(0, 1)
        run.kill(1, 1)
        took = course.turn()
        course.turn()
        results = course.results()
        assert not run.failures
    assert took < 5.0
    for result, expected in zip(results, unharmed_turns, strict=True):
        assert_equal(result, expected)


# -- edits and other set-ups -------------------------------------------------------------------------------


def train_with_edits(place: Place, address: str, folder: Path, fired: Path, kills: int) -> dict[str, Any]:
    """Workers edit the mean in each iteration, and go back to a checkpoint in the middle."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 60), nn.Linear(60, 60), nn.Linear(60, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(10, 2, 3, 20, generator=torch.Generator().manual_seed(1))
    with served_worker(address, place.rank), atoll.join(config("bsp")) as session:
        session.prepare(model, optimizer)
        for step in range(10):
            until = time.monotonic() + DEADLINE
            while step == 8 and len(list(fired.iterdir())) < kills:
                assert time.monotonic() < until, "not all kills have been"
                time.sleep(0.01)
            if step == 3:
                session.save(folder / "checkpoint")
            if step == 5:
                session.load(folder / "checkpoint")
            optimizer.zero_grad()
            model(data[step, place.rank]).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            optimizer.step()
        session.barrier()
        state = optimizer.state_dict()["state"]
        return {
            "parameters": [parameter.detach().clone() for parameter in model.parameters()],
            "state": [state[index] for index in sorted(state)],
        }


@pytest.mark.soak
def test_edits_and_a_checkpoint_that_is_gone_back_to(pool: WorkerPool, tmp_path: Path) -> None:
    """Killed: in an edited step; and its successor, and the other, after they were set up anew."""
    later = [Kill(0, "shard.stepped", 5, half=1), Kill(1, "shard.stepped", 5)]
    results = []
    for name, kills in (("plain", []), ("killed", [Kill(0, "shard.stepped", 2), *later])):
        with MortalRun(tmp_path / name, 2, 2, kills, replicas=2 if kills else 1) as run:
            fired = tmp_path / name / "fired"
            job = (train_with_edits, run.address, tmp_path / name, fired, len(kills))
            results.append(pool.run(*job, world=2))
            assert run.fired == kills
            assert not run.failures
    for expected, result in zip(*results, strict=True):
        assert_equal(expected, result)


# -- what a standby holds that came while all went on ------------------------------------------------------


def train_and_look(place: Place, address: str, consistency: str, folder: Path) -> list[dict[str, Any]]:
    """Train until the test says `enough`; what the shards hold then, and once more after it says `again`."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(place.rank)
    many = msgspec.structs.replace(config(consistency), chunks=Chunks(size="2KiB"))
    with served_worker(address, place.rank), atoll.join(many) as session:
        session.prepare(model, optimizer)
        found = []
        for word in ("enough", "again"):
            until, enough = time.monotonic() + DEADLINE, False
            while not enough:
                assert time.monotonic() < until
                if word == "enough":
                    optimizer.zero_grad()
                    model(torch.randn(3, 20, generator=draw)).square().mean().backward()
                    optimizer.step()
                    (folder / f"went-on-{place.rank}").write_text(str(session.iteration))
                enough = any(session.gather((folder / word).exists()))
            session.barrier()
            state = optimizer.state_dict()["state"]
            found.append(
                {
                    "parameters": [parameter.detach().clone() for parameter in model.parameters()],
                    "state": [state[index] for index in sorted(state)],
                }
            )
            (folder / f"looked-{word}-{place.rank}").touch()
        return found


@pytest.mark.parametrize(
    "consistency", ["asp", *(pytest.param(each, marks=pytest.mark.soak) for each in ("bsp", "ssp"))]
)
def test_a_standby_that_came_in_the_middle_of_training_holds_the_same(
    pool: WorkerPool, tmp_path: Path, consistency: str
) -> None:
    """Each chunk is copied at another moment, while the others are stepped."""
    said = tmp_path / "said"
    said.mkdir()

    def wait_for(names: str) -> None:
        until = time.monotonic() + DEADLINE
        while len(list(said.glob(names))) < 2:
            assert time.monotonic() < until, names
            assert not job.done(), job.result(0)
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as threads, MortalRun(tmp_path / "run", 2, 2, [], replicas=2) as run:
        job = threads.submit(lambda: pool.run(train_and_look, run.address, consistency, said, world=2))
        wait_for("went-on-*")
        for shard in range(2):
            run.kill(shard, 1)
        for shard in range(2):
            run.wait_for_decisions(f"shard {shard}", 2, "in sync")
        (said / "enough").touch()
        wait_for("looked-enough-*")
        run.restarts = False
        for shard in range(2):
            run.kill(shard, 0)
        (said / "again").touch()
        for before, after in job.result(DEADLINE):
            assert_equal(before, after)
        assert not run.failures
