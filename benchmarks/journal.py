"""(h) What it costs that a shard may be killed: steps of training with its journal and without.

    python benchmarks/journal.py [--quick]

Two workers train the GPT of `examples/gpt.py` and the network of `examples/digits.py` through one shard,
under bsp and asp. Hub and shard are processes of their own, a pair for each contestant: a shard with a
directory on the disk, and two without, of which the one against the other shows what chance does. Both
workers have a session with each, and the contestants take turns, a block of steps each. A step is forward,
backward, the exchange, and `optimizer.step()`; a turn's time is that of its slowest worker.

What is measured is a journal that has run for a while. The GPT's has begun to write over its segments, which
takes the first half gigabyte: new pages cost more.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist

from atoll.core.config import Config, Run, Sync
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
from server import Address, Servers, cpu_seconds
from support.pool import WorkerPool
from workloads import DIGITS, GPT_FUSED, Workload

TARGET = Target(median=1.01)
WORKERS = 2
NONE, AGAIN, KEPT = "no journal", "no journal, again", "journal"
WORKLOADS: dict[str, tuple[Workload, int, Target | None]] = {  # and how many turns it takes to warm up
    "GPT": (GPT_FUSED, 55, TARGET),
    "digits": (DIGITS, 10, None),  # microseconds of arithmetic a step, as in the other benchmarks
}
ROUNDS = 5  # between looks at the clock
WARM_UP = 20.0  # seconds, at most: on a busy machine
SECONDS = 35.0  # of measuring, for each case
DEADLINE = 240.0


def settings(consistency: str) -> Config:
    return Config(run=Run(strategy="server"), sync=Sync(timeout="60s", consistency=consistency))  # type: ignore[arg-type]


def time_steps(
    place: Place, runs: dict[str, Address], name: str, consistency: str, seconds: float, quick: bool
) -> dict[str, Timings]:
    """One worker's turns, for about `seconds`. Worker 0 counts the shards' CPU seconds as its own."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=place.store, rank=place.rank, world_size=place.world)
    workload, warm_up, _ = WORKLOADS[name]
    batches = workload.batches(place.rank, 32 * workload.steps)
    timings: dict[str, Timings] = {each: Timings([], []) for each in runs}
    with ExitStack() as stack:
        blocks: dict[str, Callable[[int], object]] = {}
        for each, run in runs.items():
            session = stack.enter_context(run.joined(place.rank, settings(consistency)))
            blocks[each] = workload.under_atoll(batches, session)[1]
        shards = [shard for run in runs.values() for shard in run.shards] if place.rank == 0 else []

        def take_turns(seconds: float, most: float = math.inf) -> int:
            """For so long, but at most so many; returns how many each has had."""
            until, going, turns = time.monotonic() + seconds, torch.ones(1), 0
            while going.item() and turns < most:
                more = interleave(
                    blocks, ROUNDS, seed=turns, fence=dist.barrier, cpu=lambda: cpu_seconds(shards)
                )
                for each, timing in more.items():
                    timings[each].extend(timing)
                turns += ROUNDS
                going.fill_(float(time.monotonic() < until))
                dist.broadcast(going, 0)  # worker 0's clock decides
            return turns

        warmed = take_turns(WARM_UP, 5 if quick else warm_up)
        if warmed < warm_up and not quick and place.rank == 0:
            print(
                f"{name}, {consistency}: warmed up for {WARM_UP:g} s, {warmed} of {warm_up} turns", flush=True
            )
        timings |= {each: Timings([], []) for each in runs}
        take_turns(seconds)
        dist.barrier()
    leave_group()
    return timings


def in_turn(one: Timings, other: Timings) -> Timings:
    """The first turn of the one, the first of the other, the second of the one, and so on."""
    return Timings(
        [each for pair in zip(one.seconds, other.seconds, strict=True) for each in pair],
        [each for pair in zip(one.cpu_seconds, other.cpu_seconds, strict=True) for each in pair],
    )


def measure(pool: WorkerPool, name: str, consistency: str, quick: bool) -> list[Case]:
    workload, _, target = WORKLOADS[name]
    with ExitStack() as stack:
        runs = {
            each: stack.enter_context(Servers(WORKERS, 1, kept=each == KEPT)) for each in (NONE, AGAIN, KEPT)
        }
        seconds = 2.0 if quick else SECONDS
        timings = over_workers(pool.run(time_steps, runs, name, consistency, seconds, quick, world=WORKERS))
    # Each of the journal's turns is a pair with either of the round's others.
    without, twice = in_turn(timings[NONE], timings[AGAIN]), in_turn(timings[KEPT], timings[KEPT])
    return [
        compare(
            f"{name}, {consistency}",
            rival,
            own,
            other,
            workers=WORKERS,
            steps=workload.steps,
            target=goal,
            threads=1,
        )
        for rival, own, other, goal in (
            ("no journal", twice, without, target),
            ("itself: both without a journal", timings[AGAIN], timings[NONE], None),
        )
    ]


def main() -> int:
    args = options(__doc__).parse_args()
    cases: list[Case] = []
    with WorkerPool(DEADLINE) as pool:
        for name in WORKLOADS:
            for consistency in ("bsp", "asp"):
                new = measure(pool, name, consistency, args.quick)
                print("\n".join(case.line() for case in new), flush=True)
                cases += new
    write_ratios("journal", args, cases, "Steps of training with a shard's journal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
