"""Shards as processes that are killed at points of their code and started again in their folders.

A fork server imports torch once; each life of a shard is a fork of it, so that a case costs no import.
"""

from __future__ import annotations

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

from atoll.core import points
from atoll.hub import main as hub
from atoll.server import main as server
from atoll.testing.served import RUN

DEADLINE = 60.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["mortal_shards", "atoll.server.main"])


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a shard at the `nth` time that it reaches a point in an iteration (or later)."""

    shard: int
    point: str
    iteration: int
    nth: int = 1


def _live(
    index: int, address: str, folder: str, kills: Sequence[Kill], log: str, options: dict[str, Any]
) -> None:
    """A shard's life, in a process of its own."""
    reached: dict[int, int] = {}
    fired = Path(folder).parent / "fired"

    def strike(point: str, iteration: int) -> None:
        for number, kill in enumerate(kills):
            late = iteration >= kill.iteration or iteration == -1
            if kill.shard != index or kill.point != point or not late or (fired / str(number)).exists():
                continue
            reached[number] = reached.get(number, 0) + 1
            if reached[number] == kill.nth:
                (fired / str(number)).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    points.install(strike)
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    server.serve(
        index,
        address,
        run=RUN,
        folder=folder,
        timeout=DEADLINE,
        goes_on=lambda line: print(line, flush=True),
        **options,
    )


class MortalRun:
    """A hub on a thread, and shards as processes; a shard that is killed is started again, `pause` seconds
    later. `options` go to `serve`."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        shards: int,
        kills: Sequence[Kill] = (),
        pause: float = 0.0,
        **options: Any,
    ) -> None:
        self.folder, self._workers, self._count = folder, workers, shards
        self.kills, self._pause, self._options = list(kills), pause, options
        self.address = ""
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._shards: dict[int, BaseProcess] = {}
        self._threads: list[threading.Thread] = []

    @property
    def fired(self) -> list[Kill]:
        return [self.kills[int(path.name)] for path in sorted((self.folder / "fired").iterdir())]

    def log(self, shard: int) -> str:
        return (self.folder / f"shard-{shard}.log").read_text()

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
                10.0,
                0.25,
                until=self._stop.is_set,
                ready=ready,
            )
        )
        assert listening.wait(DEADLINE), self.failures
        for shard in range(self._count):
            self.start(shard)
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

    def start(self, shard: int) -> None:
        arguments = (
            shard,
            self.address,
            str(self.folder / f"shard-{shard}"),
            self.kills,
            str(self.folder / f"shard-{shard}.log"),
            self._options,
        )
        process = _context.Process(target=_live, args=arguments, daemon=True)
        process.start()
        self._shards[shard] = process

    def kill(self, shard: int) -> None:
        self._shards[shard].kill()

    def _watch(self) -> None:
        while not self._stop.is_set():
            wait([process.sentinel for process in self._shards.values()], timeout=0.1)
            for shard, process in list(self._shards.items()):
                if process.exitcode is None or self._stop.is_set():
                    continue
                if process.exitcode != -signal.SIGKILL:
                    self.failures.append(f"shard {shard} ended with {process.exitcode}: {self.log(shard)}")
                    return
                time.sleep(self._pause)
                self.start(shard)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE)
        for process in self._shards.values():
            process.kill()
            process.join(DEADLINE)
