"""(b) The ring against DistributedDataParallel over Gloo, on 2 and 4 workers of this machine.

    python benchmarks/ring.py [--quick]

Each worker holds three copies of the model: one under Atoll, one under DistributedDataParallel, one under
DistributedDataParallel with `gradient_as_bucket_view=True`. They take turns on the same batches, with one
torch thread a worker. A turn's time is that of its slowest worker.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.nn.parallel import DistributedDataParallel

import atoll
from atoll.core.config import Config
from atoll.train.api.place import Place
from common import (
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
    write_ratios,
)
from workloads import DIGITS, GPT_FUSED, GPT_SMALL_BATCH, WIDE, Batch, Block, Workload

TARGET = Target(median=1.00, bound95=1.03)
WARM_UP = 8  # turns that are not measured: DistributedDataParallel rebuilds its buckets in the first ones
SAME = 1e-4  # of a parameter's largest value
WORKERS = (2, 4)
CASES: list[tuple[Workload, Target | None]] = [
    (GPT_FUSED, TARGET),
    (GPT_SMALL_BATCH, TARGET),  # less to compute, as much to send
    (WIDE, TARGET),  # nearly nothing but sending
    (DIGITS, None),
]
DDP, DDP_VIEWS = "DDP", "DDP with bucket views"
PAIRS = {GPT_FUSED.name: 120, GPT_SMALL_BATCH.name: 120, WIDE.name: 100, DIGITS.name: 60}  # with 2 workers
BUILDINGS = 2


def under_ddp(workload: Workload, batches: list[Batch], as_view: bool) -> tuple[nn.Module, Block]:
    """The model, and what trains it by one block of steps."""
    module = workload.make()
    model = DistributedDataParallel(module, gradient_as_bucket_view=as_view)
    return module, workload.trainer(model, workload.optimizer(module), batches)


def measure(workload: Workload, pairs: int, building: int) -> dict[str, Timings]:
    """This worker's timings over one building of the three models."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = workload.batches(rank, 16 * workload.steps)
    store = PrefixStore(f"{workload.name}/{building}", _get_default_store())
    with recorded(), atoll.join(Config(), place=Place(rank, world, rank, store)) as session:
        makers: dict[str, Callable[[], tuple[nn.Module, Block]]] = {
            "Atoll": lambda: workload.under_atoll(batches, session),
            DDP: lambda: under_ddp(workload, batches, as_view=False),
            DDP_VIEWS: lambda: under_ddp(workload, batches, as_view=True),
        }
        made = {name: makers[name]() for name in sorted(makers, reverse=bool(building % 2))}
        blocks = {name: block for name, (_, block) in made.items()}
        interleave(blocks, WARM_UP, seed=building, fence=dist.barrier)
        for name in (DDP, DDP_VIEWS):
            same_values(made["Atoll"][0], made[name][0], name)
        return interleave(blocks, pairs, seed=1000 + building, fence=dist.barrier)


def same_values(model: nn.Module, other: nn.Module, name: str) -> None:
    """Exit unless both models have the same values, but for the order of sums.

    Call it after the warm-up. Rounding is all that differs there: up to 6e-6 of a parameter's largest value.
    Later Adam has memorised the noise of `DIGITS`, its second moments vanish, and it magnifies rounding to
    0.3 after 900 steps. DistributedDataParallel then differs as much from itself with other bucket sizes.
    """
    for (parameter, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        difference = (a - b).abs().max().item() / b.abs().max().item()
        if not difference < SAME:
            raise SystemExit(f"{parameter} differs from {name}'s by {difference:.2g}: not the same work")


def work(output: Path, quick: bool) -> None:
    """What each worker does; worker 0 writes its group's timings to `output`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured: dict[str, dict[str, Timings]] = {}
    for workload, _ in CASES:
        pairs = pairs_of_group(PAIRS[workload.name] // BUILDINGS, quick)
        totals: dict[str, Timings] = defaultdict(lambda: Timings([], []))
        for building in range(BUILDINGS):
            for name, timings in over_group(measure(workload, pairs, building)).items():
                totals[name].extend(timings)
        measured[workload.name] = totals
    if dist.get_rank() == 0:
        output.write_bytes(msgspec.json.encode(measured))
    leave_group()


def main() -> int:
    args = group_options(__doc__, WORKERS).parse_args()
    if args.work:
        work(args.work, args.quick)
        return 0
    cases: list[Case] = []
    for workers in args.workers:
        measured = measured_by(__file__, workers, args.quick, dict[str, dict[str, Timings]])
        for workload, target in CASES:
            timings = measured[workload.name]
            for rival in (DDP, DDP_VIEWS):
                case = compare(
                    workload.name,
                    rival,
                    timings["Atoll"],
                    timings[rival],
                    workers=workers,
                    steps=workload.steps,
                    target=target,
                    threads=1,
                )
                cases.append(case)
                print(case.line(), flush=True)
    write_ratios("ring", args, cases, "Atoll's ring against DistributedDataParallel on Gloo")
    return 0


if __name__ == "__main__":
    sys.exit(main())
