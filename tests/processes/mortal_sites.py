"""Runs with sites whose shards, global ones and sites' own, are processes that are killed at points of their
code and started again in their folders.

As in mortal_shards: a fork server imports torch once, and each life of a shard is a fork of it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

import atoll
from atoll.core import points
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.hub import main as hub
from atoll.server import main as server
from atoll.testing.pool import WorkerPool
from atoll.testing.served import RUN, served_worker
from atoll.train.place import Place

DEADLINE = 60.0
ITERATIONS = 8
NAMES = ("paris", "berlin")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["mortal_sites", "atoll.server.main"])


def site_of(rank: int, sites: int = 2) -> str:
    return NAMES[rank % sites]


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a shard ("shard 0", "paris") at the `nth` time that it reaches a point in an iteration (or
    later)."""

    who: str
    point: str
    iteration: int
    nth: int = 1


def _live(who: str, address: str, folder: Path, kills: Sequence[Kill], seconds: float) -> None:
    """A shard's life, in a process of its own."""
    reached: dict[int, int] = {}

    def strike(point: str, iteration: int) -> None:
        for number, kill in enumerate(kills):
            late = iteration >= kill.iteration or iteration == -1
            fired = folder / "fired" / str(number)
            if kill.who != who or kill.point != point or not late or fired.exists():
                continue
            reached[number] = reached.get(number, 0) + 1
            if reached[number] == kill.nth:
                fired.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    points.install(strike)
    output = os.open(folder / f"{who}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    options: dict[str, Any] = {
        "run": RUN,
        "folder": folder / who,
        "timeout": DEADLINE,
        "snapshot_seconds": seconds,
        "goes_on": lambda line: print(line, flush=True),
    }
    if who in NAMES:
        server.serve_site(who, address, **options)
    else:
        server.serve(int(who.removeprefix("shard ")), address, **options)


class MortalSites:
    """A hub on a thread, and the shards as processes; one that is killed is started again, unless it is in
    `for_good`."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        kills: Sequence[Kill] = (),
        shards: int = 2,
        patience: float = 10.0,
        snapshot_seconds: float = 60.0,
        for_good: Sequence[str] = (),
        sites: int = 2,
    ) -> None:
        self.folder, self.kills, self._for_good = folder, list(kills), for_good
        self._sites = Counter(site_of(rank, sites) for rank in range(workers))
        self._workers, self._shards = workers, shards
        self._patience, self._seconds = patience, snapshot_seconds
        self.address = ""
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._processes: dict[str, BaseProcess] = {}
        self._threads: list[threading.Thread] = []

    @property
    def fired(self) -> list[Kill]:
        return [self.kills[int(path.name)] for path in sorted((self.folder / "fired").iterdir())]

    def log(self, who: str) -> str:
        return (self.folder / f"{who}.log").read_text()

    def __enter__(self) -> MortalSites:
        (self.folder / "fired").mkdir(parents=True)
        listening = threading.Event()

        def ready(address: str) -> None:
            self.address = address
            listening.set()

        self._start(
            lambda: hub.serve(
                "tcp://127.0.0.1:0",
                None,
                RUN,
                self._workers,
                self._shards,
                self.folder / "hub",
                self._patience,
                0.25,
                sites=self._sites,
                until=self._stop.is_set,
                ready=ready,
            )
        )
        assert listening.wait(DEADLINE), self.failures
        for who in [*(f"shard {shard}" for shard in range(self._shards)), *self._sites]:
            self._begin(who)
        self._start(self._watch)
        return self

    def kill(self, who: str) -> None:
        self._processes[who].kill()

    def _start(self, run: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                run()
            except BaseException as error:
                self.failures.append(str(error))
                raise

        self._threads.append(threading.Thread(target=guarded, daemon=True))
        self._threads[-1].start()

    def _begin(self, who: str) -> None:
        arguments = (who, self.address, self.folder, self.kills, self._seconds)
        self._processes[who] = _context.Process(target=_live, args=arguments, daemon=True)
        self._processes[who].start()

    def _watch(self) -> None:
        while not self._stop.is_set():
            wait([process.sentinel for process in self._processes.values()], timeout=0.1)
            for who, process in list(self._processes.items()):
                code = process.exitcode
                if code is None or self._stop.is_set() or (code == 0 and who in self._sites):
                    continue  # a site ends with its workers
                if code != -signal.SIGKILL:
                    self.failures.append(f"{who} ended with {code}: {self.log(who)}")
                    return
                if who not in self._for_good:
                    self._begin(who)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE)
        for process in self._processes.values():
            process.kill()
            process.join(DEADLINE)


# -- what workers do meanwhile -----------------------------------------------------------------------------


def config(consistency: Any, lazy: bool = False) -> Config:
    sync = Sync(timeout="40s", consistency=consistency, slack=1, lazy=lazy)
    return Config(run=Run(strategy="server"), chunks=Chunks(size="4KiB"), sync=sync)


def model_and_data(workers: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 60), nn.Linear(60, 60), nn.Linear(60, 30))
    data = torch.randn(ITERATIONS, workers, 3, 20, generator=torch.Generator().manual_seed(1))
    return model, data


def train(
    place: Place,
    address: str,
    consistency: str,
    fired: Path,
    kills: int,
    lazy: bool = False,
    edits: bool = False,
    sites: int = 2,
) -> dict[str, Any]:
    """What a worker ends with: parameters, and the optimizer's state.

    Its last iterations are made when all of `kills` have been. `edits`: gradients of the mean are changed.
    """
    model, data = model_and_data(place.world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with (
        served_worker(address, place.rank, site=site_of(place.rank, sites)),
        atoll.join(config(consistency, lazy)) as session,
    ):
        session.prepare(model, optimizer)
        for iteration in range(ITERATIONS):
            until = time.monotonic() + DEADLINE
            while iteration == ITERATIONS - 2 and len(list(fired.iterdir())) < kills:
                assert time.monotonic() < until, "not all kills have been"
                time.sleep(0.01)
            if iteration == 3:
                session.barrier()
            optimizer.zero_grad()
            model(data[iteration, place.rank]).square().mean().backward()
            session.clip_grad_norm_(1.0)
            if edits:
                model[0].weight.grad.mul_(0.5)  # type: ignore[index, union-attr, operator]
            optimizer.step()
        session.barrier()
        state = optimizer.state_dict()["state"]
        return {
            "parameters": [parameter.detach().clone() for parameter in model.parameters()],
            "state": [state[index] for index in sorted(state)],
            "came_back": session._service.shards.come_back,  # type: ignore[union-attr]
        }


def run_with(
    pool: WorkerPool,
    folder: Path,
    kills: list[Kill],
    consistency: str = "bsp",
    workers: int = 3,
    lazy: bool = False,
    edits: bool = False,
    sites: int = 2,
    **options: Any,
) -> list[dict[str, Any]]:
    with MortalSites(folder, workers, kills, sites=sites, **options) as run:
        arguments = (run.address, consistency, folder / "fired", len(kills), lazy, edits, sites)
        results = pool.run(train, *arguments, world=workers)
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
    """How many iterations of each worker and each site counted, by the logs' words to the hub."""
    told = [json.loads(line) for line in (folder / "hub" / "decisions.jsonl").read_text().splitlines()]
    return {
        each["choice"].partition(",")[0]: int(each["reason"].split()[0])
        for each in told
        if each["what"] == "fenced"
    }
