"""(p) The same training job under peers, ring, DistributedDataParallel, hivemind and torchft: time to a loss.

    python benchmarks/peers_rivals.py [--quick] [--hivemind PYTHON] [--torchft PYTHON] [--rounds N]

Four peers train a small byte-level GPT on the standard library's source, over TCP on loopback: the same
model, data, optimizer and seed, 16 windows in each step of the model (benchmarks/peers_rivals_worker.py).
Computing is emulated, by sleeping: 100 ms for a peer's four windows; then 400 ms on one of them. Under peers
a batch is dealt by speed (`session.batches`); in hivemind, whoever is fast brings more gradients into a step,
by its own design.

The loss to reach is within 2 % of what DistributedDataParallel has after so many steps of the same round,
with no slow peer; all may take half as many steps more. Time counts from when the last worker began its first
batch. The runs take turns, in a new random order in each round.

PYTHON is an interpreter in whose environment hivemind, or torchft, is installed beside the same torch, and
Atoll, whose models and data they use. A system that is not given, or fails, is in the results with why.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import options, output_folder, write_results
from peers_rivals_worker import Plan, Record
from runs import read_records, spread, time_to
from survival import free_port, service

WORKER = Path(__file__).with_name("peers_rivals_worker.py")
WORKERS, BATCH = 4, 4
STEPS, QUICK_STEPS = 200, 40  # of DistributedDataParallel, to the loss that all shall reach
MORE = 1.5  # times as many steps that all may take
WITHIN = 0.02
SECONDS, QUICK_SECONDS = 240.0, 60.0  # for a training
START_SECONDS = 240.0  # for its start, its end and the losses
FAST, SLOW = "four alike", "one of four at a quarter"
COMPUTING = {FAST: [0.1, 0.1, 0.1, 0.1], SLOW: [0.1, 0.4, 0.1, 0.1]}
ROUNDS = 3


@dataclass(frozen=True)
class System:
    """One contestant: the worker's word for it, and for Atoll's the strategy and its settings."""

    name: str
    system: str
    settings: tuple[str, ...] = ()


DDP = System("DistributedDataParallel", "ddp")
ATOLL = (
    System("Atoll, peers", "atoll", ("run.strategy=peers", f"sync.global_batch={WORKERS * BATCH}")),
    System("Atoll, ring", "atoll", ("run.strategy=ring", f"sync.global_batch={WORKERS * BATCH}")),
)
HIVEMIND = (
    System("hivemind", "hivemind"),
    System("hivemind, delayed", "hivemind-delayed"),
)
TORCHFT = (System("torchft", "torchft"),)


@dataclass
class Outcome:
    """One run. Times are in seconds from when the first batch of all was begun."""

    system: str
    seconds: float  # of the training
    steps: int  # of the model
    batches: list[int]  # that each worker computed
    held_out: list[tuple[float, float]]  # (when, nats)
    unlike: bool  # whether the workers' last parameters have unlike losses


# -- a run -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def commands(
    system: System, folder: Path, plan: Plan, python: str
) -> Iterator[tuple[list[list[str]], dict[str, str]]]:
    """The commands that are one run, and what their environment has more."""
    script = [str(WORKER), system.system, str(folder), json.dumps(asdict(plan))]
    each = [[python, *script, str(rank)] for rank in range(WORKERS)]
    if system.system == "atoll":
        given = [part for one in system.settings for part in ("--set", one)]
        run = ["-m", "atoll.cli.app", "run", "--workers", str(WORKERS)]
        yield [[python, *run, *given, "--set", f"run.directory={folder / 'run'}", *script]], {}
    elif system is DDP:
        run = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        yield [[python, *run, "--nproc-per-node", str(WORKERS), *script]], {}
    elif system in TORCHFT:
        port = free_port()
        lighthouse = [str(Path(python).parent / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}"]
        lighthouse += ["--min_replicas", str(WORKERS), "--join_timeout_ms", "10000"]
        with service(lighthouse, folder / "lighthouse.log"):
            yield each, {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    else:
        yield each, {}


def run(system: System, plan: Plan, python: str) -> Outcome | str:
    """One run; where it fails, why."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with commands(system, folder, plan, python) as (started, more):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
            failed = finished(started, environment, folder, plan.seconds + START_SECONDS)
        if failed:
            return failed
        records = read_records(folder, Record, WORKERS)
    return outcome(system, records)


