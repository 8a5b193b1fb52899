"""What a model learns from stale contributions: asynchronously, with one worker far slower than the others.

    python benchmarks/staleness.py [--quick] [--strategy server|ps-hra] [--seeds 3] [--cases bsp,plain,...]

Four workers train the small GPT of `benchmarks/consistency.py`, one of them slowed down so that its
contributions come about four global iterations late: synchronously, as `sync.staleness` scales them or does
not, with delay compensation, and with exchanges in flight while the next step computes. All see equally many
samples. With `--strategy ps-hra` the workers form two groups, and a contribution is a group's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.core.config import Config, Groups, Run, Sync
from atoll.testing.pool import WorkerPool
from common import options, output_folder, write_results
from consistency import BSP, DEADLINE, SEEDS, WITHIN, WORKERS, Outcome, final, run_once

TASK = "GPT, 0.1M parameters"
SPEEDS = {"server": (1.0, 1.0, 1.0, 0.2), "ps-hra": (1.0, 1.0, 0.2, 0.2)}  # of the workers
GROUPS = 2
COMPENSATION = 1000.0  # some times the predictions in a batch, which are 4 windows of 64 bytes

# What each case sets of `sync`. "plain" does nothing about staleness; in a pipeline all is one step late.
CASES: dict[str, dict[str, Any]] = {
    "bsp": {"consistency": BSP},
    "plain": {"consistency": "asp", "staleness": "none"},
    "weight": {"consistency": "asp", "staleness": "weight"},
    "rate": {"consistency": "asp", "staleness": "rate"},
    "compensated": {"consistency": "asp", "compensation": COMPENSATION},
    "pipeline": {"consistency": "asp", "pipeline": 1},
    "pipeline and compensated": {"consistency": "asp", "pipeline": 1, "compensation": COMPENSATION},
}
WITHOUT_TARGET = ("bsp", "plain", "pipeline", "pipeline and compensated")  # shown, whatever they come to


@dataclass(frozen=True)
class StaleCase:
    """One way to take stale contributions, over the seeds."""

    name: str
    strategy: str
    speeds: list[float]
    sync: dict[str, Any]
    held_out: list[float]  # by seed, nats
    samples: list[float]
    steps: list[int]  # of the workers with the fewest and the most
    staleness: float  # the mean over contributions
    stalest: float  # the most, over all of them
    slowest: float  # the mean over those of the worker that is the stalest
    seconds: float
    off: float  # how far the mean held-out loss is above bsp's, as a part of it
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
            f"{self.strategy}, {self.name}: held-out loss {self.mean:.4f} ({losses}), {self.off:+.2%} of "
            f"bsp's; {self.steps[0]} to {self.steps[1]} steps a worker, staleness {self.staleness:.2f}, the "
            f"slowest worker's {self.slowest:.2f}, at most {self.stalest:.2f}; {self.seconds:.0f} s; "
            f"{verdict}"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "mean": round(self.mean, 5), "met": self.met}


def run_case(
    pool: WorkerPool, name: str, strategy: Any, seeds: Sequence[int], quick: bool
) -> tuple[list[list[Outcome]], float]:
    """The outcomes by seed and worker, and the seconds that it took."""
    groups = Groups(count=GROUPS) if strategy == "ps-hra" else Groups()
    config = Config(run=Run(strategy=strategy), sync=Sync(timeout="60s", **CASES[name]), groups=groups)
    speeds = SPEEDS[strategy] if name != "bsp" else (1.0,) * WORKERS  # they would wait, and learn the same
    start = time.monotonic()
    runs = [run_once(pool, TASK, config, seed, quick, speeds) for seed in seeds]
    return runs, time.monotonic() - start


def case_of(
    name: str, strategy: str, runs: list[list[Outcome]], seconds: float, reference: list[list[Outcome]]
) -> StaleCase:
    losses, of_bsp = [final(run) for run in runs], [final(run) for run in reference]
    samples = [sum(outcome.samples for outcome in run) for run in runs]
    if samples != [sum(outcome.samples for outcome in run) for run in reference]:
        raise SystemExit(f"{name}: {samples} samples, another number than under bsp")
    outcomes = [outcome for run in runs for outcome in run]
    steps = [outcome.steps for outcome in outcomes]
    return StaleCase(
        name=name,
        strategy=strategy,
        speeds=list(SPEEDS[strategy]),
        sync=CASES[name],
        held_out=losses,
        samples=samples,
        steps=[min(steps), max(steps)],
        staleness=sum(o.staleness * o.steps for o in outcomes) / sum(steps),
        stalest=max(o.stalest for o in outcomes),
        slowest=sum(max(o.staleness for o in run) for run in runs) / len(runs),
        seconds=seconds,
        off=sum(losses) / sum(of_bsp) - 1,
        offs=[round(own / other - 1, 4) for own, other in zip(losses, of_bsp, strict=True)],
        target=None if name in WITHOUT_TARGET else WITHIN,
    )


def draw(cases: Sequence[StaleCase], path: Path) -> None:
    """A picture of each case's loss, as a part of bsp's: a dot for each seed, a bar for the mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [case for case in cases if case.name != "bsp"]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.55 * len(shown)), layout="constrained")
    for row, case in enumerate(reversed(shown)):
        axes.scatter([100 * off for off in case.offs], [row] * len(case.offs), color="#9db7d1", zorder=2)
        axes.vlines(100 * case.off, row - 0.25, row + 0.25, color="#2b6ca3", linewidth=3, zorder=3)
    axes.axvline(0, color="black", linewidth=1)
    axes.axvline(100 * WITHIN, color="#c23b22", linewidth=1.5)
    labels = [f"{c.name}\nthe slow worker's staleness {c.slowest:.1f}" for c in reversed(shown)]
    axes.set_yticks(range(len(shown)), labels)
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel("held-out loss against bsp's, % (dots: seeds, blue: their mean, red: target)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle(f"Stale contributions, strategy {shown[0].strategy}" if shown else "", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--strategy", choices=list(SPEEDS), default="server")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many, from 0")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of: {', '.join(CASES)}; bsp always runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [name for name in CASES if name == "bsp" or name in args.cases.split(",")]
    seeds = range(1 if args.quick else args.seeds)
    cases: list[StaleCase] = []
    reference: list[list[Outcome]] = []
    with WorkerPool(DEADLINE) as pool:
        for name in wanted:
            strategy = "server" if name == "bsp" else args.strategy
            runs, seconds = run_case(pool, name, strategy, seeds, args.quick)
            reference = reference or runs
            cases.append(case_of(name, strategy, runs, seconds, reference))
            print(cases[-1].line(), flush=True)
    folder = output_folder(args)
    results = "staleness" if args.strategy == "server" else f"staleness-{args.strategy}"
    write_results(results, folder, [case.to_json() for case in cases], quick=args.quick)
    draw(cases, folder / f"{results}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
