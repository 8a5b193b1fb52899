"""(h) What it costs to be ready for faults that do not come: a ring through a hub against one without.

    python benchmarks/readiness.py [--quick] [--workers 2 3 4]

A ring that met at a hub goes on when it loses a member. For that each iteration ends with a confirmation,
which nobody passes before all hold its result, and workers send heartbeats. Each worker here has three
sessions: one through a hub; one without, as torchrun starts it, which has no confirmations; and one through a
hub whose members could not connect for confirmations, so that each is an all-reduce. They train copies of the
same model in turns, on the same batches, with one torch thread a worker. A turn's time is that of its slowest
worker. What a confirmation takes is timed inside the turns, on worker 0: it has the waiting for the slowest
in it, for whom the next collective would wait otherwise. What the heartbeats take is the CPU time of their
thread.

Memory is a worker's peak in processes of their own, as in benchmarks/footprint.py: of a ring without a hub,
of one through a hub, and of one that makes an iteration again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

import atoll
from atoll.core import points
from atoll.core.config import HUB_VARIABLE, RANK_VARIABLE, Config
from atoll.train.api.place import Place
from atoll.train.group.channel import BrokenRingError
from atoll.train.group.confirmation import Confirmations
from atoll.train.group.rounds import Ring
from common import (
    MIB,
    Case,
    Target,
    Timings,
    compare,
    group_options,
    interleave,
    leave_group,
    measured_by,
    over_group,
    pairs_of_group,
    recorded,
    torchrun,
    write_ratios,
)
from footprint import OPTIMIZERS, SHAPES, WITHIN, Optimizer, Resident, Shape, formula_of, train
from survival import free_port, service
from workloads import DIGITS, GPT_FUSED, GPT_SMALL_BATCH, TINY, Block, Workload

TARGET = Target(median=1.01)  # at most 1 % of a step
WORKERS = (2, 3, 4)
CASES: list[tuple[Workload, Target | None]] = [
    (GPT_FUSED, TARGET),
    (GPT_SMALL_BATCH, TARGET),
    (DIGITS, None),  # what a confirmation costs does not depend on the model: in short steps it shows
    (TINY, None),
]
PAIRS = {GPT_FUSED.name: 120, GPT_SMALL_BATCH.name: 160, DIGITS.name: 160, TINY.name: 160}  # with 2 workers
BUILDINGS = 2
WARM_UP = 8  # turns that are not measured
HUB, PLAIN, BY_SUMS = "through a hub", "a ring without a hub", "through a hub, confirming by all-reduce"
CONTESTANTS = (HUB, PLAIN, BY_SUMS)


# -- what is measured beside the turns ---------------------------------------------------------------------


@dataclass
class Watched:
    """Each confirmation of one session: wall-clock seconds, and CPU seconds of the worker's own thread."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def watch(self, ring: Ring) -> None:
        """Time each of this ring's from now on."""
        confirm = ring._confirm

        def timed(*arguments: Any) -> None:
            spent, start = time.thread_time(), time.perf_counter()
            confirm(*arguments)
            self.seconds.append(time.perf_counter() - start)
            self.cpu_seconds.append(time.thread_time() - spent)

        ring._confirm = timed  # type: ignore[method-assign]


def heartbeat_seconds() -> float:
    """CPU seconds that the heartbeats' threads of this process have taken so far."""
    own = [thread.native_id for thread in threading.enumerate() if thread.name == "atoll-heartbeat"]
    return sum(int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0]) for each in own) / 1e9


@dataclass
class Measured:
    """What one number of workers made of one workload."""

    timings: dict[str, Timings]
    confirmations: dict[str, Watched]  # worker 0's
    made: float = 0.0  # confirmations for each step
    heartbeats: float = 0.0  # part of a core, for each session through a hub


