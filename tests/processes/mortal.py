"""Processes that are killed at points of their code and started again, and what workers train meanwhile.

Each life of a process is a fork of one that has imported torch, so that a case costs no import.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from transports import LINK

import atoll
from atoll.core import points
from atoll.core.config import Chunks, Config, LinkOptions, Run, Sync
from atoll.core.memory import Memory
from atoll.hub import main as hub
from atoll.hub.options import HubOptions
from atoll.train.api.place import Place
from atoll.wire.messages import Parameters
from support.pool import FORKSERVER, WorkerPool
from support.served import RUN, served_worker

DEADLINE = 60.0
ITERATIONS = 8
NAMES = ("paris", "berlin")  # of sites


class Fatal(Protocol):
    """SIGKILL for `who` at the `nth` time that it reaches a point in an iteration (or later)."""

    @property
    def who(self) -> str: ...

    @property
    def point(self) -> str: ...

    @property
    def iteration(self) -> int: ...

    @property
    def nth(self) -> int: ...


K = TypeVar("K", bound=Fatal)
M = TypeVar("M", bound="Mortal[Any]")


def begin_life(who: str, folder: Path, kills: Sequence[Fatal]) -> None:
    """In a process of its own: it writes to its log, and dies when it is to."""
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


class Mortal(ABC, Generic[K]):
    """A hub on a thread, and shards as processes, which are started again when they are killed. `options` go
    to `hub.serve`."""

    def __init__(
        self, folder: Path, workers: int, shards: int, kills: Sequence[K], patience: float, **options: Any
    ) -> None:
        self.folder, self.kills = folder, list(kills)
        self._workers, self._shards, self._patience, self._of_hub = workers, shards, patience, options
        self.address = ""
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._processes: dict[str, BaseProcess] = {}
        self._threads: list[threading.Thread] = []

    @abstractmethod
    def _begin_all(self) -> None:
        """Start all processes, once the hub listens."""

    @abstractmethod
    def _life(self, who: str) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """What a process runs, and with which arguments."""

    @abstractmethod
    def _goes_on(self, who: str, code: int) -> bool | None:
        """Whether a process that has ended like this is started again; None: it should not have ended."""

    @property
    def fired(self) -> list[K]:
        return [self.kills[int(path.name)] for path in sorted((self.folder / "fired").iterdir())]

    def decisions(self) -> list[dict[str, Any]]:
        return decisions(self.folder)

    def wait_until_fenced(self, names: Sequence[str]) -> None:
        """Wait until the logs have told the hub how many iterations of each have counted: they do so after
        it has said goodbye, when its results may long be here."""
        until = time.monotonic() + DEADLINE
        while missing := set(names) - set(counted(self.folder)):
            assert not self.failures
            assert time.monotonic() < until, f"not fenced: {sorted(missing)}; {self.decisions()}"
            time.sleep(0.01)

    def __enter__(self: M) -> M:
        (self.folder / "fired").mkdir(parents=True)
        listening = threading.Event()

        def ready(address: str) -> None:
            self.address = address
            listening.set()

        self._start(
            lambda: hub.serve(
                HubOptions(
                    listen="tcp://127.0.0.1:0",
                    run=RUN,
                    workers=self._workers,
                    shards=self._shards,
                    directory=str(self.folder / "hub"),
                    patience=self._patience,
                    heartbeat=0.25,
                    **{key: value for key, value in self._of_hub.items() if key != "grouping"},
                ),
                self._of_hub.get("grouping"),
                until=self._stop.is_set,
                ready=ready,
            )
        )
        assert listening.wait(DEADLINE), self.failures
        self._begin_all()
        self._start(self._watch)
        return self

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
        live, arguments = self._life(who)
        process = FORKSERVER.Process(target=live, args=arguments, daemon=True)
        process.start()
        self._processes[who] = process

    def _watch(self) -> None:
        while not self._stop.is_set():
            wait([process.sentinel for process in self._processes.values()], timeout=0.1)
            for who, process in list(self._processes.items()):
                code = process.exitcode
                if code is None or self._stop.is_set():
                    continue
                again = self._goes_on(who, code)
                if again is None:
                    log = (self.folder / f"{who}.log").read_text()
                    self.failures.append(f"{who} ended with {code}: {log}")
                    return
                if again:
                    self._begin(who)
                else:
                    del self._processes[who]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE)
        for process in self._processes.values():
            process.kill()
            process.join(DEADLINE)


def decisions(folder: Path) -> list[dict[str, Any]]:
    """What the hub of a run has decided."""
    path = folder / "hub" / "decisions.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def counted(folder: Path) -> dict[str, int]:
    """How many iterations of each worker, and each site, counted, by the logs' words to the hub."""
    return {
        each["choice"].partition(",")[0]: int(each["reason"].split()[0])
        for each in decisions(folder)
        if each["what"] == "fenced"
    }


