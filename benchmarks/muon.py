"""(w) Muon, which steps whole tensors: beside AdamW, and beside Muon under DistributedDataParallel.

    python benchmarks/muon.py [--quick]

The GPT of examples/gpt.py on two workers of a ring. Muon steps the matrices of its blocks, and AdamW all
else. Contestants take turns on the same batches, with one torch thread a worker; a turn's time is that of
its slowest worker.

In a second part the model lies in tiers, and each worker steps the tensors that it owns. Each step of an
optimizer on the stepping thread is timed by the thread's CPU clock, which does not count what others on the
same cores do. The busiest worker must be within 10 % of the mean.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

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
from workloads import GPT_FUSED, Block, gpt_adamw

GPT = dataclasses.replace(GPT_FUSED, name="GPT, Muon and AdamW", clip=None)
DEVICE = "6MiB"  # about a quarter of what the model takes
PAIRS, WARM_UP = 60, 8
SAME = 1e-3  # of a parameter's largest value; Muon computes in bfloat16
ATOLL, DDP, ADAMW = "Atoll, Muon", "DDP, Muon", "Atoll, AdamW"
# Of the first, against each of the others. Muon's own work is not Atoll's: no target beside AdamW.
TARGETS: dict[str, Target | None] = {DDP: Target(median=1.00, bound95=1.03), ADAMW: None}
BUSIEST = 1.10
TIERED_STEPS = 24
TIERED_WARM_UP = 4


class Measured(msgspec.Struct):
    """Timings of the contestants, and each worker's seconds of steps with the model in tiers."""

    timings: dict[str, Timings]
    stepping: list[float]


class Both(torch.optim.Optimizer):
    """Two optimizers that a training loop steps as one."""

    def __init__(self, muon: torch.optim.Optimizer, others: torch.optim.Optimizer) -> None:
        self.each = [muon, others]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.each:
            optimizer.zero_grad(set_to_none)


def with_muon(model: nn.Module) -> Both:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    own = set(matrices)
    others = [p for p in model.parameters() if p not in own]
    return Both(torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=1e-3))


def measure(pairs: int) -> dict[str, Timings]:
    """This worker's timings of the three contestants."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = GPT.batches(rank, 16)
    store = PrefixStore("muon", _get_default_store())
    with recorded(), atoll.join(Config(), place=Place(rank, world, rank, store)) as session:
        model, module, plain = GPT.make(), GPT.make(), GPT.make()
        muon, rival, adamw = with_muon(model), with_muon(module), gpt_adamw(plain)
        session.prepare(model, muon.each, name="muon")
        session.prepare(plain, adamw, name="adamw")
        blocks: dict[str, Block] = {
            ATOLL: GPT.trainer(model, muon, batches, session),
            DDP: GPT.trainer(DistributedDataParallel(module), rival, batches),
            ADAMW: GPT.trainer(plain, adamw, batches, session),
        }
        interleave(blocks, WARM_UP, seed=0, fence=dist.barrier)
        same_values(model, module)
        return interleave(blocks, pairs, seed=1, fence=dist.barrier)


def same_values(model: nn.Module, other: nn.Module) -> None:
    """Exit unless both models have the same values, but for rounding."""
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        difference = (a - b).abs().max().item() / b.abs().max().item()
        if not difference < SAME:
            raise SystemExit(f"{name} differs from DDP's by {difference:.2g}: not the same work")


@contextmanager
def timed_steps() -> Iterator[list[float]]:
    """Within it the CPU seconds of each step of Muon or AdamW that no step encloses are appended to the list
    that it gives."""
    seconds: list[float] = []
    with ExitStack() as stack:
        for kind in (torch.optim.Muon, torch.optim.AdamW):
            step = kind.step

            def timed(*call: Any, _step: Callable[..., Any] = step, **options: Any) -> Any:
                began = time.thread_time()
                result = _step(*call, **options)
                seconds.append(time.thread_time() - began)
                return result

            stack.enter_context(mock.patch.object(kind, "step", timed))
        yield seconds


def seconds_of_stepping(steps: int) -> float:
    """Train in tiers, and return the CPU seconds that this worker's stepping thread spends in steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = GPT.batches(rank, 16)
    store = PrefixStore("tiers", _get_default_store())
    memory = atoll.Memory(device=DEVICE, step="host")
    with (
        recorded(),
        timed_steps() as seconds,
        atoll.join(Config(memory=memory), place=Place(rank, world, rank, store)) as session,
    ):
        model = GPT.make()
        optimizer = with_muon(model)
        session.prepare(model, optimizer.each)
        block = GPT.trainer(model, optimizer, batches, session)
        for number in range(TIERED_WARM_UP):
            block(number)
        session.barrier()
        seconds.clear()
        for number in range(steps):
            block(number)
        session.barrier()
        return sum(seconds)


def work(output: Path, quick: bool) -> None:
    """What each worker does; worker 0 writes its group's results to `output`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    timings = over_group(measure(pairs_of_group(PAIRS, quick)))
    stepping = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    stepping[dist.get_rank()] = seconds_of_stepping(TIERED_WARM_UP if quick else TIERED_STEPS)
    dist.all_reduce(stepping)
    if dist.get_rank() == 0:
        output.write_bytes(msgspec.json.encode(Measured(timings, stepping.tolist())))
    leave_group()


def main() -> int:
    args = group_options(__doc__, (2,)).parse_args()
    if args.work:
        work(args.work, args.quick)
        return 0
    cases: list[Case] = []
    records: list[dict[str, Any]] = []
    for workers in args.workers:
        measured = measured_by(__file__, workers, args.quick, Measured)
        for rival, target in TARGETS.items():
            case = compare(
                "GPT, Muon and AdamW",
                rival,
                measured.timings[ATOLL],
                measured.timings[rival],
                workers=workers,
                steps=GPT.steps,
                target=target,
                threads=1,
            )
            cases.append(case)
            records.append(case.to_json())
            print(case.line(), flush=True)
        busiest = max(measured.stepping) / (sum(measured.stepping) / workers)
        records.append(
            {
                "name": "the busiest owner in tiers",
                "workers": workers,
                "seconds": measured.stepping,
                "ratio": busiest,
                "target": BUSIEST,
                "met": busiest <= BUSIEST,
            }
        )
        print(
            f"the busiest of {workers} owners in tiers: {busiest:.3f} of the mean's seconds; "
            f"target {BUSIEST:.2f}: {'met' if busiest <= BUSIEST else 'MISSED'}",
            flush=True,
        )
    write_ratios("muon", args, cases, "Muon in Atoll's ring, against others", records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
