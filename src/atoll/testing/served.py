"""A parameter server inside a test's own process: hub and shards on threads, workers wherever they are.

    with ServedRun(workers=2, shards=2) as served:
        pool.run(train, served.address, world=2)

and in `train(place, address)`: `with served_worker(address, place.rank): session = atoll.join(config)`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from unittest import mock

from atoll.core.config import HUB_VARIABLE, KEYS_VARIABLE, RANK_VARIABLE, RUN_VARIABLE
from atoll.core.errors import DeadlineError
from atoll.hub import main as hub
from atoll.server import main as server

RUN = "test"
START_SECONDS = 30.0
STOP_SECONDS = 10.0


class ServedRun:
    """Hub and shards, while entered; `address` is the hub's. `failures` are what ended one too early."""

    def __init__(
        self,
        workers: int,
        shards: int = 1,
        *,
        patience: float = 10.0,
        heartbeat: float = 0.5,
        folder: Path | None = None,
        keys: Path | None = None,
    ) -> None:
        """`patience` and `heartbeat` as the hub's; `folder` gets what hub and shards keep; `keys` is a key
        file."""
        self._keys = keys
        self._workers, self._shards = workers, shards
        self._patience, self._heartbeat, self._folder = patience, heartbeat, folder
        self.address = ""
        self.failures: list[BaseException] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> ServedRun:
        listening = threading.Event()

        def at(address: str) -> None:
            self.address = address
            listening.set()

        self._start(
            lambda: hub.serve(
                "tcp://127.0.0.1:0",
                self._keys,
                RUN,
                self._workers,
                self._shards,
                self._folder,
                self._patience,
                self._heartbeat,
                until=self._stop.is_set,
                ready=at,
            )
        )
        if not listening.wait(START_SECONDS):
            raise DeadlineError(f"the hub did not listen within {START_SECONDS:g} s: {self.failures}")
        for index in range(self._shards):
            self._start(lambda index=index: self._serve(index))  # type: ignore[misc]
        return self

    def _serve(self, index: int) -> None:
        folder = self._folder / f"shard-{index}" if self._folder is not None else None
        server.serve(
            index,
            self.address,
            keys_file=self._keys,
            run=RUN,
            folder=folder,
            timeout=START_SECONDS,
            stop=self._stop,
        )

    def _start(self, serve: Callable[[], None]) -> None:
        def run() -> None:
            try:
                serve()
            except BaseException as error:
                self.failures.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End hub and shards, as if their machine were gone."""
        self._stop.set()
        until = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


@contextlib.contextmanager
def served_worker(address: str, rank: int, keys: Path | None = None) -> Iterator[None]:
    """Within it `atoll.join` with strategy `server` joins the run at `address`, as `rank`."""
    variables = {HUB_VARIABLE: address, RUN_VARIABLE: RUN, RANK_VARIABLE: str(rank)}
    if keys is not None:
        variables[KEYS_VARIABLE] = str(keys)
    with mock.patch.dict(os.environ, variables):
        yield
