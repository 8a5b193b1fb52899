"""Schedules by the samples that all workers have consumed, at every strategy: with workers that are alike
equal to plain torch, with others at the right place and at the end where the samples end."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from run_command import wait_for
from said import errors_to
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import Chunks, Config, Groups, Run, Sync
from atoll.core.memory import Memory
from atoll.hub.planner import GroupingSettings
from atoll.train.api.place import Place
from support.parity import ALONE, await_groups
from support.pool import FORKSERVER, WorkerPool
from support.served import ServedRun, served_worker

BATCH, STEPS = 4, 10
WIDTH = 32
DATA = TensorDataset(torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(1)))
TIERS = Memory(device="24KiB", chunk="4224", step="host")  # of 42 KB of parameters in ten layers


class Way(msgspec.Struct, frozen=True):
    """How a run's workers train together."""

    strategy: Any = "ring"
    consistency: Any = "bsp"
    sync: dict[str, Any] = {}
    groups: int = 0
    tiers: bool = False
    address: str = ""
    sites: tuple[str, ...] = ()

    def site(self, rank: int) -> str:
        return self.sites[rank] if self.sites else ""

    def config(self) -> Config:
        sync = {"timeout": "60s", **self.sync}
        if self.strategy in ("server", "ps-hra"):
            sync["consistency"] = self.consistency
        return Config(
            run=Run(strategy=self.strategy),
            chunks=Chunks(size="2KiB"),
            sync=Sync(**sync),
            groups=Groups(count=self.groups, probe=ALONE - 1)
            if self.strategy == "ps-hra"
            else Groups(count=self.groups),
        )


