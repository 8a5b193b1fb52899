"""Shards as processes that are killed at points of their code and started again in their folders.

A fork server imports torch once; each life of a shard is a fork of it, so that a case costs no import.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.core import points
from atoll.core.config import Chunks, Config, Run, Sync
from atoll.core.errors import GivenUpError
from atoll.hub import main as hub
from atoll.server import main as server
from atoll.testing.pool import WorkerPool
from atoll.testing.served import RUN, served_worker
from atoll.train.place import Place
from atoll.wire.messages import Parameters

DEADLINE = 60.0
ITERATIONS = 8
GIVEN_UP = GivenUpError.exit_status
POINTS_OF_SHARDS = sorted(point for point in points.POINTS if point.startswith("shard."))
OF_STANDBYS = ("shard.copied", "shard.held", "shard.promoted")  # where shards have standbys
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["mortal_shards", "atoll.server.main"])


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a shard at the `nth` time that it reaches a point in an iteration (or later); where shards
    are held twice, for the first or the second process of it."""

    shard: int
    point: str
    iteration: int
    nth: int = 1
    half: int = 0


def _live(
    index: int, half: int, address: str, folder: str, kills: Sequence[Kill], log: str, options: dict[str, Any]
) -> None:
    """A shard's life, in a process of its own."""
    reached: dict[int, int] = {}
    fired = Path(folder).parent / "fired"

    def strike(point: str, iteration: int) -> None:
        for number, kill in enumerate(kills):
            late = iteration >= kill.iteration or iteration == -1
            if (
                (kill.shard, kill.half) != (index, half)
                or kill.point != point
                or not late
                or (fired / str(number)).exists()
            ):
                continue
            reached[number] = reached.get(number, 0) + 1
            if reached[number] == kill.nth:
                (fired / str(number)).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    points.install(strike)
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        server.serve(
            index,
            address,
            run=RUN,
            folder=folder if options.pop("keeps", True) else None,
            timeout=DEADLINE,
            goes_on=lambda line: print(line, flush=True),
            **options,
        )
    except GivenUpError as error:
        print(f"atoll: {error}", flush=True)
        os._exit(error.exit_status)


