"""(e) What a model learns under bsp, ssp and asp: the held-out loss after equally many samples.

    python benchmarks/consistency.py [--quick]

Four workers train the network of `examples/digits.py`, and a small byte-level GPT of `examples/gpt.py`,
through one shard, from three seeds, with the same settings under each consistency. Every epoch counts each
sample once, so all have seen equally many. Hub and shard run on threads of this process, workers in their
own.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset, TensorDataset

import atoll
from atoll.core.config import SERVED, Config, Run, Sync
from atoll.core.events import StepDone
from atoll.hub.planner import GroupingSettings
from atoll.observe.journal import JournalReader
from atoll.observe.rundir import RunDirectory
from atoll.train.api.place import Place
from atoll.train.sync.service import Service
from common import MIB, options, output_folder, recorded, write_results
from stragglers_worker import Emulated
from support.pool import WorkerPool
from support.served import ServedRun, served_worker
from workloads import digits_network, gpt, gpt_adamw

WITHIN = 0.02  # of bsp's held-out loss, on average over the seeds
WORKERS = 4
SEEDS = (0, 1, 2)
SLACK = 4
BSP = "bsp"
CONSISTENCIES = (BSP, "ssp", "asp")
DEADLINE = 300.0  # seconds for one training
NAMES = {"bsp": "bsp", "ssp": f"ssp, slack {SLACK}", "asp": "asp"}


# -- what is trained ---------------------------------------------------------------------------------------


@dataclass
class Task:
    """A model, its data, and how it is trained. `rate` is the learning rate's factor at a part of the run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    training: Any  # a dataset
    loss: Callable[[nn.Module, Any], Tensor]  # of a batch
    held_out: Callable[[nn.Module], float]
    batch: int
    epochs: int
    clip: float | None = None
    rate: Callable[[int, float], float] = lambda _step, _part: 1.0


def digits(seed: int, quick: bool) -> Task:
    """As `examples/digits.py` has it; its test images are what is held out."""
    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images))
    images, labels = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    model = digits_network()

    @torch.no_grad()
    def held_out(model: nn.Module) -> float:
        return F.cross_entropy(model(images[1500:]), labels[1500:]).item()

    return Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01),
        training=TensorDataset(images[:1500], labels[:1500]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        held_out=held_out,
        batch=32,
        epochs=1 if quick else 20,
    )


