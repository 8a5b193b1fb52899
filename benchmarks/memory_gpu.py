"""(v) A GPT on one GPU under budgets of memory, against FSDP2's CPUOffloadPolicy and against no offload.

    python benchmarks/memory_gpu.py [--quick] [--tiny] [--rounds N]

A GPT of a billion parameters, then the larger ones of a row, all in bfloat16 with fused AdamW: in plain
PyTorch, all on the GPU; by FSDP2 in a group of one, each block and the root with `CPUOffloadPolicy`; and by
Atoll's budgets for the device of 25, 50 and 75 % of the parameters. Of the larger models each system trains
those that fit, up to the first that does not; Atoll with 25 %. A model whose values, gradients and state are
more than the free memory of the host is tried in plain PyTorch alone.

Told are tokens/s; bytes a step in each direction, as the profiler saw them, and beside those of Atoll the
offline optimum (Belady's) for its order of uses; the part of the time in which no kernel ran; the most that
was allocated on the GPU, and of the process in host memory. The runs take turns, in a new random order in
each round.

Without a GPU it says so, and that is all. `--tiny` trains a tiny model, with or without a GPU.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import MIB, milliseconds, options, output_folder, write_results
from memory_gpu_worker import TO_DEVICE, TO_HOST, Plan, Record
from peers_rivals import finished
from runs import read_records, spread

WORKER = Path(__file__).with_name("memory_gpu_worker.py")
ONE_BILLION = "1.0B"
MODELS = {
    ONE_BILLION: Plan(layers=20, width=2048, context=1024, batch=8, warm=3, steps=8, profiled=2),
    "2.0B": Plan(layers=26, width=2560, context=1024, batch=4, warm=3, steps=4, profiled=1),
    "3.9B": Plan(layers=32, width=3200, context=1024, batch=4, warm=3, steps=4, profiled=1),
    "6.4B": Plan(layers=32, width=4096, context=1024, batch=4, warm=3, steps=4, profiled=1),
    "10.2B": Plan(layers=40, width=4608, context=1024, batch=2, warm=3, steps=4, profiled=1),
    "12.6B": Plan(layers=40, width=5120, context=1024, batch=2, warm=3, steps=4, profiled=1),
    "15.9B": Plan(layers=42, width=5632, context=1024, batch=2, warm=3, steps=4, profiled=1),
}
TINY = {"tiny": Plan(layers=4, width=128, context=32, batch=2, warm=3, steps=2, profiled=1)}
HELD = 8  # bytes of a parameter's value, gradient and state, in bfloat16
SPARE = 4 * 2**30  # bytes of the host for all else
SECONDS = 420.0  # for a run
ROUNDS = 3
ALIKE = 0.02  # of the loss: bfloat16 rounds otherwise on a CPU


@dataclass(frozen=True)
class System:
    """One contestant: the worker's word for it, and Atoll's budget as a part of the parameters' bytes."""

    name: str
    system: str
    budget: float = 0.0


PLAIN = System("no offload", "plain")
FSDP = System("FSDP2, CPUOffloadPolicy", "fsdp-offload")
ATOLL = tuple(System(f"Atoll, {budget:.0%}", "atoll", budget) for budget in (0.25, 0.5, 0.75))
SYSTEMS = (PLAIN, FSDP, *ATOLL)
LARGE = (PLAIN, FSDP, ATOLL[0])  # who tries the larger models
Outcomes = dict[tuple[str, System], list[Record | str]]


# -- the runs ----------------------------------------------------------------------------------------------


def run(system: System, plan: Plan) -> Record | str:
    """One run; where it fails, why."""
    needed, free = HELD * plan.parameters + SPARE, available()
    if system is not PLAIN and needed > free:
        return f"needs {needed / 2**30:.0f} GiB of the host, of which {free / 2**30:.0f} are free"
    plan = replace(plan, budget=system.budget)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, str(WORKER), system.system, str(folder), json.dumps(asdict(plan))]
        return finished([command], dict(os.environ), folder, SECONDS) or read_records(folder, Record, 1)[0]


