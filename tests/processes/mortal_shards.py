"""Shards as processes that are killed at points of their code and started again in their folders; each may be
held twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from losing import LosingServer
from mortal import DEADLINE, Mortal, begin_life, train_in

from atoll.core import points
from atoll.core.errors import GivenUpError
from atoll.hub.planner import GroupingSettings
from atoll.server import main as server
from atoll.server.options import ServerOptions
from support.pool import WorkerPool
from support.served import RUN

GIVEN_UP = GivenUpError.exit_status
POINTS_OF_SHARDS = sorted(point for point in points.POINTS if point.startswith("shard."))
OF_STANDBYS = ("shard.copied", "shard.held", "shard.promoted")  # where shards have standbys


def name_of(shard: int, half: int = 0) -> str:
    return f"shard-{shard}{'-second' if half else ''}"


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a shard at the `nth` time that it reaches a point in an iteration (or later); where shards
    are held twice, for the first or the second process of it."""

    shard: int
    point: str
    iteration: int
    nth: int = 1
    half: int = 0

    @property
    def who(self) -> str:
        return name_of(self.shard, self.half)


def _live(
    who: str, shard: int, address: str, folder: Path, kills: Sequence[Kill], options: dict[str, Any]
) -> None:
    """A shard's life, in a process of its own."""
    begin_life(who, folder, kills)
    if "loses" in options:  # this process is of this shard alone
        server.TunnelServer = partial(LosingServer, options.pop("loses"))  # type: ignore[misc, assignment]
    try:
        server.serve(
            ServerOptions(
                hub=address,
                shard=shard,
                run=RUN,
                directory=str(folder / who) if options.pop("keeps", True) else "",
                timeout=DEADLINE,
                **options,
            ),
            goes_on=lambda line: print(line, flush=True),
        )
    except GivenUpError as error:
        print(f"atoll: {error}", flush=True)
        os._exit(error.exit_status)


class MortalRun(Mortal[Kill]):
    """A hub on a thread, and shards as processes, each `replicas` times; a shard that is killed is started
    again, `pause` seconds later. `options` go to `serve`; `keeps` is whether shards have directories, and
    `loses` what their links lose (losing.py)."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        shards: int,
        kills: Sequence[Kill] = (),
        pause: float = 0.0,
        replicas: int = 1,
        patience: float = 10.0,
        grouping: GroupingSettings | None = None,
        **options: Any,
    ) -> None:
        super().__init__(folder, workers, shards, kills, patience, replicas=replicas, grouping=grouping)
        self._replicas, self._pause, self._options = replicas, pause, options
        self.restarts = True  # of shards that are killed
        self._places = {name_of(shard, half): shard for half in range(replicas) for shard in range(shards)}

    def log(self, shard: int, half: int = 0) -> str:
        return (self.folder / f"{name_of(shard, half)}.log").read_text()

    def _begin_all(self) -> None:
        for half in range(self._replicas):
            for shard in range(self._shards):
                self.start(shard, half)
            if half + 1 < self._replicas:  # who comes first is the primary
                self.wait_for_decisions("shard joined", self._shards)

    def wait_for_decisions(self, what: str, count: int = 1, choice: str = "") -> None:
        until = time.monotonic() + DEADLINE
        while sum(each["what"] == what and choice in each["choice"] for each in self.decisions()) < count:
            assert time.monotonic() < until, (
                f"{count} of {what!r} {choice!r} did not come: {self.decisions()}"
            )
            assert not self.failures
            time.sleep(0.01)

    def start(self, shard: int, half: int = 0) -> None:
        self._begin(name_of(shard, half))

    def kill(self, shard: int, half: int = 0) -> None:
        self._processes[name_of(shard, half)].kill()

    def pid(self, shard: int, half: int = 0) -> int:
        pid = self._processes[name_of(shard, half)].pid
        assert pid is not None
        return pid

    def _life(self, who: str) -> tuple[Callable[..., None], tuple[Any, ...]]:
        shard = self._places[who]
        return _live, (who, shard, self.address, self.folder, self.kills, dict(self._options))

    def _goes_on(self, who: str, code: int) -> bool | None:
        if code not in (-signal.SIGKILL, GIVEN_UP):
            return None
        if self.restarts:
            time.sleep(self._pause)
        return self.restarts


def run_with(
    pool: WorkerPool,
    folder: Path,
    kills: list[Kill],
    consistency: str = "bsp",
    shards: int = 2,
    lazy: bool = False,
    tiers: bool = False,
    loads: bool = False,
    muon: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    run = MortalRun(folder, 2, shards, kills, **options)
    return train_in(run, pool, 2, consistency, lazy, tiers=tiers, loads=loads, muon=muon)


def kills_at(point: str) -> list[Kill]:
    """Both shards, one after the other; only shard 0 keeps meetings."""
    other = Kill(0, point, 4) if point == "shard.met" else Kill(1, point, 4, nth=2)
    return [Kill(0, point, 2), other]


def points_of_shards(first: str, but: str = "") -> list[Any]:
    """All points as cases of a test, of which `make test` takes the first, and `make soak` the others."""
    others = [point for point in POINTS_OF_SHARDS if point not in (first, but, *OF_STANDBYS)]
    return [first, *(pytest.param(point, marks=pytest.mark.soak) for point in others)]
