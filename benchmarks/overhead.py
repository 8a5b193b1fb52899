"""(a) What Atoll costs one worker: the same training step under Atoll and in plain PyTorch.

    python benchmarks/overhead.py [--quick]

Both models live in this process and take turns on the same batches. Atoll's step is the whole of it: session
records are written, losses logged, gradients checked. Plain PyTorch's has nothing of the kind.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import atoll
from atoll.core.config import Config
from common import (
    Case,
    Target,
    Timings,
    compare,
    interleave,
    options,
    recorded,
    write_ratios,
)
from workloads import DIGITS, GPT_ADAMW, GPT_FUSED, GPT_SGD, Workload

TARGET = Target(median=1.02)
WARM_UP = 5  # pairs that are not measured, after each building
CASES: list[tuple[Workload, Target | None]] = [
    (GPT_FUSED, TARGET),
    (GPT_ADAMW, TARGET),
    (GPT_SGD, TARGET),
    (DIGITS, None),  # microseconds of arithmetic a step: shown so that nobody is surprised
]


def measure(workload: Workload, pairs: int, buildings: int) -> tuple[Timings, Timings]:
    """Timings of Atoll and of plain PyTorch, over as many `buildings` of the two models.

    Where in memory a model comes to lie changes its speed by some per cent; building both anew, in either
    order, keeps such luck from deciding.
    """
    own, other = Timings([], []), Timings([], [])
    for building in range(buildings):
        timings = measure_once(workload, pairs // buildings, building)
        own.extend(timings["Atoll"])
        other.extend(timings["plain"])
    return own, other


def measure_once(workload: Workload, pairs: int, building: int) -> dict[str, Timings]:
    batches = workload.batches(0, 32 * workload.steps)
    with recorded(), atoll.join(Config()) as session:
        makers = {
            "Atoll": lambda: workload.under_atoll(batches, session),
            "plain": lambda: workload.in_plain_pytorch(batches),
        }
        made = {name: makers[name]() for name in sorted(makers, reverse=bool(building % 2))}
        blocks = {name: block for name, (_, block) in made.items()}
        interleave(blocks, WARM_UP, seed=building)
        timings = interleave(blocks, pairs, seed=1000 + building)
        same_values(made["Atoll"][0], made["plain"][0])
    return timings


def same_values(model: nn.Module, plain: nn.Module) -> None:
    """A comparison of two programs that do different work would mean nothing."""
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        if not torch.equal(a, b):
            raise SystemExit(f"{name} differs from plain PyTorch's: the two did not do the same work")


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--threads", type=int, help="torch threads (default: one for each core)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    pairs, buildings = (20, 2) if args.quick else (200, 4)
    cases: list[Case] = []
    for workload, target in CASES:
        own, other = measure(workload, pairs, buildings)
        case = compare(
            workload.name,
            "plain PyTorch",
            own,
            other,
            workers=1,
            steps=workload.steps,
            target=target,
            threads=torch.get_num_threads(),
        )
        cases.append(case)
        print(case.line(), flush=True)
    write_ratios("overhead", args, cases, "One worker under Atoll against plain PyTorch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