def small_gpt(seed: int, quick: bool) -> Task:
    """`examples/gpt.py` with a smaller model, for a few hundred steps of each worker."""
    context, batch, steps = 64, 4, 40 if quick else 400
    text, rest = gpt.read_text(4 * MIB)
    windows, others = gpt.Windows(text, context), gpt.Windows(rest, context)
    tested = torch.stack([others[i] for i in range(0, len(others), max(1, len(others) // 512))])
    torch.manual_seed(seed)
    model = gpt.GPT(layers=2, heads=4, width=64, context=context)
    chosen = torch.randperm(len(windows))[: WORKERS * batch * steps].tolist()

    @torch.no_grad()
    def held_out(model: nn.Module) -> float:
        return float(gpt.loss_of(model, tested))

    return Task(
        model=model,
        optimizer=gpt_adamw(model, lr=3e-3, betas=(0.9, 0.95)),
        training=Subset(windows, chosen),
        loss=gpt.loss_of,
        held_out=held_out,
        batch=batch,
        epochs=1,
        clip=1.0,
        rate=lambda step, part: gpt.rate(step, part, warm_up=40),
    )


TASKS = {"digits": digits, "GPT, 0.1M parameters": small_gpt}


# -- a worker ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one training came to, as one worker saw it."""

    held_out: float  # of the parameters with the contributions of all
    samples: float
    steps: int
    staleness: list[float]  # of each of its contributions; a group's are with the first of its members
    contributors: list[int]  # by step: the number of its group there, or its own


def train(
    place: Place,
    address: str,
    task: str,
    config: Config,
    seed: int,
    quick: bool,
    computing: Sequence[float],
) -> Outcome:
    """One worker's part. `computing`: for how long each worker computes a batch, emulated, in seconds; empty
    where all compute as fast as they can. A worker's learning rate goes by its place in the share of the
    samples that its speed gives it."""
    it = TASKS[task](seed, quick)
    staleness, contributors = [], []
    pace = 1.0  # the steps of an even share to its own
    if computing:
        it.model = Emulated(it.model, computing[place.rank])
    if computing and config.run.strategy in SERVED:
        pace = computing[place.rank] * sum(1 / seconds for seconds in computing) / WORKERS
    with (
        recorded() as records,
        served_worker(address, place.rank),
        atoll.join(config) as session,
    ):
        session.prepare(it.model, it.optimizer)
        service = session._runtime.member
        loader = DataLoader(it.training, it.batch, sampler=session.sampler(it.training, seed=seed))
        steps = it.epochs * len(loader)
        scheduler = LambdaLR(it.optimizer, lambda step: it.rate(int(step * pace), step * pace / steps))
        samples = 0.0
        for _ in range(it.epochs):
            for batch in loader:
                loss = it.loss(it.model, batch)
                if isinstance(it.model, Emulated):
                    it.model.backward(loss)
                else:
                    loss.backward()  # type: ignore[no-untyped-call]
                if it.clip is not None:
                    session.clip_grad_norm_(it.clip)
                samples += session._state.prepared[0].sets[0].own_samples
                contributors.append(contributor_of(session))
                speaks = session._runtime.group_ring is None or session.group.rank == 0
                it.optimizer.step()
                if speaks and isinstance(service, Service):
                    staleness.append(service.staleness)
                it.optimizer.zero_grad()
                scheduler.step()
        session.barrier()
        if isinstance(it.model, Emulated):
            it.model = it.model.module
        held_out = it.held_out(it.model)
        if not isinstance(service, Service):
            staleness = [float(step.staleness) for step in steps_of(records)]
    return Outcome(
        held_out=held_out,
        samples=samples,
        steps=len(contributors),
        staleness=staleness,
        contributors=contributors,
    )


def steps_of(records: Path) -> list[StepDone]:
    """What the one worker with a journal there has told of its steps."""
    journals = RunDirectory(records).journals().values()
    events = [event for journal in journals for event in JournalReader(journal).read()]
    return [event for event in events if isinstance(event, StepDone)]


def contributor_of(session: atoll.Session) -> int:
    """Whose contribution this worker's gradients are part of: its group's, or its own."""
    regrouping = session._runtime.regrouping
    return session.rank if regrouping is None else regrouping.contributor


# -- the cases ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConsistencyCase:
    """One task under one consistency, over the seeds."""

    task: str
    consistency: str
    workers: int
    held_out: list[float]  # by seed, nats
    samples: list[float]
    steps: list[int]  # of the workers with the fewest and the most
    staleness: float  # the mean over contributions
    off: float  # how far the mean held-out loss is above bsp's (below, if negative), as a part of it
    offs: list[float]  # by seed
    target: float | None

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.off <= self.target

    @property
    def mean(self) -> float:
        return sum(self.held_out) / len(self.held_out)

    def line(self) -> str:
        verdict = f"target {self.target:.0%}: {'met' if self.met else 'MISSED'}" if self.target else "-"
        losses = ", ".join(f"{loss:.4f}" for loss in self.held_out)
        return (
            f"{self.task}, {NAMES[self.consistency]}: held-out loss {self.mean:.4f} ({losses}), "
            f"{self.off:+.2%} of bsp's; {self.steps[0]} to {self.steps[1]} steps a worker, staleness "
            f"{self.staleness:.3f}; {verdict}"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "mean": round(self.mean, 5), "met": self.met}


def run_once(
    pool: WorkerPool,
    task: str,
    config: Config,
    seed: int,
    quick: bool,
    computing: Sequence[float] = (),
    grouping: GroupingSettings | None = None,
) -> list[Outcome]:
    """One training; what each worker saw of it. `computing` as `train` has it, `grouping` as the hub."""
    # The hub prints each of its decisions.
    shards = 1 if config.run.strategy in SERVED else 0
    with contextlib.redirect_stdout(io.StringIO()), ServedRun(WORKERS, shards, grouping=grouping) as served:
        arguments = (served.address, task, config, seed, quick, computing)
        outcomes: list[Outcome] = pool.run(train, *arguments, world=WORKERS, deadline=DEADLINE)
    if served.failures:
        raise SystemExit(f"{task}, {config.sync.consistency}: {served.failures}")
    return outcomes


def run_task(pool: WorkerPool, task: str, seeds: Sequence[int], quick: bool) -> list[ConsistencyCase]:
    found: dict[str, list[list[Outcome]]] = {}
    for consistency in CONSISTENCIES:
        sync = Sync(timeout="60s", consistency=consistency, slack=SLACK)  # type: ignore[arg-type]
        config = Config(run=Run(strategy="server"), sync=sync)
        found[consistency] = [run_once(pool, task, config, seed, quick) for seed in seeds]
    return [_case(task, consistency, found) for consistency in CONSISTENCIES]


def final(run: Sequence[Outcome]) -> float:
    """The held-out loss with the contributions of all, which all workers have at the end."""
    if len({outcome.held_out for outcome in run}) > 1:
        raise SystemExit(f"workers ended with unlike parameters: {[outcome.held_out for outcome in run]}")
    return run[0].held_out


def _case(task: str, consistency: str, found: dict[str, list[list[Outcome]]]) -> ConsistencyCase:
    runs, reference = found[consistency], [final(run) for run in found[BSP]]
    losses = [final(run) for run in runs]
    samples = [sum(outcome.samples for outcome in run) for run in runs]
    if samples != [sum(outcome.samples for outcome in run) for run in found[BSP]]:
        raise SystemExit(f"{task}, {consistency}: {samples} samples, another number than under bsp")
    steps = [outcome.steps for run in runs for outcome in run]
    stale = [each for run in runs for outcome in run for each in outcome.staleness]
    return ConsistencyCase(
        task=task,
        consistency=consistency,
        workers=WORKERS,
        held_out=losses,
        samples=samples,
        steps=[min(steps), max(steps)],
        staleness=sum(stale) / len(stale),
        off=sum(losses) / sum(reference) - 1,
        offs=[round(own / other - 1, 4) for own, other in zip(losses, reference, strict=True)],
        target=None if consistency == BSP else WITHIN,
    )


def draw(cases: Sequence[ConsistencyCase], path: Path) -> None:
    """A picture of each case's loss, as a part of bsp's: a dot for each seed, a bar for the mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [case for case in cases if case.target is not None]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.55 * len(shown)), layout="constrained")
    for row, case in enumerate(reversed(shown)):
        axes.scatter([100 * off for off in case.offs], [row] * len(case.offs), color="#9db7d1", zorder=2)
        axes.vlines(100 * case.off, row - 0.25, row + 0.25, color="#2b6ca3", linewidth=3, zorder=3)
    axes.axvline(0, color="black", linewidth=1)
    axes.axvline(100 * WITHIN, color="#c23b22", linewidth=1.5)
    axes.set_yticks(range(len(shown)), [f"{c.task}\n{NAMES[c.consistency]}" for c in reversed(shown)])
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel("held-out loss against bsp's, % (dots: seeds, blue: their mean, red: target)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle("What is learnt under ssp and asp", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    args = options(__doc__).parse_args()
    torch.set_num_threads(1)
    cases: list[ConsistencyCase] = []
    start = time.monotonic()
    with WorkerPool(DEADLINE) as pool:
        for task in TASKS:
            new = run_task(pool, task, SEEDS[:1] if args.quick else SEEDS, args.quick)
            cases += new
            print("\n".join(case.line() for case in new), flush=True)
    print(f"in {time.monotonic() - start:.0f} s")
    folder = output_folder(args)
    write_results("consistency", folder, [case.to_json() for case in cases], quick=args.quick)
    draw(cases, folder / "consistency.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
