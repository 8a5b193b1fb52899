"""(d) The parameter server: its exchange against Gloo's all-reduce, and workers of uneven speed.

    python benchmarks/server.py [--quick]

Hub and shards are processes of their own, started as a user would (`atoll hub`, `atoll server`). Two worker
processes, with one torch thread each, take turns on all exchanges: Gloo's all-reduce between the two, by
itself and with the step that the shard makes, worker 0 alone with one shard (unsealed, and sealed with
CURVE), and both workers with two shards. A turn's time is that of its slowest worker. Afterwards four
workers, one of them four times slower, train under asp and bsp.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import KEYS_VARIABLE, Chunks, Config, Run, Sync
from atoll.net.keys import make_keys, write_keys
from atoll.train.api.place import Place
from common import (
    Case,
    Target,
    Timings,
    compare,
    interleave,
    leave_group,
    options,
    over_workers,
    write_ratios,
)
from support.pool import WorkerPool
from support.served import RUN, served_worker
from workloads import digits_network, fetch_newest

TARGET = Target(median=1.00, bound95=1.03)
PARAMETERS, SIZE = 25, 1_000_000  # 100 MB of float32, in chunks of one parameter each
CHUNK = "4MiB"
LR = 0.01
PAIRS, WARM_UP = 60, 4
GLOO, STEPPED = "Gloo's all-reduce", "Gloo's all-reduce and a step"
ONE, SEALED, KEPT, TWO = "one shard", "one shard, CURVE", "one shard, journal", "two shards, two workers"

COMPUTE = (0.04, 0.04, 0.04, 0.16)  # seconds that a worker's forward and backward take
BATCH = 32
SECONDS = 20.0  # of training that are measured
STEPS_BEFORE = 5
OF_THE_SUM = 0.9  # of the workers' own speeds, asked of asp
DEADLINE = 240.0
START_SECONDS = 60.0

_COMMAND = [sys.executable, "-c", "from atoll.cli.app import main; main()"]


# -- hub and shards ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """How workers find a run's servers, and the shards' processes."""

    hub: str
    keys: str
    shards: tuple[int, ...]  # process ids

    @contextmanager
    def joined(self, rank: int, config: Config) -> Any:
        """A session of the run, as worker `rank`."""
        with mock.patch.dict(os.environ, {KEYS_VARIABLE: self.keys}), served_worker(self.hub, rank):
            session = atoll.join(config)
        with session:
            yield session


class Servers:
    """Hub and shards, each a process, while entered."""

    def __init__(self, workers: int, shards: int, sealed: bool = False, kept: bool = False) -> None:
        """`kept`: each shard has a folder for its journal and snapshots."""
        self._workers, self._shards, self._sealed, self._kept = workers, shards, sealed, kept
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> Address:
        folder = Path(self._folder.name)
        keys = folder / "keys" if self._sealed else None
        if keys is not None:
            write_keys(keys, make_keys())
        common = ["--key-file", str(keys)] if keys is not None else []
        hub = ["hub", "--workers", str(self._workers), "--shards", str(self._shards), "--run", RUN]
        self._start([*hub, "--listen", "tcp://127.0.0.1:0", "--directory", str(folder), *common])
        address = self._listening(folder / "hub.address")
        for shard in range(self._shards):
            own = ["--directory", str(folder / f"shard-{shard}")] if self._kept else []
            self._start(["server", "--shard", str(shard), "--hub", address, *own, *common])
        return Address(address, str(keys or ""), tuple(process.pid for process in self._processes[1:]))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(timeout=30)
        self._folder.cleanup()

    def _start(self, arguments: Sequence[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._processes.append(
            subprocess.Popen([*_COMMAND, *arguments], env=environment, stdout=subprocess.DEVNULL)
        )

    def _listening(self, path: Path) -> str:
        until = time.monotonic() + START_SECONDS
        while not path.exists():
            if time.monotonic() > until or self._processes[0].poll() is not None:
                raise SystemExit("the hub did not start")
            time.sleep(0.05)
        return path.read_text(encoding="utf-8").strip()


def settings(consistency: Any) -> Config:
    return Config(
        run=Run(strategy="server"),
        chunks=Chunks(size=CHUNK),
        # The look at gradients for NaN is no part of an exchange.
        sync=Sync(timeout="60s", consistency=consistency, nonfinite="allow"),
    )


# -- the exchange against Gloo -----------------------------------------------------------------------------


class Parameters(nn.Module):
    """100 MB of parameters, whose gradients are all 1."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ParameterList(torch.zeros(SIZE) for _ in range(PARAMETERS))

    def forward(self, one: Tensor) -> Tensor:
        total: Tensor = one * torch.stack([p.sum() for p in self.each]).sum()
        return total


