"""Time to a given loss on workers of unlike speed: the example GPT, by five ways of training.

    python benchmarks/losstime.py [--quick] [--rounds N]

Four workers, one at a quarter of the others' speed, train the byte-level GPT of examples/gpt.py on the
standard library's source. Computing is emulated by sleeping: 25 ms a window at full speed, of which the real
forward and backward are a part. DistributedDataParallel, `ring` with even shares and with `sync.shares =
"auto"`, the server under asp, and ps-hra are runs of their own, which take turns in a new random order in
each round. All train on as many windows, with the same optimizer; a step of the first three has 16 windows of
all workers, one of the others 4 of its own. The learning rate goes by the windows that all have trained on,
or, under asp and ps-hra, by the part of a worker's own.

Worker 0 copies its parameters now and then; their held-out loss is worked out afterwards. What counts is the
time from the first step to the loss with which DDP ends. losstime.json has the curves, losstime.png shows the
first round's.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

import atoll
from common import leave_group, options, output_folder, write_results
from runs import read_records, run_to_end, time_to, write_record
from stragglers_worker import WARM_UP, Emulated, Plan, Record, Snapshots, parts
from workloads import gpt, gpt_adamw

DDP, ALONE = "DDP", "alone"
SETTINGS: dict[str, list[str]] = {
    "ring, even": ["sync.shares=even"],
    "ring, auto": ["sync.shares=auto"],
    "server, asp": ["run.strategy=server", "sync.consistency=asp"],
    "ps-hra": ["run.strategy=ps-hra", "groups.by=joint"],
}
SPEEDS = (1.0, 0.25, 1.0, 1.0)
EACH = 0.025  # seconds for a window at full speed
OF_WORKER = 4  # windows of a step, on the average
STEPS, QUICK_STEPS = 240, 16  # of the three that make steps together
ROUNDS = 3
RATE = 3e-3
DEADLINE = 1200.0  # seconds for one run


# -- a worker ----------------------------------------------------------------------------------------------


def train(
    record: Record,
    model: Emulated,
    trained: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Tensor],
    steps: int,
    clip: Callable[[], object],
    snapshots: Snapshots | None,
) -> None:
    """Train on `batches`, about `steps` of them; `trained` is what is called."""
    scheduler = LambdaLR(optimizer, lambda step: gpt.rate(step, min(1.0, step / steps), WARM_UP))
    for windows in batches:
        model.seconds = EACH * len(windows) / SPEEDS[record.rank]
        model.backward(gpt.loss_of(trained, windows))
        clip()
        optimizer.step()
        optimizer.zero_grad()
        record.steps.append(time.time())
        if snapshots is not None:
            snapshots.take(record.steps[-1])
        scheduler.step()
    if snapshots is not None:
        snapshots.take(time.time(), last=True)


def under_ddp(plan: Plan, record: Record, _alone: bool) -> Snapshots | None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    record.rank = rank
    inner, training, _ = parts(plan)
    model = Emulated(inner, 0.0)
    wrapped = DistributedDataParallel(model)
    sampler: Any = DistributedSampler(training, world, rank, seed=plan.seed, drop_last=True)
    batches = DataLoader(training, OF_WORKER, sampler=sampler, drop_last=True)
    snapshots = Snapshots(inner, plan.looks) if rank == 0 else None
    train(
        record, model, wrapped, gpt_adamw(wrapped, lr=RATE, betas=(0.9, 0.95)), batches, len(batches),
        lambda: nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0), snapshots,
    )  # fmt: skip
    leave_group()
    return snapshots


def under_atoll(plan: Plan, record: Record, alone: bool) -> Snapshots | None:
    inner, training, _ = parts(plan)
    with atoll.join() as session:
        record.rank = session.rank
        model = Emulated(inner, 0.0)
        optimizer = gpt_adamw(model, lr=RATE, betas=(0.9, 0.95))
        session.prepare(model, optimizer)
        batches = DataLoader(training, batch_sampler=session.batches(training, seed=plan.seed))
        own = SPEEDS[session.rank] / sum(SPEEDS) * len(SPEEDS) if alone else 1.0
        snapshots = Snapshots(inner, plan.looks) if session.rank == 0 else None
        train(
            record, model, model, optimizer, batches, max(1, round(own * len(batches))),
            lambda: session.clip_grad_norm_(1.0), snapshots,
        )  # fmt: skip
    return snapshots


def work(system: str, folder: Path, alone: bool, plan: Plan) -> None:
    """Be a worker. `alone`: workers make steps each by itself."""
    torch.set_num_threads(1)
    record = Record(rank=-1)
    snapshots = {"ddp": under_ddp, "atoll": under_atoll}[system](plan, record, alone)
    if snapshots is not None:
        record.held_out = snapshots.evaluate(parts(plan)[2], only_last=False)
    write_record(folder, record.rank, record)


# -- a run -------------------------------------------------------------------------------------------------


def run(name: str, steps: int, seed: int) -> dict[str, Any]:
    """One run; seconds and the held-out curve, from the first step of all workers on."""
    windows = steps * OF_WORKER * len(SPEEDS)
    slowest = steps * OF_WORKER * EACH / min(SPEEDS)
    plan = Plan([], windows, slowest, seed, held_out=True)
    with tempfile.TemporaryDirectory() as given:
        folder, given_plan = Path(given), json.dumps(asdict(plan))
        how = ALONE if name in ("server, asp", "ps-hra") else "together"
        workers = str(len(SPEEDS))
        if name == DDP:
            launcher = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
            launcher += ["--nproc-per-node", workers, __file__, "--work", "ddp"]
        else:
            keys = [f"sync.global_batch={OF_WORKER * len(SPEEDS)}", f"run.directory={folder / 'run'}"]
            launcher = ["atoll.cli.app", "run", "--workers", workers]
            launcher += [part for key in (*keys, *SETTINGS[name]) for part in ("--set", key)]
            launcher += [__file__, "--work", "atoll"]
        run_to_end(name, [sys.executable, "-m", *launcher, given, how, given_plan], DEADLINE)
        records = read_records(folder, Record, len(SPEEDS))
    first = min(record.steps[0] for record in records)
    curve = sorted((round(when - first, 2), round(loss, 5)) for r in records for when, loss in r.held_out)
    return {"seconds": max(record.steps[-1] for record in records) - first, "held_out": curve}


def case_of(name: str, own: Sequence[dict[str, Any]], ddp: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One way of training: its times to the loss with which DDP ends, round by round, beside DDP's."""
    ends = [other["held_out"][-1][1] for other in ddp]
    goals = [time_to(other["held_out"], end) for other, end in zip(ddp, ends, strict=True)]
    reached = [time_to(mine["held_out"], end) for mine, end in zip(own, ends, strict=True)]
    there = [seconds for seconds in reached if seconds is not None]
    ratios = [mine / goal for mine, goal in zip(reached, goals, strict=True) if mine and goal]
    return {
        "name": name,
        "seconds_to_loss": median(there) if there else None,
        "of_ddp": median(ratios) if ratios else None,
        "reached": len(there),
        "rounds": len(own),
        "seconds": median(mine["seconds"] for mine in own),
        "held_out": median(mine["held_out"][-1][1] for mine in own),
        "each": list(own),
    }


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """The held-out loss over time, in the first round."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for case in cases:
        axes.plot(*zip(*case["each"][0]["held_out"], strict=True), label=case["name"])
    axes.axhline(cases[0]["each"][0]["held_out"][-1][1], color="#8a8a8a", linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds since the first step (dotted: the loss with which DDP ends)")
    axes.set_ylabel("held-out loss, nats a byte")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.suptitle("Four workers, one at a quarter of the speed")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        system, folder, how, plan = sys.argv[2:]
        work(system, Path(folder), how == ALONE, Plan(**json.loads(plan)))
        return
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, help=f"rounds of runs (default: {ROUNDS}; with --quick, 1)")
    given = parser.parse_args()
    rounds, order = given.rounds or (1 if given.quick else ROUNDS), random.Random(1)
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in (DDP, *SETTINGS)}
    for seed in range(rounds):
        for name in order.sample(list(made), len(made)):
            made[name].append(run(name, QUICK_STEPS if given.quick else STEPS, seed))
    cases = [case_of(name, made[name], made[DDP]) for name in made]
    for case in cases:
        to_loss = f"{case['seconds_to_loss']:.1f} s" if case["reached"] else "never"
        print(
            f"{case['name']}: to DDP's loss {to_loss} (in {case['reached']} of {case['rounds']} rounds), "
            f"ends after {case['seconds']:.1f} s with {case['held_out']:.4f}",
            flush=True,
        )
    folder = output_folder(given)
    write_results("losstime", folder, cases, given.quick)
    draw(cases, folder / "losstime.png")


if __name__ == "__main__":
    main()