def available() -> int:
    """Bytes of host memory that a process can have without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def measure(models: Mapping[str, Plan], rounds: int, climbs: bool) -> Outcomes:
    """The first model in rounds, by all; then, if it `climbs`, each larger one once, by who trained the one
    before."""
    order, outcomes = random.Random(1), Outcomes()
    first = next(iter(models))
    for _ in range(rounds):
        for system in order.sample(SYSTEMS, len(SYSTEMS)):
            note(outcomes, first, system, run(system, models[first]))
    climbing = [system for system in LARGE if climbs]
    for name in list(models)[1:]:
        for system in list(climbing):
            own = run(system, models[name])
            note(outcomes, name, system, own)
            if isinstance(own, str):
                climbing.remove(system)
    return outcomes


def note(outcomes: Outcomes, model: str, system: System, own: Record | str) -> None:
    outcomes.setdefault((model, system), []).append(own)
    said = own if isinstance(own, str) else f"{milliseconds(own.seconds)} a step"
    print(f"{model}; {system.name}: {said}", flush=True)


# -- the cases ---------------------------------------------------------------------------------------------


def cases_of(models: Mapping[str, Plan], outcomes: Outcomes) -> Iterator[dict[str, Any]]:
    for (model, system), own in outcomes.items():
        yield case(model, system, models[model], own, outcomes)


def case(
    model: str, system: System, plan: Plan, own: Sequence[Record | str], outcomes: Outcomes
) -> dict[str, Any]:
    """One system with one model, over the rounds."""
    made = [each for each in own if isinstance(each, Record)]
    failed = [each for each in own if isinstance(each, str)]
    it: dict[str, Any] = {"model": model, "system": system.name, "parameters": plan.parameters}
    it |= {"tokens_step": plan.tokens, "failed": failed, "each": [asdict(each) for each in made]}
    if not made:
        return it
    seconds = median(each.seconds for each in made)
    rivals = {rival: outcomes.get((model, rival), []) for rival in (PLAIN, FSDP) if rival != system}
    reference = next((each for each in rivals.get(PLAIN, []) if isinstance(each, Record)), None)
    off = None if reference is None else off_by(made[0], reference)
    return it | {
        "seconds": seconds,
        "tokens_second": plan.tokens / seconds,
        "against": {
            rival.name: spread(found) for rival, theirs in rivals.items() if (found := ratios(own, theirs))
        },
        "off": off,
        "alike": None if off is None else off <= ALIKE,
        **{key: middle(getattr(each, key) for each in made) for key in ("device_peak", "host_peak", "idle")},
        "copied": made[0].copied,
        "figures": made[0].figures,
    }


def middle(values: Iterator[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


def off_by(own: Record, reference: Record) -> float:
    """The most that a step's loss differs from the reference's, as a part of it."""
    return max(abs(a / b - 1) for a, b in zip(own.losses, reference.losses, strict=True))


def ratios(mine: Sequence[Record | str], theirs: Sequence[Record | str]) -> list[float]:
    """My step's time over theirs, of the rounds in which both ran."""
    return [
        a.seconds / b.seconds
        for a, b in zip(mine, theirs, strict=False)
        if isinstance(a, Record) and isinstance(b, Record)
    ]


def line(case: Mapping[str, Any]) -> str:
    said = f"{case['model']}; {case['system']}: "
    if case["failed"]:
        said += f"did not run ({len(case['failed'])} times): {case['failed'][0]}; "
    if not case["each"]:
        return said
    said += f"{case['tokens_second']:.0f} tokens/s"
    for name, it in case["against"].items():
        said += f"; {it['median']:.2f} of the time of {name}"
    if case["idle"] is not None:
        ways = " and ".join(f"{case['copied'][way] / MIB:.0f} MiB {way}" for way in (TO_DEVICE, TO_HOST))
        said += f"; idle {case['idle']:.0%}, {ways} a step, GPU {case['device_peak'] / MIB:.0f} MiB"
    said += f"; host {case['host_peak'] / MIB:.0f} MiB"
    if moved := case["figures"].get("step_moves"):
        best = case["figures"]["optimum"]
        said += f"; {moved.get(TO_DEVICE, 0)} moves to the device"
        said += ", at best not known (runs of blocks)" if best is None else f", at best {best}"
    return said + ("" if case["alike"] in (True, None) else f"; UNLIKE losses, by {case['off']:.1%}")


def draw(cases: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Tokens/s of each system by the size of the model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for system in SYSTEMS:
        shown = [case for case in cases if case["system"] == system.name and case["each"]]
        sizes = [case["parameters"] for case in shown]
        axes.plot(sizes, [case["tokens_second"] for case in shown], "o-", label=system.name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("parameters")
    axes.set_ylabel("tokens/s")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it works")
    parser.add_argument(
        "--rounds", type=int, help=f"rounds of the first model (default: {ROUNDS}; with --quick or --tiny, 1)"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.tiny:
        print("there is no GPU here: nothing is measured, and nothing written (--tiny runs on a CPU)")
        return 0
    args.quick = args.quick or args.tiny
    models, start = TINY if args.tiny else MODELS, time.monotonic()
    outcomes = measure(models, args.rounds or (1 if args.quick else ROUNDS), climbs=not args.quick)
    cases = list(cases_of(models, outcomes))
    for each in cases:
        print(line(each), flush=True)
    path = write_results("memory_gpu", output_folder(args), cases, args.quick)
    draw(cases, path.with_suffix(".png"))
    print(f"in {time.monotonic() - start:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