class Exchange:
    """What is timed: `optimizer.step()`, in which a contribution is pushed, committed and stepped with, and
    the new parameters are pulled and published. Backward is not timed."""

    def __init__(self, session: atoll.Session) -> None:
        self._session = session
        self.model = Parameters()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        session.prepare(self.model, self.optimizer)
        self._ready = False
        self.steps = 0

    def make_ready(self) -> None:
        """Have new gradients, unless there are some."""
        if not self._ready:
            self.optimizer.zero_grad()
            self.model(torch.ones(1)).sum().backward()
            self._ready = True

    def __call__(self, _pair: int) -> None:
        self.optimizer.step()
        self._ready = False
        self.steps += 1

    def check(self, within: float) -> None:
        """Every contribution moved the parameters; `within`: a part, by which staleness may slow them."""
        fetch_newest(self._session)
        moved = -LR * self.steps
        for parameter in self.model.parameters():
            if not torch.allclose(parameter, torch.tensor(moved), rtol=within):
                raise RuntimeError(f"{self.steps} steps made {parameter.max().item()} in place of {moved}")


def time_exchanges(place: Place, runs: dict[str, Address], pairs: int) -> dict[str, Timings]:
    """One worker's turns. Worker 0 counts the shards' CPU seconds as its own."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=place.store, rank=place.rank, world_size=place.world)
    reduced = torch.zeros(PARAMETERS * SIZE)
    stepped = torch.optim.SGD([nn.Parameter(torch.zeros(SIZE)) for _ in range(PARAMETERS)], lr=LR)
    for index, parameter in enumerate(stepped.param_groups[0]["params"]):
        parameter.grad = reduced[index * SIZE : (index + 1) * SIZE]

    def reduce_and_step(_pair: int) -> None:
        dist.all_reduce(reduced)
        stepped.step()

    contestants: dict[str, Callable[[int], object]] = {
        GLOO: lambda _: dist.all_reduce(reduced),
        STEPPED: reduce_and_step,
    }
    exchanges: list[Exchange] = []
    with ExitStack() as stack:
        for name, run in runs.items():
            contestants[name] = lambda _: None  # a worker that has no part in it
            if place.rank == 0 or name == TWO:
                session = stack.enter_context(run.joined(place.rank, settings("asp")))
                contestants[name] = exchange = Exchange(session)
                exchanges.append(exchange)

        def fence() -> None:
            for exchange in exchanges:
                exchange.make_ready()
            dist.barrier()

        shards = [shard for run in runs.values() for shard in run.shards] if place.rank == 0 else []
        interleave(contestants, WARM_UP, seed=0, fence=fence)
        timings = interleave(contestants, pairs, seed=1, fence=fence, cpu=lambda: cpu_seconds(shards))
        dist.barrier()
        for exchange in exchanges:
            exchange.check(1e-3 if exchange is not contestants[TWO] else 0.5)
        dist.barrier()
    leave_group()
    return timings


def cpu_seconds(others: Sequence[int]) -> float:
    """Spent so far by this process and the processes `others`; for those, on Linux alone."""
    if not sys.platform.startswith("linux"):
        return time.process_time()
    # How clock_getcpuclockid makes a process's clock of its id.
    return time.process_time() + sum(time.clock_gettime((~other << 3) | 2) for other in others)


def compare_exchanges(pool: WorkerPool, quick: bool) -> list[Case]:
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(Servers(workers, shards, sealed, kept))
            for name, workers, shards, sealed, kept in (
                (ONE, 1, 1, False, False),
                (SEALED, 1, 1, True, False),
                (KEPT, 1, 1, False, True),
                (TWO, 2, 2, False, False),
            )
        }
        timings = over_workers(pool.run(time_exchanges, runs, 4 if quick else PAIRS, world=2))
    cases = [
        ("push and pull of 100 MB", ONE, GLOO, 1, TARGET),
        ("push, step and pull of 100 MB", ONE, STEPPED, 1, None),
        ("the same under CURVE", SEALED, GLOO, 1, None),
        ("push, step and pull with a journal", KEPT, ONE, 1, None),
        (TWO, TWO, ONE, 2, None),
    ]
    return [
        compare(name, rival, timings[own], timings[rival], workers=workers, steps=1, target=target, threads=1)
        for name, own, rival, workers, target in cases
    ]


# -- workers of uneven speed -------------------------------------------------------------------------------


def train(place: Place, run: Address, consistency: Any, seconds: float) -> float:
    """One worker's samples per second, over about `seconds`."""
    compute = COMPUTE[place.rank]
    draw = torch.Generator().manual_seed(0)
    count = 2**17  # more samples than are used: no epoch ends
    data = TensorDataset(torch.randn(count, 64, generator=draw), torch.randint(10, (count,), generator=draw))
    steps = STEPS_BEFORE + round(seconds / max(COMPUTE))  # under bsp, where all must make equally many
    with run.joined(place.rank, settings(consistency)) as session:
        model = digits_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        session.prepare(model, optimizer)
        loader = DataLoader(data, BATCH, sampler=session.sampler(data))
        began, samples = 0.0, 0
        batches = iter(loader)
        while True:
            if session.iteration == STEPS_BEFORE:
                session.barrier()
                began, samples = time.monotonic(), 0
            x, y = next(batches)
            begun = time.monotonic()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            time.sleep(max(0.0, begun + compute - time.monotonic()))
            optimizer.step()
            optimizer.zero_grad()
            samples += len(x)
            over = session.iteration == steps if consistency == "bsp" else time.monotonic() > began + seconds
            if over and session.iteration > STEPS_BEFORE:
                return samples / (time.monotonic() - began)