# -- what workers do meanwhile -----------------------------------------------------------------------------


def config(consistency: Any, lazy: bool = False, tiers: bool = False) -> Config:
    sync = Sync(timeout="40s", consistency=consistency, slack=1, lazy=lazy)
    run, link = Run(strategy="server"), LinkOptions() if tiers else LINK
    memory = Memory(device="24KiB", chunk="4KiB", step="host") if tiers else Memory()
    return Config(run=run, chunks=Chunks(size="4KiB"), sync=sync, link=link, memory=memory)


def site_of(rank: int, sites: int) -> str:
    """The site of a worker; of none, where there are none."""
    return NAMES[rank % sites] if sites else ""


def train(
    place: Place,
    address: str,
    consistency: str,
    fired: Path,
    kills: int,
    lazy: bool = False,
    edits: bool = False,
    sites: int = 0,
    tiers: bool = False,
    loads: bool = False,
    muon: bool = False,
) -> dict[str, Any]:
    """What a worker ends with: parameters, the optimizer's state, each chunk's version at its shard.

    Its last iterations are made when all of `kills` have been. `edits`: gradients of the mean are changed.
    `tiers`: under budgets of memory, of half of the parameters. `loads`: the script changes the optimizer's
    state before the fourth iteration. `muon`: the model has matrices alone, which Muon steps as wholes.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*sizes, bias=not muon) for sizes in ((20, 60), (60, 60), (60, 30))))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if muon:
        optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    data = torch.randn(ITERATIONS, place.world, 3, 20, generator=torch.Generator().manual_seed(1))
    versions: dict[int, int] = {}
    with (
        served_worker(address, place.rank, site=site_of(place.rank, sites)),
        atoll.join(config(consistency, lazy, tiers)) as session,
    ):
        session.prepare(model, optimizer)
        shards = session._runtime.member.shards  # type: ignore[union-attr]
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
            if iteration == 3 and loads:
                state = copy.deepcopy(optimizer.state_dict())
                state["param_groups"][0]["lr"] = 0.02
                for each in state["state"].values():
                    each["exp_avg"].neg_()
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            model(data[iteration, place.rank]).square().mean().backward()
            session.clip_grad_norm_(1.0)
            if edits:
                model[0].weight.grad.mul_(0.5)  # type: ignore[union-attr, operator]
            optimizer.step()
        session.barrier()
        state = optimizer.state_dict()["state"]
        return {
            "parameters": [parameter.detach().clone() for parameter in model.parameters()],
            "state": [
                {key: torch.as_tensor(value).clone() for key, value in state[index].items()}
                for index in sorted(state)
            ],
            "versions": versions,
            "came_back": shards.come_back,
        }


def train_in(
    run: Mortal[Any],
    pool: WorkerPool,
    workers: int,
    consistency: str,
    lazy: bool = False,
    edits: bool = False,
    sites: int = 0,
    tiers: bool = False,
    loads: bool = False,
    muon: bool = False,
) -> list[dict[str, Any]]:
    """What each worker ends with, when all kills of this run have been."""
    with run:
        arguments = (
            run.address,
            consistency,
            run.folder / "fired",
            len(run.kills),
            lazy,
            edits,
            sites,
            tiers,
            loads,
            muon,
        )
        results = pool.run(train, *arguments, world=workers)
        assert not run.failures
        assert run.fired == run.kills
        run.wait_until_fenced([f"worker {rank}" for rank in range(workers)])
    return results


def assert_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for mine, theirs in zip(one["parameters"], other["parameters"], strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(one["state"], other["state"], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine)