def build(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return model, torch.optim.SGD(
        [{"params": matrices}, {"params": others, "lr": 0.02}], lr=0.01, momentum=0.9
    )


def make_scheduler(optimizer: torch.optim.Optimizer, steps: int = STEPS) -> Any:
    """A warm-up, then a cycle that moves rates and momentum."""
    warm_up = schedulers.LinearLR(optimizer, 0.1, 1.0, 3)
    return schedulers.SequentialLR(
        optimizer, [warm_up, schedulers.CosineAnnealingLR(optimizer, steps - 3)], [3]
    )


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def plain_rates(steps: int = STEPS) -> list[list[float]]:
    """What each step of plain torch is made with, and what comes after them."""
    _, optimizer = build(1)
    scheduler = make_scheduler(optimizer, steps)
    made = [rates(optimizer)]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        made.append(rates(optimizer))
    return made


def train_alike(place: Place, way: Way) -> list[list[float]]:
    """What each step is made with, and what comes after them."""
    made = []
    with ExitStack() as stack:
        if way.address:
            stack.enter_context(served_worker(way.address, place.rank))
        session = stack.enter_context(atoll.join(way.config(), place=None if way.address else place))
        model, optimizer = session.prepare(
            *build(10 if way.tiers else 2), memory=TIERS if way.tiers else None
        )
        session.schedule(make_scheduler(optimizer), total=STEPS * BATCH * session.world)
        for _ in range(STEPS):
            made.append(rates(optimizer))
            model(torch.ones(BATCH, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.barrier()
        made.append(rates(optimizer))
    return made


@pytest.mark.parametrize(
    "way",
    [
        Way(),
        Way(tiers=True),
        Way("hierarchical", groups=2),
        Way("peers"),
        Way("peers", groups=1),
    ],
    ids=str,
)
def test_workers_that_are_alike_have_plain_torch_s_rates(pool: WorkerPool, way: Way) -> None:
    if way.strategy == "peers":
        way = msgspec.structs.replace(way, sync={"stale_max": 0})
    assert pool.run(train_alike, way, world=2) == [plain_rates()] * 2


@pytest.mark.parametrize("lazy", [False, True])
def test_workers_of_a_server_have_plain_torch_s_rates(pool: WorkerPool, lazy: bool) -> None:
    with ServedRun(workers=2, shards=2) as served:
        way = Way("server", sync={"lazy": lazy}, address=served.address)
        assert pool.run(train_alike, way, world=2) == [plain_rates()] * 2


def train_uneven(
    place: Place, way: Way, folder: Path, by_samples: bool = True
) -> tuple[int, list[float], list[float]]:
    """Two epochs in which worker 1 is slow; a checkpoint. The iterations made, the rates in the order of
    steps, and those after the checkpoint."""
    made: list[float] = []
    said = folder / f"{place.rank}.log"
    with (
        errors_to(said),
        served_worker(way.address, place.rank, site=way.site(place.rank)),
        atoll.join(way.config()) as session,
    ):
        model, optimizer = session.prepare(*build(2))
        sampler = session.sampler(DATA, seed=0)
        steps = 2 * len(DATA) // (BATCH * session.world)
        scheduler = schedulers.LinearLR(optimizer, 1.0, 0.0, steps)
        if by_samples:
            session.schedule(scheduler, total=2 * len(DATA))
        loader = DataLoader(DATA, batch_size=BATCH, sampler=sampler)
        for _ in range(2):
            for (x,) in loader:
                if session.rank == 1:
                    time.sleep(0.05)
                made.append(rates(optimizer)[0])
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if not by_samples:
                    scheduler.step()
        session.save(folder / "checkpoint")
        return session.iteration, made, rates(optimizer)


@pytest.mark.parametrize(
    ("strategy", "consistency", "sync"),
    [
        ("server", "asp", {}),
        ("server", "ssp", {"slack": 2}),
        ("server", "asp", {"pipeline": 1}),
        pytest.param("server", "asp", {"lazy": True}, marks=pytest.mark.soak),
        ("ps-hra", "asp", {}),
    ],
)
def test_unlike_workers_end_where_the_samples_end(
    pool: WorkerPool, tmp_path: Path, strategy: str, consistency: str, sync: dict[str, Any]
) -> None:
    grouping = GroupingSettings() if strategy == "ps-hra" else None
    with ServedRun(workers=2, shards=2, grouping=grouping) as served:
        way = Way(strategy, consistency, sync, address=served.address)
        workers = pool.run(train_uneven, way, tmp_path, world=2)
    if strategy == "server" and consistency == "asp":
        assert workers[0][0] > 1.5 * workers[1][0]
    for _, made, end in workers:
        assert made == sorted(made, reverse=True)  # none leads, none goes back
        assert made[0] == 0.01
        assert end == [0.0, 0.0]


def test_a_script_s_own_schedule_that_runs_away_is_told_of(pool: WorkerPool, tmp_path: Path) -> None:
    with ServedRun(workers=2, shards=2) as served:
        way = Way("server", "asp", address=served.address)
        pool.run(train_uneven, way, tmp_path, False, world=2)
    fast = (tmp_path / "0.log").read_text()
    assert fast.count("worker 0: LinearLR (test_schedules.py:") == 1
    assert fast.count("is past its end, step 24") == 1
    assert fast.count("times the iterations of the workers' mean, and LinearLR counts its own") == 1
    assert "past its end" not in (tmp_path / "1.log").read_text()


def test_sites_end_where_the_samples_end(pool: WorkerPool, tmp_path: Path) -> None:
    """The shards of a site hear from the global shards how many samples all sites have consumed."""
    with ServedRun(workers=2, sites={"paris": 1, "berlin": 1}) as served:
        way = Way("server", "asp", address=served.address, sites=("paris", "berlin"))
        for _, made, end in pool.run(train_uneven, way, tmp_path, world=2):
            assert made == sorted(made, reverse=True)
            assert end == [0.0, 0.0]


def train_halves(place: Place, way: Way, folder: Path, last: bool) -> list[float]:
    """The first or the second of two epochs, as a user writes it; the rates of its steps."""
    made: list[float] = []
    with ExitStack() as stack:
        if way.address:
            stack.enter_context(served_worker(way.address, place.rank))
        session = stack.enter_context(atoll.join(way.config(), place=None if way.address else place))
        model, optimizer = session.prepare(*build(2))
        sampler = session.sampler(DATA, seed=0)
        loader = DataLoader(DATA, batch_size=BATCH, sampler=sampler)
        scheduler = schedulers.LinearLR(optimizer, 1.0, 0.0, 2 * len(loader))
        session.schedule(scheduler, total=2 * len(DATA))
        session.resume(folder)
        for (x,) in loader:
            made.append(rates(optimizer)[0])
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.save(folder)
        return [*made, rates(optimizer)[0]]


@pytest.mark.parametrize(("first", "last"), [(3, 1), (1, 2), pytest.param(2, 3, marks=pytest.mark.soak)])
def test_a_run_goes_on_with_other_workers(pool: WorkerPool, tmp_path: Path, first: int, last: int) -> None:
    """The schedule is where the samples are, whatever a step of the run before was worth."""
    folder = tmp_path / "checkpoint"
    ends = [each[-1] for each in pool.run(train_halves, Way(), folder, False, world=first)]
    assert ends == [pytest.approx(0.005)] * first
    for made in pool.run(train_halves, Way(), folder, True, world=last):
        assert made[0] == ends[0]
        assert made == sorted(made, reverse=True)
        assert made[-1] == 0


def test_a_run_goes_on_at_a_server_and_without(pool: WorkerPool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    with ServedRun(workers=2) as served:
        way = Way("server", "asp", address=served.address)
        first = pool.run(train_halves, way, folder, False, world=2)
    assert [each[-1] for each in first] == [pytest.approx(0.005)] * 2
    peers = Way("peers", sync={"stale_max": 1})
    for made in pool.run(train_halves, peers, folder, True, world=2):
        assert made[0] == first[0][-1]
        assert made == sorted(made, reverse=True)
        assert made[-1] == 0


def outlive(rank: int, address: str, folder: str, life: int, waits: bool) -> None:
    """In a process of its own: worker 1 dies in the first epoch of its first life.

    Model 0's scheduler goes by samples, model 1's by the iterations of the script. `waits`: worker 0 does,
    for worker 1's second life.
    """
    errors = os.open(f"{folder}/{rank}-{life}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(errors, 2)
    torch.set_num_threads(1)
    config = Config(run=Run(strategy="ring", elastic=True), sync=Sync(timeout="60s"))
    made, worlds, hello = [], [], Path(folder, "hello")
    with served_worker(address, rank), atoll.join(config) as session:
        ring = session._runtime.ring
        assert ring is not None
        models = [session.prepare(*build(1)) for _ in range(2)]
        sampler = session.sampler(DATA, seed=0)
        loader = DataLoader(DATA, batch_size=BATCH, sampler=sampler)
        by_samples, by_steps = (schedulers.LinearLR(o, 1.0, 0.0, STEPS_OF_TWO) for _, o in models)
        session.schedule(by_samples, total=2 * len(DATA))
        if life:
            hello.touch()
        session.resume()
        for _ in range(sampler.epoch, 2):
            for (x,) in loader:
                if rank == 1 and not life and session.iteration == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                if waits and rank == 0 and session.iteration > 6:
                    wait_for(hello.exists, "worker 1's second life")
                    if session.world == 1:  # it enters between two iterations: not after the last one
                        wait_for(lambda: ring.is_awaited, "that the hub tells of worker 1")
                for model, optimizer in models:
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                by_steps.step()
                made.append(rates(models[0][1])[0])
                worlds.append(session.world)
        told = [made, worlds, by_steps.last_epoch]
    Path(folder, f"{rank}.json").write_text(json.dumps(told))


STEPS_OF_TWO = 2 * len(DATA) // (2 * BATCH)


def start(rank: int, address: str, folder: Path, life: int = 0, *, waits: bool = False) -> Any:
    process = FORKSERVER.Process(target=outlive, args=(rank, address, str(folder), life, waits))
    process.start()
    return process


@pytest.mark.soak
def test_who_comes_late_has_the_others_schedule(tmp_path: Path) -> None:
    """The members compare their hyperparameters at each step, the newcomer's first one too."""
    with ServedRun(workers=2, shards=0, patience=4.0, heartbeat=0.4) as served:
        first, second = (start(rank, served.address, tmp_path, waits=True) for rank in (0, 1))
        second.join(60)
        third = start(1, served.address, tmp_path, 1)
        for process in (first, third):
            process.join(90)
    said = "".join((tmp_path / name).read_text() for name in ("0-0.log", "1-1.log"))
    assert (first.exitcode, second.exitcode, third.exitcode) == (0, -signal.SIGKILL, 0), said
    old, new = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert {1, 2} <= set(old[1])
    assert new[0]
    assert old[0] == sorted(old[0], reverse=True)
    assert new[0] == old[0][-len(new[0]) :]
    assert new[0][-1] == 0


def test_who_outlives_another_worker_ends_where_the_samples_end(tmp_path: Path) -> None:
    with ServedRun(workers=2, shards=0, patience=4.0, heartbeat=0.4) as served:
        workers = [start(rank, served.address, tmp_path) for rank in (0, 1)]
        for worker in workers:
            worker.join(90)
    said = (tmp_path / "0-0.log").read_text()
    assert [worker.exitcode for worker in workers] == [0, -signal.SIGKILL], said
    made, _, by_steps = json.loads((tmp_path / "0.json").read_text())
    assert made == sorted(made, reverse=True)
    assert made[-1] == 0
    assert by_steps > STEPS_OF_TWO
    assert said.count("LinearLR counts iterations, and the run has 1 workers now, not 2") == 1
    assert said.count("is past its end, step 24") == 1
    assert said.count("session.schedule(scheduler, total=epochs * len(dataset))") == 2


def train_in_a_group(place: Place, way: Way) -> list[list[float]]:
    """Worker 1 makes more iterations than worker 0, of one group, which helps it from its meeting; the rates
    of each step, and of one more that both make."""
    made = []
    with served_worker(way.address, place.rank), atoll.join(way.config()) as session:
        model, optimizer = session.prepare(*build(2))
        scheduler = schedulers.LinearLR(optimizer, 1.0, 0.0, 2 * STEPS)
        session.schedule(scheduler, total=2 * STEPS * BATCH * session.world)
        for part in (ALONE + (2 if session.rank == 0 else 6), 1, 1):
            for _ in range(part):
                await_groups(session, session.iteration)
                made.append(rates(optimizer))
                model(torch.ones(BATCH, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            session.reduce(1.0)
    return made[-2:]


def test_a_member_that_helped_from_its_meeting_steps_with_the_others_rate(pool: WorkerPool) -> None:
    with ServedRun(workers=2, grouping=GroupingSettings(1, regroup=False)) as served:
        way = Way("ps-hra", "asp", address=served.address)
        first, second = pool.run(train_in_a_group, way, world=2)
    assert first == second