def finished(started: Sequence[list[str]], environment: dict[str, str], folder: Path, seconds: float) -> str:
    """Run them all to their end; what the first that failed said, or that they had not ended in time."""
    logs = [folder / f"log-{number}" for number in range(len(started))]
    processes, until = [], time.monotonic() + seconds
    for command, log in zip(started, logs, strict=True):
        with log.open("wb") as said:
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
                )
            )
    try:
        for process, log in zip(processes, logs, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(max(0.1, until - time.monotonic())) == 0:
                    continue
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            how = "had not ended in time" if process.poll() is None else f"status {process.returncode}"
            # torchrun says much after the error of a worker
            errors = [line for line in lines if re.search(r"\w(Error|Exception): \S", line)]
            return f"{how}: {(errors or lines or ['it said nothing'])[-1]}"
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    return ""


def outcome(system: System, records: Sequence[Record]) -> Outcome:
    begin = max(record.begin for record in records)
    last = [record.held_out[-1][1] for record in records]
    return Outcome(
        system=system.name,
        seconds=min(record.end for record in records) - begin,
        steps=records[0].steps,
        batches=[record.batches for record in records],
        held_out=[(round(when - begin, 2), round(loss, 5)) for when, loss in records[0].held_out],
        unlike=max(last) - min(last) > 1e-3,
    )


# -- the cases ---------------------------------------------------------------------------------------------


def loss_wanted(ddp: Outcome) -> float:
    """Within 2 % of what DistributedDataParallel had after so many of its steps."""
    at = ddp.seconds / MORE
    return min(ddp.held_out, key=lambda look: abs(look[0] - at))[1] * (1 + WITHIN)


def times_to(own: Sequence[Outcome | str], wanted: Sequence[float]) -> list[float | None]:
    """When each round's run came to its loss; None: never, or it failed."""
    pairs = zip(own, wanted, strict=True)
    return [None if isinstance(each, str) else time_to(each.held_out, loss) for each, loss in pairs]


def case(
    setting: str,
    system: System,
    own: Sequence[Outcome | str],
    wanted: Sequence[float],
    ours: Sequence[float | None],
) -> dict[str, Any]:
    """One system's times to the losses wanted, round by round; `ours` are those under peers."""
    made = [(each, loss) for each, loss in zip(own, wanted, strict=True) if isinstance(each, Outcome)]
    failed = [each for each in own if isinstance(each, str)]
    times = [
        time_to(each.held_out, loss) if isinstance(each, Outcome) else None
        for each, loss in zip(own, wanted, strict=True)
    ]
    found = [seconds for seconds in times if seconds is not None]
    ratios = [mine / theirs for mine, theirs in zip(ours, times, strict=True) if mine and theirs]
    return {
        "setting": setting,
        "system": system.name,
        "failed": failed,
        "losses": list(wanted),
        "times": times,
        "seconds": median(found) if found else None,
        "not_reached": len(made) - len(found),
        "seconds_step": median(each.seconds / max(1, each.steps) for each, _ in made) if made else None,
        "held_out": [each.held_out[-1][1] for each, _ in made],
        "unlike": sum(each.unlike for each, _ in made),
        "peers_ratio": spread(ratios) if ratios else None,
        "each": [asdict(each) for each, _ in made],
    }


def line(case: dict[str, Any]) -> str:
    said = f"{case['setting']}; {case['system']}: "
    if case["failed"]:
        said += f"did not run ({len(case['failed'])} times): {case['failed'][0]}; "
    if case["seconds_step"] is None:
        return said
    to = f"{case['seconds']:.1f} s" if case["seconds"] is not None else "never"
    said += f"to the loss: {to} ({case['not_reached']} of {len(case['held_out'])} not), "
    said += f"{1e3 * case['seconds_step']:.0f} ms a step, last loss {median(case['held_out']):.4f}"
    if it := case["peers_ratio"]:
        said += f"; peers takes {it['median']:.2f} of it ({it['least']:.2f} to {it['most']:.2f})"
    return said + (f"; unlike parameters at the end of {case['unlike']} runs" if case["unlike"] else "")


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Held-out loss over seconds, each system's first run; left: no slow peer, right: one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained", sharey=True)
    for axes, setting in zip(both, COMPUTING, strict=True):
        shown = [case for case in cases if case["setting"] == setting and case["each"]]
        for case in shown:
            when, losses = zip(*case["each"][0]["held_out"], strict=True)
            axes.plot(when, losses, linewidth=1.3, label=case["system"])
        if shown:
            axes.axhline(shown[0]["losses"][0], color="#c23b22", linewidth=1)
            axes.legend(fontsize=8, frameon=False)
        axes.set_xscale("log")
        axes.set_xlabel(f"seconds; {setting}")
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("held-out loss, nats (red: to reach)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def systems_of(args: Any) -> dict[System, str]:
    """Each system, with the interpreter that runs it, or "" where there is none."""
    own = (*ATOLL, DDP) if not args.without_atoll else (DDP,)
    return {
        **dict.fromkeys(own, sys.executable),
        **dict.fromkeys(HIVEMIND, args.hivemind),
        **dict.fromkeys(TORCHFT, args.torchft),
    }


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--hivemind", default="", metavar="PYTHON", help="an interpreter that has hivemind")
    parser.add_argument("--torchft", default="", metavar="PYTHON", help="an interpreter that has torchft")
    parser.add_argument("--without-atoll", action="store_true", help="the others alone")
    parser.add_argument("--rounds", type=int, help=f"rounds of runs (default: {ROUNDS}; with --quick, 1)")
    args = parser.parse_args()
    steps, seconds = (QUICK_STEPS, QUICK_SECONDS) if args.quick else (STEPS, SECONDS)
    pythons, order, start = systems_of(args), random.Random(1), time.monotonic()
    outcomes: dict[tuple[str, str], list[Outcome | str]] = {
        (setting, system.name): [] for setting in COMPUTING for system in pythons
    }
    for seed in range(args.rounds or (1 if args.quick else ROUNDS)):
        turns = [(setting, system) for setting in COMPUTING for system in pythons]
        for setting, system in order.sample(turns, len(turns)):
            plan = Plan(COMPUTING[setting], BATCH, round(MORE * steps), seconds, seed)
            python = pythons[system]
            own = run(system, plan, python) if python else f"no interpreter was given: --{system.system}"
            outcomes[setting, system.name].append(own)
            said = own if isinstance(own, str) else f"{own.steps} steps in {own.seconds:.1f} s"
            print(f"round {seed}: {setting}; {system.name}: {said}", flush=True)
    references = outcomes[FAST, DDP.name]
    wanted = [loss_wanted(each) if isinstance(each, Outcome) else float("nan") for each in references]
    cases = []
    for setting in COMPUTING:
        mine = outcomes.get((setting, ATOLL[0].name))
        ours = times_to(mine, wanted) if mine else [None] * len(wanted)
        cases += [case(setting, system, outcomes[setting, system.name], wanted, ours) for system in pythons]
    for each in cases:
        print(line(each), flush=True)
    path = write_results("peers_rivals", output_folder(args), cases, args.quick)
    draw(cases, path.with_suffix(".png"))
    print(f"in {time.monotonic() - start:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