@dataclass(frozen=True)
class SpeedCase:
    """Samples per second of workers of uneven speed, all together."""

    consistency: str
    speeds: list[float]  # by worker
    alone: list[float]  # the same, if nothing but their computing took time
    target: float | None  # a part of the sum of `alone`

    @property
    def part(self) -> float:
        return sum(self.speeds) / sum(self.alone)

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.part >= self.target

    def line(self) -> str:
        verdict = f"target {self.target}: {'met' if self.met else 'MISSED'}" if self.target else "no target"
        each = ", ".join(f"{speed:.0f}" for speed in self.speeds)
        return (
            f"{len(self.speeds)} workers, one 4x slow, {self.consistency}: {sum(self.speeds):.0f} samples/s "
            f"({each}), {self.part:.3f} of the sum of their speeds, {sum(self.alone):.0f}; {verdict}"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "part": round(self.part, 4), "met": self.met}


def measure_speeds(pool: WorkerPool, quick: bool) -> list[SpeedCase]:
    cases = []
    for consistency, target in (("asp", OF_THE_SUM), ("bsp", None)):
        with Servers(len(COMPUTE), 1) as run:
            seconds = 3.0 if quick else SECONDS
            speeds = pool.run(train, run, consistency, seconds, world=len(COMPUTE))
        cases.append(SpeedCase(consistency, speeds, [BATCH / each for each in COMPUTE], target))
    return cases


def main() -> int:
    args = options(__doc__).parse_args()
    with WorkerPool(DEADLINE) as pool:
        speeds = measure_speeds(pool, args.quick)
        print("\n".join(speed.line() for speed in speeds), flush=True)
        cases = compare_exchanges(pool, args.quick)
        print("\n".join(case.line() for case in cases), flush=True)
    records = [each.to_json() for each in (*cases, *speeds)]
    title = "A push and pull of 100 MB through the parameter server"
    write_ratios("server", args, cases, title, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
