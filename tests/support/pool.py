"""Worker processes that stay, and run one job after another: importing torch costs seconds, a job does not.

    with WorkerPool() as pool:
        losses = pool.run(train, "gpt", world=3)     # [train(place, "gpt") of ranks 0, 1, 2]

Each job gets a `Place` whose store is fresh, so that jobs never see one another. Workers are forked from a
process that has imported torch, once: where a job kills them, the next ones cost no import either.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from atoll.core.errors import DeadlineError, RunError
from atoll.tensors.torch_compat import SLOW_IMPORT
from atoll.train.api.place import Place
from support.cpu_sides import fork_cpu_sides

# For all processes of tests that need torch. There is one fork server a process, and who forks first says
# what it imports.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload([SLOW_IMPORT, "atoll.server.main", "atoll.train.api.session"])

LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=120)
_END_SECONDS = 10.0  # for a process that was killed, or has closed its connection, to end


def ring_of_one() -> Place:
    """The place of a ring's only member: everything that a ring does, in one process."""
    return Place(rank=0, world=1, store=HashStore())


@dataclass(frozen=True)
class Failure:
    """How one worker's part of a job failed."""

    rank: int
    kind: str  # the exception's class, by name
    message: str
    traceback: str


class JobFailedError(RunError):
    """Some workers' parts of a job raised; `failures` has each, by rank."""

    def __init__(self, failures: dict[int, Failure]) -> None:
        self.failures = failures
        parts = [f"rank {f.rank}: {f.kind}: {f.message}\n{f.traceback}" for f in failures.values()]
        super().__init__("\n".join(parts))


@dataclass
class _Worker:
    process: ForkServerProcess
    connection: Connection


class WorkerPool:
    """Starts workers as jobs need them. A job that passes its deadline, or kills a worker, ends all of
    them, and the next job starts new ones. Workers have the environment that this process had when the first
    one of all was started.
    """

    def __init__(self, deadline: float = 120.0) -> None:
        self.deadline = deadline  # seconds that a job may take, unless it says otherwise
        self._workers: list[_Worker] = []
        self._store: TCPStore | None = None
        self._jobs = 0

    def run(
        self, function: Callable[..., Any], *arguments: Any, world: int, deadline: float | None = None
    ) -> list[Any]:
        """`function(place, *arguments)` in `world` processes at once; what each returned, by rank.

        `function` and the arguments are pickled: a function of a module, not a lambda.
        Raises JobFailedError if any part raised, DeadlineError if it took longer than `deadline` seconds.
        """
        self.submit(function, *arguments, world=world, deadline=deadline)
        return self.collect()

    def submit(
        self, function: Callable[..., Any], *arguments: Any, world: int, deadline: float | None = None
    ) -> None:
        """Start a job; `collect` waits for it. Meanwhile the caller can compute what to expect."""
        self._start(world)
        self._jobs += 1
        span = self.deadline if deadline is None else deadline
        self._waited = (world, span, time.monotonic() + span, getattr(function, "__name__", str(function)))
        for rank, worker in enumerate(self._workers[:world]):
            worker.connection.send((self._jobs, rank, world, span, function, arguments))

    def collect(self) -> list[Any]:
        """What the submitted job's parts returned, by rank; raises as `run` does."""
        world, span, deadline, name = self._waited
        results: dict[int, Any] = {}
        while len(results) < world:
            late = {self._workers[rank].connection: rank for rank in range(world) if rank not in results}
            ready = wait(list(late), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise DeadlineError(f"{name}: no answer of ranks {sorted(late.values())} in {span:g} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                results[late[connection]] = self._receive(late[connection], connection, name)
        failures = {rank: r for rank, r in sorted(results.items()) if isinstance(r, Failure)}
        if failures:
            raise JobFailedError(failures)
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        """End every worker, busy or not."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(_END_SECONDS)
        self._workers = []
        self._store = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, world: int) -> None:
        if self._store is None:
            self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < world:
            ours, theirs = FORKSERVER.Pipe()
            # No daemon: a script's DataLoader starts processes of its own.
            process = FORKSERVER.Process(target=_serve, args=(theirs, self._store.port))
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))

    def _receive(self, rank: int, connection: Connection, name: str) -> Any:
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._workers[rank].process
            process.join(_END_SECONDS)
            ended = f"ended with exit code {process.exitcode}"
            if process.exitcode is None:
                ended = f"closed its connection, and has not ended within {_END_SECONDS:g} s"
            self.close()
            raise RunError(f"{name}: worker {rank} {ended}") from None


def _serve(connection: Connection, port: int) -> None:
    """A worker's life: jobs until the pool closes its end of the pipe."""
    torch.set_num_threads(1)
    fork_cpu_sides()
    store = TCPStore(LOOPBACK, port, is_master=False, timeout=_STORE_TIMEOUT)
    while True:
        try:
            job, rank, world, span, function, arguments = connection.recv()
        except EOFError:
            return
        place = Place(rank=rank, world=world, local_rank=rank, store=PrefixStore(f"job-{job}", store))
        store.set_timeout(_STORE_TIMEOUT)  # a process group of the job before has left its own there
        faulthandler.dump_traceback_later(0.9 * span)  # a job that hangs says where
        counters.clear()  # a job begins as in a process that has compiled nothing
        result: Any
        try:
            result = function(place, *arguments)
        except Exception as error:
            result = Failure(rank, type(error).__name__, str(error), traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        connection.send(result)