# -- a worker ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hub_session(name: str) -> Iterator[atoll.Session]:
    """A session in a ring of all workers, through a hub of its own, which worker 0 starts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    address = [f"tcp://127.0.0.1:{free_port()}" if rank == 0 else ""]
    dist.broadcast_object_list(address)
    command = [sys.executable, "-m", "atoll.cli.app", "hub", "--workers", str(world), "--shards", "0"]
    with contextlib.ExitStack() as stack:
        if rank == 0:
            stack.enter_context(service([*command, "--listen", address[0]], Path(os.devnull)))
        variables = {HUB_VARIABLE: address[0], RANK_VARIABLE: str(rank)}
        listens = deaf if name == BY_SUMS else Confirmations._listen
        with mock.patch.dict(os.environ, variables), mock.patch.object(Confirmations, "_listen", listens):
            session = stack.enter_context(atoll.join(Config()))
        stack.callback(dist.barrier)  # the hub ends when all have left
        yield session


def deaf(confirmations: Confirmations) -> None:
    """In place of `Confirmations._listen`: nobody can connect."""
    confirmations.trouble = "as the benchmark asks"


def plain_session(name: str) -> atoll.Session:
    rank, world = dist.get_rank(), dist.get_world_size()
    return atoll.join(Config(), place=Place(rank, world, rank, PrefixStore(name, _get_default_store())))


def measure(workload: Workload, pairs: int, building: int) -> Measured:
    """This worker's timings over one building of the models."""
    batches = workload.batches(dist.get_rank(), 16 * workload.steps)
    confirmations = {name: Watched() for name in (HUB, BY_SUMS)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(recorded())
        sessions = {
            HUB: stack.enter_context(hub_session(HUB)),
            PLAIN: stack.enter_context(plain_session(f"{workload.name}/{building}")),
            BY_SUMS: stack.enter_context(hub_session(BY_SUMS)),
        }
        for name, watched in confirmations.items():
            ring = sessions[name]._ring
            assert ring is not None
            channels = ring.channels.current
            assert channels is not None
            assert channels.confirmations is not None
            assert bool(channels.confirmations.without) == (name == BY_SUMS), channels.confirmations.trouble
            watched.watch(ring)
        order = sorted(sessions, reverse=bool(building % 2))
        made: dict[str, tuple[nn.Module, Block]] = {
            name: workload.under_atoll(batches, sessions[name]) for name in order
        }
        blocks: dict[str, Callable[[int], object]] = {name: made[name][1] for name in CONTESTANTS}
        interleave(blocks, WARM_UP, seed=building, fence=dist.barrier)
        for watched in confirmations.values():
            watched.seconds.clear()
            watched.cpu_seconds.clear()
        beaten, began = heartbeat_seconds(), time.perf_counter()
        timings = interleave(blocks, pairs, seed=1000 + building, fence=dist.barrier)
        beats = (heartbeat_seconds() - beaten) / (time.perf_counter() - began) / len(confirmations)
        for name in (PLAIN, BY_SUMS):
            same_values(made[HUB][0], made[name][0], name)
        count = len(confirmations[HUB].seconds) / (pairs * workload.steps)
    return Measured(timings, confirmations, count, beats)


def same_values(model: nn.Module, other: nn.Module, name: str) -> None:
    """Both do the same additions in the same order, so parameters are equal to the bit."""
    for (parameter, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        if not torch.equal(a, b):
            raise SystemExit(f"{parameter} is not as in {name}: not the same work")


def work(output: Path, quick: bool) -> None:
    """What each worker does; worker 0 writes what was measured to `output`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Measured] = {}
    for workload, _ in CASES:
        pairs = pairs_of_group(PAIRS[workload.name] // BUILDINGS, quick)
        timings: dict[str, Timings] = defaultdict(lambda: Timings([], []))
        confirmations: dict[str, Watched] = defaultdict(Watched)
        for building in range(BUILDINGS):
            one = measure(workload, pairs, building)
            for name, more in over_group(one.timings).items():
                timings[name].extend(more)
            for name, watched in one.confirmations.items():
                confirmations[name].seconds += watched.seconds
                confirmations[name].cpu_seconds += watched.cpu_seconds
        found[workload.name] = Measured(dict(timings), dict(confirmations), one.made, one.heartbeats)
    if dist.get_rank() == 0:
        output.write_bytes(msgspec.json.encode(found))
    leave_group()


# -- the cases of time -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadyCase:
    """A comparison with a ring without a hub, and what the confirmations in it took."""

    case: Case
    confirmations: float  # for each step
    seconds: float  # of a confirmation: median
    p90: float
    share: float  # of the time of all steps that all confirmations took
    cpu_seconds: float  # of the worker's own thread, for a confirmation: median
    heartbeats: float  # part of a core

    def line(self) -> str:
        return (
            f"{self.case.line()}; {self.confirmations:g} confirmations a step, each of "
            f"{1e6 * self.seconds:.0f} us (p90 {1e6 * self.p90:.0f}, CPU {1e6 * self.cpu_seconds:.0f}), "
            f"in all {self.share:.2%} of the time; "
            f"heartbeats {self.heartbeats:.2%} of a core"
        )

    def to_json(self) -> dict[str, Any]:
        return {**self.case.to_json(), "confirmation": {**asdict(self), "case": None}}


def case_of(workload: Workload, target: Target | None, workers: int, name: str, found: Measured) -> ReadyCase:
    """`name` against a ring without a hub."""
    watched = found.confirmations[name]
    case = compare(
        workload.name if name == HUB else f"{workload.name}, confirming by all-reduce",
        PLAIN,
        found.timings[name],
        found.timings[PLAIN],
        workers=workers,
        steps=workload.steps,
        target=target if name == HUB else None,
        threads=1,
    )
    median, p90 = np.quantile(watched.seconds, (0.5, 0.9))
    share = sum(watched.seconds) / sum(found.timings[name].seconds)
    cpu = float(np.median(watched.cpu_seconds))
    return ReadyCase(case, found.made, float(median), float(p90), share, cpu, found.heartbeats)


# -- memory ------------------------------------------------------------------------------------------------

AGAIN = "through a hub, an iteration made again"
MEMORY_CASES = [("large", "AdamW fused"), ("middling", "AdamW fused")]
BROKEN_IN = 1  # the iteration: its optimizer has its state by then


def measure_memory(contestant: str, shape: Shape, kind: Optimizer, output: Path) -> None:
    """What a started process does; worker 0 writes the highest peak of the workers, and the formula's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with plain_session(contestant) if contestant == PLAIN else hub_session(contestant) as session:
        small = Shape("small", 64, 2).make()  # what libraries allocate at their first use is not the model's
        train(small, kind.make(small), 64)
        resident = Resident()
        model = shape.make()
        optimizer = kind.make(model)
        session.prepare(model, optimizer)
        if contestant == AGAIN and dist.get_rank() == 0:
            points.install(break_once)
        train(model, optimizer, shape.width)
        peak = torch.tensor(resident.peak())
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        formula = formula_of(model, shape, kind, dist.get_world_size())
        if contestant == AGAIN:  # P for new messages
            formula += sum(p.numel() * p.element_size() for p in model.parameters())
    if dist.get_rank() == 0:
        output.write_bytes(msgspec.json.encode((int(peak), formula)))
    leave_group()


def break_once(point: str, iteration: int) -> None:
    """The ring breaks before this worker has the iteration's result, so that it is made again."""
    if (point, iteration) == ("ring.agreed", BROKEN_IN):
        points.install(None)
        raise BrokenRingError("broken on purpose")


def memory_case(shape: Shape, kind: Optimizer, workers: int, contestant: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "peak.json"
        torchrun(__file__, workers, "--memory", str(output), contestant, shape.name, kind.name)
        peak, formula = msgspec.json.decode(output.read_bytes(), type=tuple[int, int])
    return {
        "model": f"{shape.layers} layers of {shape.width}",
        "optimizer": kind.name,
        "workers": workers,
        "ring": contestant,
        "peak": peak,
        "formula": formula,
        "off": round(peak / formula - 1, 4),
        "met": abs(peak / formula - 1) <= WITHIN,
    }


def memory_line(case: dict[str, Any]) -> str:
    return (
        f"{case['model']}, {case['optimizer']}, {case['workers']} workers, {case['ring']}: peak "
        f"{case['peak'] / MIB:.0f} MiB, formula {case['formula'] / MIB:.0f} ({case['off']:+.1%}); "
        f"target within {WITHIN:.0%}: {'met' if case['met'] else 'MISSED'}"
    )


# -- all of it ---------------------------------------------------------------------------------------------


def time_cases(workers: Sequence[int], quick: bool) -> list[ReadyCase]:
    cases: list[ReadyCase] = []
    for count in workers:
        measured = measured_by(__file__, count, quick, dict[str, Measured])
        for workload, target in CASES:
            for name in (HUB, BY_SUMS):
                cases.append(case_of(workload, target, count, name, measured[workload.name]))
                print(cases[-1].line(), flush=True)
    return cases


def memory_cases(quick: bool) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for shape, kind in MEMORY_CASES[: 1 if quick else None]:
        for contestant in (PLAIN, HUB, AGAIN):
            cases.append(memory_case(SHAPES[shape], OPTIMIZERS[kind], 2, contestant))
            print(memory_line(cases[-1]), flush=True)
    return cases


def main() -> int:
    parser = group_options(__doc__, WORKERS)
    parser.add_argument("--memory", nargs=4, help=argparse.SUPPRESS)  # be one of the processes
    args = parser.parse_args()
    if args.work:
        work(args.work, args.quick)
        return 0
    if args.memory:
        output, contestant, shape, kind = args.memory
        measure_memory(contestant, SHAPES[shape], OPTIMIZERS[kind], Path(output))
        return 0
    times, memories = time_cases(args.workers, args.quick), memory_cases(args.quick)
    title = "A ring that goes on after a fault, while there is none"
    records = [*(case.to_json() for case in times), *memories]
    write_ratios("readiness", args, [each.case for each in times], title, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