class MortalRun:
    """A hub on a thread, and shards as processes, each `replicas` times; a shard that is killed is started
    again, `pause` seconds later. `options` go to `serve`; `keeps` is whether shards have directories."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        shards: int,
        kills: Sequence[Kill] = (),
        pause: float = 0.0,
        replicas: int = 1,
        patience: float = 10.0,
        **options: Any,
    ) -> None:
        self.folder, self._workers, self._count = folder, workers, shards
        self.kills, self._pause, self._options = list(kills), pause, options
        self._replicas, self._patience = replicas, patience
        self.restarts = True  # of shards that are killed
        self.address = ""
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._shards: dict[tuple[int, int], BaseProcess] = {}
        self._threads: list[threading.Thread] = []

    @property
    def fired(self) -> list[Kill]:
        return [self.kills[int(path.name)] for path in sorted((self.folder / "fired").iterdir())]

    def _name(self, shard: int, half: int) -> str:
        return f"shard-{shard}{'-second' if half else ''}"

    def log(self, shard: int, half: int = 0) -> str:
        return (self.folder / f"{self._name(shard, half)}.log").read_text()

    def __enter__(self) -> MortalRun:
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
                self._count,
                self.folder / "hub",
                self._patience,
                0.25,
                replicas=self._replicas,
                until=self._stop.is_set,
                ready=ready,
            )
        )
        assert listening.wait(DEADLINE), self.failures
        for half in range(self._replicas):
            for shard in range(self._count):
                self.start(shard, half)
            if half + 1 < self._replicas:  # who comes first is the primary
                self.wait_for_decisions("shard joined", self._count)
        self._start(self._watch)
        return self

    def wait_for_decisions(self, what: str, count: int = 1, choice: str = "") -> None:
        until = time.monotonic() + DEADLINE
        while sum(each["what"] == what and choice in each["choice"] for each in self.decisions()) < count:
            assert time.monotonic() < until, (
                f"{count} of {what!r} {choice!r} did not come: {self.decisions()}"
            )
            assert not self.failures
            time.sleep(0.01)

    def decisions(self) -> list[dict[str, Any]]:
        path = self.folder / "hub" / "decisions.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _start(self, run: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                run()
            except BaseException as error:
                self.failures.append(str(error))
                raise

        self._threads.append(threading.Thread(target=guarded, daemon=True))
        self._threads[-1].start()

    def start(self, shard: int, half: int = 0) -> None:
        name = self._name(shard, half)
        arguments = (
            shard,
            half,
            self.address,
            str(self.folder / name),
            self.kills,
            str(self.folder / f"{name}.log"),
            dict(self._options),
        )
        process = _context.Process(target=_live, args=arguments, daemon=True)
        process.start()
        self._shards[shard, half] = process

    def kill(self, shard: int, half: int = 0) -> None:
        self._shards[shard, half].kill()

    def pid(self, shard: int, half: int = 0) -> int:
        pid = self._shards[shard, half].pid
        assert pid is not None
        return pid

    def _watch(self) -> None:
        while not self._stop.is_set():
            wait([process.sentinel for process in self._shards.values()], timeout=0.1)
            for (shard, half), process in list(self._shards.items()):
                if process.exitcode is None or self._stop.is_set():
                    continue
                if process.exitcode not in (-signal.SIGKILL, GIVEN_UP):
                    log = self.log(shard, half)
                    self.failures.append(f"shard {shard} ended with {process.exitcode}: {log}")
                    return
                if self.restarts:
                    time.sleep(self._pause)
                    self.start(shard, half)
                else:
                    del self._shards[shard, half]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE)
        for process in self._shards.values():
            process.kill()
            process.join(DEADLINE)


# -- what workers do meanwhile -----------------------------------------------------------------------------


def config(consistency: Any, lazy: bool = False) -> Config:
    sync = Sync(timeout="40s", consistency=consistency, slack=1, lazy=lazy)
    return Config(run=Run(strategy="server"), chunks=Chunks(size="4KiB"), sync=sync)


def train(
    place: Place, address: str, consistency: str, lazy: bool, fired: Path, kills: int
) -> dict[str, Any]:
    """What a worker ends with: parameters, the optimizer's state, each chunk's version at its shard.

    Its last iterations are made when all of `kills` have been.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 60), nn.Linear(60, 60), nn.Linear(60, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(ITERATIONS, 2, 3, 20, generator=torch.Generator().manual_seed(1))
    versions: dict[int, int] = {}
    with served_worker(address, place.rank), atoll.join(config(consistency, lazy)) as session:
        session.prepare(model, optimizer)
        shards = session._service.shards  # type: ignore[union-attr]
        staged = shards._handlers[Parameters]

        def look(shard: int, message: Any, payload: memoryview | None) -> None:
            versions[message.chunk] = max(versions.get(message.chunk, 0), message.version)
            staged(shard, message, payload)

        shards.on(Parameters, look)
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
    shards: int = 2,
    lazy: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    with MortalRun(folder, 2, shards, kills, **options) as run:
        results = pool.run(train, run.address, consistency, lazy, folder / "fired", len(kills), world=2)
        assert not run.failures
        assert run.fired == kills
    return results


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for mine, theirs in zip(one["parameters"], other["parameters"], strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(one["state"], other["state"], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine)


def kills_at(point: str) -> list[Kill]:
    """Both shards, one after the other; only shard 0 keeps meetings."""
    other = Kill(0, point, 4) if point == "shard.met" else Kill(1, point, 4, nth=2)
    return [Kill(0, point, 2), other]


def points_of_shards(first: str, but: str = "") -> list[Any]:
    """All points as cases of a test, of which `make test` takes the first, and `make soak` the others."""
    others = [point for point in POINTS_OF_SHARDS if point not in (first, but, *OF_STANDBYS)]
    return [first, *(pytest.param(point, marks=pytest.mark.soak) for point in others)]


def counted(folder: Path) -> dict[str, int]:
    """How many iterations of each worker counted, by the log's word to the hub."""
    told = [json.loads(line) for line in (folder / "hub" / "decisions.jsonl").read_text().splitlines()]
    return {
        each["choice"].partition(",")[0]: int(each["reason"].split()[0])
        for each in told
        if each["what"] == "fenced"
    }
