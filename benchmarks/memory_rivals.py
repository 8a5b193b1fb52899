"""(u) A model sharded over two members, each under a budget of memory, against FSDP2 and DeepSpeed's ZeRO-3.

    python benchmarks/memory_rivals.py [--quick] [--deepspeed PYTHON] [--rounds N]

Two workers on loopback, one thread each, train a GPT of 19 million parameters with AdamW: the same model,
batches and seeds for all (benchmarks/memory_rivals_worker.py). Atoll runs by `atoll run`, with the strategy
`ring` and a table [memory] whose budget for the device is a half, then a quarter, of the parameters; chunks
are split evenly over the workers, and once more belong to one worker each ("asymmetric"). The rivals are
FSDP2 (`fully_shard` for each block, and the same with `CPUOffloadPolicy`) and DeepSpeed's ZeRO-3 with
parameters and optimizer offloaded. For scale: DistributedDataParallel, which holds all on each worker, and
one worker alone, in plain PyTorch and under Atoll's budgets. There is no accelerator here, so a "device" is
an arena of the CPU's memory, for the rivals plain memory.

A step's time is its slowest worker's; a run's, the median of its steps after the first. CPU time, over both
workers and all their threads, is told beside it: what else the machine does moves it less. The runs take
turns, in a new random order in each round. That all train the same thing is checked: each step's mean loss
against that of DistributedDataParallel (one worker: of plain PyTorch) in the same round.

PYTHON is an interpreter in whose environment DeepSpeed is installed beside the same torch, and Atoll, whose
model and data it uses. A system that is not given, or fails, is in the results with why.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import MIB, milliseconds, options, output_folder, write_results
from memory_rivals_worker import Plan, Record
from peers_rivals import finished
from runs import read_records, spread

WORKER = Path(__file__).with_name("memory_rivals_worker.py")
SIZES = {"layers": 6, "heads": 8, "width": 512, "context": 128, "batch": 3}
WARM = 3  # steps before those that count: the second is the first that knows the order of uses
STEPS, QUICK_STEPS = 16, 5
ROUNDS = 5
SECONDS = 600.0  # for a run; DeepSpeed builds its operators in its first
ALIKE = 1e-3  # of the loss: additions in another order
TARGET = 1.0  # of the time of each kind of FSDP2


@dataclass(frozen=True)
class System:
    """One contestant: the worker's word for it, how many workers, and for Atoll's the device's budget as a
    part of the parameters' bytes, and how chunks are shared."""

    name: str
    system: str
    workers: int = 2
    budget: float = 0.0
    sharding: str = "auto"


PLAIN = System("plain PyTorch, one worker", "plain", 1)
DDP = System("DistributedDataParallel", "ddp")
FSDP = System("FSDP2", "fsdp")
OFFLOADED = System("FSDP2, CPUOffloadPolicy", "fsdp-offload")
DEEPSPEED = System("DeepSpeed, ZeRO-3 offload", "deepspeed")
ALONE = System("Atoll, one worker, 50 %", "atoll", 1, 0.5)
HALF = System("Atoll, 50 %", "atoll", 2, 0.5)
QUARTER = System("Atoll, 25 %", "atoll", 2, 0.25)
ASYMMETRIC = System("Atoll, 50 %, asymmetric", "atoll", 2, 0.5, "asymmetric")
SYSTEMS = (HALF, QUARTER, ASYMMETRIC, FSDP, OFFLOADED, DEEPSPEED, DDP, ALONE, PLAIN)
REFERENCES = {1: PLAIN, 2: DDP}  # by workers, of the losses


@dataclass
class Outcome:
    """One run, of all its workers."""

    seconds: float  # of a step
    cpu: float  # seconds of CPU time of a step, over all workers
    peaks: list[int]  # bytes of each process beyond what it had before the model was made
    losses: list[float]  # each step's mean over the workers
    method: str  # where the peaks are from
    figures: list[dict[str, Any]]  # by worker, what Atoll says of its arenas and moves


