"""(h) What it costs that a shard could be killed: training with and without its journal.

    python benchmarks/journal.py [--quick]

Two workers train the GPT of `examples/gpt.py` and the network of `examples/digits.py` through one shard, under
bsp and asp. Hub and shard are processes of their own, one pair for each contestant: a shard without a
directory, another without one (which shows what chance does), one with its directory on the disk, and one in
memory. Both workers have a session with each, and the contestants take turns, a block of steps each. A step
is forward, backward, the exchange, and `optimizer.step()`; a turn's time is that of its slowest worker.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from atoll.testing.pool import WorkerPool
from atoll.train.place import Place
from common import (
    Case,
    Target,
    Timings,
    compare,
    draw_ratios,
    interleave,
    leave_group,
    options,
    output_folder,
    write_results,
)
from server import Address, Servers, cpu_seconds, over_workers, settings
from workloads import DIGITS, GPT_FUSED, Workload

TARGET = Target(median=1.01)
WORKERS = 2
WARM_UP = 4
NONE, AGAIN, DISK, MEMORY = "no journal", "no journal, again", "journal on the disk", "journal in memory"
CASES: dict[str, tuple[Workload, int]] = {"GPT": (GPT_FUSED, 4), "digits": (DIGITS, 1)}
SECONDS = 45.0  # of measuring, for each case
DEADLINE = 240.0
IN_MEMORY = Path("/dev/shm")


def time_steps(
    place: Place, runs: dict[str, Address], name: str, consistency: str, seconds: float
) -> dict[str, Timings]:
    """One worker's turns, for about `seconds`. Worker 0 counts the shards' CPU seconds as its own."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=place.store, rank=place.rank, world_size=place.world)
    workload, _ = CASES[name]
    batches = workload.batches(place.rank, 32 * workload.steps)
    timings: dict[str, Timings] = {each: Timings([], []) for each in runs}
    with ExitStack() as stack:
        blocks = {}
        for each, run in runs.items():
            session = stack.enter_context(run.joined(place.rank, settings(consistency)))
            blocks[each] = workload.under_atoll(batches, session)[1]
        shards = [shard for run in runs.values() for shard in run.shards] if place.rank == 0 else []
        interleave(blocks, WARM_UP, seed=0, fence=dist.barrier)
        until, again = time.monotonic() + seconds, torch.ones(1)
        while again.item():
            more = interleave(
                blocks,
                5,
                seed=len(timings[next(iter(runs))].seconds) + 1,
                fence=dist.barrier,
                cpu=lambda: cpu_seconds(shards),
            )
            for each, timing in more.items():
                timings[each].extend(timing)
            again.fill_(float(time.monotonic() < until))
            dist.broadcast(again, 0)
        dist.barrier()
    leave_group()
    return timings


def measure(pool: WorkerPool, name: str, consistency: str, seconds: float) -> list[Case]:
    with ExitStack() as stack:
        runs = {
            each: stack.enter_context(Servers(WORKERS, 1, kept=folder is not None, folder=folder))
            for each, folder in (
                (NONE, None),
                (AGAIN, None),
                (DISK, Path(tempfile.gettempdir())),
                (MEMORY, IN_MEMORY),
            )
        }
        timings = over_workers(pool.run(time_steps, runs, name, consistency, seconds, world=WORKERS))
    workload, _ = CASES[name]
    return [
        compare(
            f"{name}, {consistency}, {own}",
            NONE,
            timings[own],
            timings[next(iter(runs))],
            workers=WORKERS,
            steps=workload.steps,
            target=None if own == AGAIN else TARGET,
            threads=1,
        )
        for own in (AGAIN, DISK, MEMORY)
    ]


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--only", help="one case")
    args = parser.parse_args()
    cases: list[Case] = []
    with WorkerPool(DEADLINE) as pool:
        for name in CASES:
            for consistency in ("bsp", "asp"):
                if args.only and args.only != f"{name},{consistency}":
                    continue
                cases += measure(pool, name, consistency, 3.0 if args.quick else SECONDS)
                print("\n".join(case.line() for case in cases[-3:]), flush=True)
    folder = output_folder(args)
    write_results("journal", folder, [case.to_json() for case in cases], quick=args.quick)
    draw_ratios(cases, folder / "journal.png", "Steps of training with a shard's journal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