# -- a run -------------------------------------------------------------------------------------------------


def command_of(system: System, folder: Path, plan: Plan, python: str) -> list[str]:
    """What starts one run."""
    script = [str(WORKER), system.system, str(folder), json.dumps(asdict(plan))]
    if system.system == "atoll":
        nbytes = sum(parameter.nbytes for parameter in plan.model().parameters())
        settings = {"run.directory": folder / "run", "memory.device": int(system.budget * nbytes)}
        if system.workers > 1:
            settings |= {"run.strategy": "ring", "memory.sharding": system.sharding}
        given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        return [python, "-m", "atoll.cli.app", "run", "--workers", str(system.workers), *given, *script]
    if system.workers == 1:
        return [python, *script]
    run = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [python, *run, "--nproc-per-node", str(system.workers), *script]


def run(system: System, plan: Plan, python: str) -> Outcome | str:
    """One run; where it fails, why."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if system is DEEPSPEED:  # which builds an operator at its first start, with the ninja beside its Python
        path = os.pathsep.join([str(Path(python).absolute().parent), os.environ.get("PATH", "")])
        environment |= {"DS_ACCELERATOR": "cpu", "PATH": path}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        failed = finished([command_of(system, folder, plan, python)], environment, folder, SECONDS)
        return failed or outcome(
            read_records(folder, Record, system.workers), folder / "run" / "summary.json"
        )


def outcome(records: Sequence[Record], summary: Path) -> Outcome:
    steps = zip(*(record.seconds for record in records), strict=True)
    losses = zip(*(record.losses for record in records), strict=True)
    return Outcome(
        seconds=median(max(step) for step in steps),
        cpu=sum(record.cpu for record in records),
        peaks=[record.peak for record in records],
        losses=[sum(step) / len(step) for step in losses],
        method=records[0].method,
        figures=json.loads(summary.read_bytes())["memory"] if summary.exists() else [],
    )


# -- the cases ---------------------------------------------------------------------------------------------


def off(own: Outcome, reference: Outcome) -> float:
    """The most that a step's loss differs from the reference's, as a part of it."""
    return max(abs(a / b - 1) for a, b in zip(own.losses, reference.losses, strict=True))


def ratios(mine: Sequence[Outcome | str], theirs: Sequence[Outcome | str]) -> list[float]:
    """My step's time over theirs, of the rounds in which both ran."""
    return [
        a.seconds / b.seconds
        for a, b in zip(mine, theirs, strict=True)
        if isinstance(a, Outcome) and isinstance(b, Outcome)
    ]


def case(system: System, outcomes: Mapping[System, Sequence[Outcome | str]]) -> dict[str, Any]:
    """One system over all rounds."""
    own = outcomes[system]
    made = [each for each in own if isinstance(each, Outcome)]
    reference = outcomes[REFERENCES[system.workers]]
    offs = [
        off(mine, known)
        for mine, known in zip(own, reference, strict=True)
        if isinstance(mine, Outcome) and isinstance(known, Outcome)
    ]
    rivals = [rival for rival in outcomes if rival.workers == system.workers and rival.system != "atoll"]
    against = {rival.name: ratios(own, outcomes[rival]) for rival in rivals if system.system == "atoll"}
    return {
        "system": system.name,
        "workers": system.workers,
        "failed": [each for each in own if isinstance(each, str)],
        "seconds": median(each.seconds for each in made) if made else None,
        "cpu": median(each.cpu for each in made) if made else None,
        "peak": median(max(each.peaks) for each in made) if made else None,
        "arenas": arenas(made),
        "off": max(offs) if offs else None,
        "alike": max(offs) <= ALIKE if offs else None,
        "against": {name: spread(found) for name, found in against.items() if found},
        "met": met(against) if made else None,
        "each": [asdict(each) for each in made],
    }


def arenas(made: Sequence[Outcome]) -> dict[str, int]:
    """Bytes of Atoll's arenas at most, over workers and rounds; empty: it has none."""
    found = [figures for each in made for figures in each.figures]
    return {tier: max(each[f"{tier}_peak"] for each in found) for tier in ("device", "host") if found}


def met(against: Mapping[str, Sequence[float]]) -> bool | None:
    """Whether it is as fast as each kind of FSDP2; None: it was compared with none."""
    found = [against[rival.name] for rival in (FSDP, OFFLOADED) if against.get(rival.name)]
    return all(median(ratios) <= TARGET for ratios in found) if found else None


def line(case: Mapping[str, Any]) -> str:
    said = f"{case['system']}: "
    if case["failed"]:
        said += f"did not run ({len(case['failed'])} times): {case['failed'][0]}; "
    if case["seconds"] is None:
        return said
    said += f"{milliseconds(case['seconds'])} a step, {milliseconds(case['cpu'])} of CPU time"
    said += f", at most {case['peak'] / MIB:.0f} MiB a process"
    if case["arenas"]:
        said += ", of them " + " and ".join(f"{n / MIB:.0f} in the {t}'s" for t, n in case["arenas"].items())
    if case["off"] is not None:
        said += f", losses within {case['off']:.1e}{'' if case['alike'] else ': UNLIKE'}"
    for name, it in case["against"].items():
        said += f"; {it['median']:.2f} of {name} ({it['least']:.2f} to {it['most']:.2f})"
    if case["met"] is not None:
        said += f"; target {TARGET:.2f} of both kinds of FSDP2: {'met' if case['met'] else 'MISSED'}"
    return said


def draw(cases: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Left: each run's step; right: the larger of the processes' peaks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [case for case in reversed(cases) if case["each"]]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.4 + 0.45 * len(shown)), layout="constrained", sharey=True
    )
    for row, case in enumerate(shown):
        colour = "#2b6ca3" if case["system"].startswith("Atoll") else "#8a8a8a"
        times = [each["seconds"] for each in case["each"]]
        left.scatter(times, [row] * len(times), s=14, color=colour, alpha=0.6, linewidths=0)
        left.plot(case["seconds"], row, "|", color=colour, markersize=16, markeredgewidth=2)
        right.barh(row, case["peak"] / MIB, height=0.5, color=colour)
    left.set_yticks(range(len(shown)), [case["system"] for case in shown])
    left.set_xlim(left=0)
    left.set_xlabel("seconds a step (mark: median of the rounds)")
    right.set_xlabel("MiB of a process at its peak")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--deepspeed", default="", metavar="PYTHON", help="an interpreter that has DeepSpeed")
    parser.add_argument("--rounds", type=int, help=f"rounds of runs (default: {ROUNDS}; with --quick, 1)")
    args = parser.parse_args()
    pythons = {system: args.deepspeed if system is DEEPSPEED else sys.executable for system in SYSTEMS}
    order, start = random.Random(1), time.monotonic()
    outcomes: dict[System, list[Outcome | str]] = {system: [] for system in SYSTEMS}
    for seed in range(args.rounds or (1 if args.quick else ROUNDS)):
        plan = Plan(**SIZES, warm=WARM, steps=QUICK_STEPS if args.quick else STEPS, seed=seed)
        for system in order.sample(SYSTEMS, len(SYSTEMS)):
            python = pythons[system]
            own = run(system, plan, python) if python else f"no interpreter was given: --{system.system}"
            outcomes[system].append(own)
            said = own if isinstance(own, str) else f"{milliseconds(own.seconds)} a step"
            print(f"round {seed}: {system.name}: {said}", flush=True)
    cases = [case(system, outcomes) for system in SYSTEMS]
    for each in cases:
        print(line(each), flush=True)
    path = write_results("memory_rivals", output_folder(args), cases, args.quick)
    draw(cases, path.with_suffix(".png"))
    print(f"in {time.monotonic() - start:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
