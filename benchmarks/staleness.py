"""What a model learns from stale contributions: asynchronously, with some workers far slower than others.

    python benchmarks/staleness.py [--quick] [--strategy server|ps-hra|peers] [--seeds 3] [--cases plain,...]

Four workers train the small GPT of `benchmarks/consistency.py`; what each computes is emulated, by sleeping.
Under `server` one is five times as slow as the others, so that its contributions come about four global
iterations late. Under `ps-hra` two are: the run's hub puts them into one group, and the fast ones into
another; a contribution is a group's, and the slow group's come up to about four late.
Beside the synchronous run: contributions as `sync.staleness` scales them or does not ("plain"), with delay
compensation, and with exchanges in flight while the next step computes; under `ps-hra` also the plain
asynchronous run of the same workers without groups. All see equally many samples.

Under `peers` one node is three times as slow as the others, who are ahead of it by `sync.stale_max` then: 0,
1, 4 and 16, with the contributions that are on their way in their parameters ("all", the default), and at 4
with their own alone, and with none. The synchronous run is a ring.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.core.config import Config, Groups, Run, Sync
from atoll.hub.planner import GroupingSettings
from common import options, output_folder, write_results
from consistency import BSP, DEADLINE, SEEDS, WITHIN, Outcome, final, run_once
from support.pool import WorkerPool

TASK = "GPT, 0.1M parameters"
SERVER, GROUPED, PEERS = "server", "ps-hra", "peers"
# For how long each worker computes a batch, in seconds. Who is slow is to be found.
COMPUTING = {
    SERVER: (0.04, 0.04, 0.04, 0.2),
    GROUPED: (0.04, 0.22, 0.04, 0.22),
    PEERS: (0.1, 0.1, 0.1, 0.3),
}
GROUPS = 2
LEAST_GROUPED = 0.9  # of the steps, that are made in groups; before are the probe and the move
COMPENSATION = 1000.0  # some times the predictions in a batch, which are 4 windows of 64 bytes

# What each case sets of `sync`. "plain" does nothing about staleness; in a pipeline all is one step late.
CASES: dict[str, dict[str, Any]] = {
    "bsp": {"consistency": BSP},
    "plain without groups": {"consistency": "asp", "staleness": "none"},
    "plain": {"consistency": "asp", "staleness": "none"},
    "weight": {"consistency": "asp", "staleness": "weight"},
    "rate": {"consistency": "asp", "staleness": "rate"},
    "compensated": {"consistency": "asp", "compensation": COMPENSATION},
    "pipeline": {"consistency": "asp", "pipeline": 1},
    "pipeline and compensated": {"consistency": "asp", "pipeline": 1, "compensation": COMPENSATION},
}
UNGROUPED = ("bsp", "plain without groups")
OF_PEERS: dict[str, dict[str, Any]] = {
    "bsp": {},
    **{f"stale_max {most}": {"stale_max": most} for most in (0, 1, 4, 16)},
    **{
        f"stale_max 4, overlay {overlay}": {"stale_max": 4, "overlay": overlay} for overlay in ("own", "none")
    },
}
# Shown, whatever they come to.
WITHOUT_TARGET = (
    *UNGROUPED,
    *("plain", "pipeline", "pipeline and compensated"),
    *("stale_max 4, overlay own", "stale_max 4, overlay none"),
)


def cases_of(strategy: str) -> dict[str, dict[str, Any]]:
    """What each of the strategy's cases sets of `sync`."""
    if strategy == PEERS:
        return OF_PEERS
    # Where there are no groups, "plain" is without them.
    return {name: sync for name, sync in CASES.items() if strategy == GROUPED or "without" not in name}


@dataclass(frozen=True)
class StaleCase:
    """One way to take stale contributions, over the seeds."""

    name: str
    strategy: str
    computing: list[float]  # seconds for a batch, by worker; empty: as fast as they can
    sync: dict[str, Any]
    held_out: list[float]  # by seed, nats
    samples: list[float]
    steps: list[int]  # of the workers with the fewest and the most
    groups: list[list[list[int]]]  # by seed: at the end, the workers of each contributor
    grouped: float  # the part of the steps that was made in groups of several
    staleness: float  # the mean over all contributions
    stalest: float  # the most of them
    slowest: float  # the mean over those of the group, or worker, with the stalest; then more of the same
    slowest_p95: float
    slowest_most: float
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
        shown = " | ".join(" ".join(map(str, group)) for group in self.groups[-1])
        return (
            f"{self.strategy}, {self.name}: held-out loss {self.mean:.4f} ({losses}), {self.off:+.2%} of "
            f"bsp's; {self.steps[0]} to {self.steps[1]} steps a worker, {self.grouped:.0%} of them in groups "
            f"({shown} at the end); staleness {self.staleness:.2f}, the slowest's {self.slowest:.2f} (95 % "
            f"at most {self.slowest_p95:.2f}, most {self.slowest_most:.2f}); {self.seconds:.0f} s; {verdict}"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "mean": round(self.mean, 5), "met": self.met}


def run_case(
    pool: WorkerPool,
    strategy: str,
    sync: dict[str, Any],
    computing: Sequence[float],
    seeds: Sequence[int],
    quick: bool,
) -> tuple[list[list[Outcome]], float]:
    """The outcomes by seed and worker, and the seconds that it took."""
    groups, grouping = Groups(), None
    if strategy == GROUPED:
        groups, grouping = Groups(count=GROUPS), GroupingSettings(count=GROUPS)
    run: Any = strategy
    config = Config(run=Run(strategy=run), sync=Sync(timeout="60s", **sync), groups=groups)
    start = time.monotonic()
    runs = [run_once(pool, TASK, config, seed, quick, computing, grouping) for seed in seeds]
    return runs, time.monotonic() - start


def groups_of(run: Sequence[Outcome]) -> list[list[int]]:
    """The workers of each contributor, as they were at the end."""
    members: dict[int, list[int]] = {}
    for rank, outcome in enumerate(run):
        members.setdefault(outcome.contributors[-1], []).append(rank)
    return sorted(members.values())


def part_in_groups(run: Sequence[Outcome]) -> float:
    """The part of all steps that was made in groups. They are numbered from the number of workers on."""
    steps = [contributor >= len(run) for outcome in run for contributor in outcome.contributors]
    return sum(steps) / len(steps)


def stalest_of(run: Sequence[Outcome], groups: Sequence[Sequence[int]]) -> list[float]:
    """The contributions of the group, or the worker, whose are the stalest on average."""
    each = [[stale for rank in group for stale in run[rank].staleness] or [0.0] for group in groups]
    return max(each, key=lambda contributions: float(np.mean(contributions)))


def check_groups(
    name: str, computing: Sequence[float], runs: Sequence[Sequence[Outcome]], quick: bool
) -> None:
    """Raise SystemExit unless the workers trained in groups of like speed."""
    expected = sorted(
        [rank for rank, seconds in enumerate(computing) if seconds == speed] for speed in set(computing)
    )
    for run in runs:
        groups, part = groups_of(run), part_in_groups(run)
        if groups != expected:
            raise SystemExit(f"{name}: the groups are {groups} at the end, in place of {expected}")
        if part < LEAST_GROUPED and not quick:
            raise SystemExit(
                f"{name}: {part:.0%} of the steps were made in groups; {LEAST_GROUPED:.0%} wanted"
            )


def case_of(
    name: str,
    strategy: str,
    sync: dict[str, Any],
    computing: Sequence[float],
    runs: list[list[Outcome]],
    seconds: float,
    reference: list[list[Outcome]],
) -> StaleCase:
    losses, of_bsp = [final(run) for run in runs], [final(run) for run in reference]
    samples = [sum(outcome.samples for outcome in run) for run in runs]
    if samples != [sum(outcome.samples for outcome in run) for run in reference]:
        raise SystemExit(f"{name}: {samples} samples, another number than under bsp")
    outcomes = [outcome for run in runs for outcome in run]
    steps, groups = [outcome.steps for outcome in outcomes], [groups_of(run) for run in runs]
    stale = [each for outcome in outcomes for each in outcome.staleness] or [0.0]
    slowest = [each for run, own in zip(runs, groups, strict=True) for each in stalest_of(run, own)]
    return StaleCase(
        name=name,
        strategy=strategy,
        computing=list(computing),
        sync=sync,
        held_out=losses,
        samples=samples,
        steps=[min(steps), max(steps)],
        groups=groups,
        grouped=sum(part_in_groups(run) for run in runs) / len(runs),
        staleness=float(np.mean(stale)),
        stalest=max(stale),
        slowest=float(np.mean(slowest)),
        slowest_p95=float(np.percentile(slowest, 95)),
        slowest_most=max(slowest),
        seconds=seconds,
        off=sum(losses) / sum(of_bsp) - 1,
        offs=[round(own / other - 1, 4) for own, other in zip(losses, of_bsp, strict=True)],
        target=None if name in WITHOUT_TARGET else WITHIN,
    )


def draw(cases: Sequence[StaleCase], strategy: str, path: Path) -> None:
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
    slow = {SERVER: "the slowest worker's", GROUPED: "the slow group's", PEERS: "the stalest node's"}
    labels = [f"{c.name}\n{slow[c.strategy]} staleness {c.slowest:.1f}" for c in reversed(shown)]
    axes.set_yticks(range(len(shown)), labels)
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel("held-out loss against bsp's, % (dots: seeds, blue: their mean, red: target)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle(f"Stale contributions, strategy {strategy}", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--strategy", choices=list(COMPUTING), default=SERVER)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many, from 0")
    parser.add_argument("--cases", help="some, with commas between (default: all); bsp always runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = cases_of(args.strategy)
    asked = args.cases.split(",") if args.cases else list(known)
    if unknown := [name for name in asked if name not in known]:
        parser.error(f"{', '.join(unknown)}: no case of {args.strategy}; there are {', '.join(known)}")
    synchronous = "ring" if args.strategy == PEERS else SERVER
    seeds = range(1 if args.quick else args.seeds)
    cases: list[StaleCase] = []
    reference: list[list[Outcome]] = []
    with WorkerPool(DEADLINE) as pool:
        for name in [name for name in known if name == BSP or name in asked]:
            strategy = synchronous if name in UNGROUPED else args.strategy
            # Synchronous workers would wait for the slow ones, and learn the same.
            computing = COMPUTING[args.strategy] if name != BSP else ()
            runs, seconds = run_case(pool, strategy, known[name], computing, seeds, args.quick)
            if strategy == GROUPED:
                check_groups(name, computing, runs, args.quick)
            reference = reference or runs
            cases.append(case_of(name, strategy, known[name], computing, runs, seconds, reference))
            print(cases[-1].line(), flush=True)
    folder = output_folder(args)
    results = "staleness" if args.strategy == SERVER else f"staleness-{args.strategy}"
    write_results(results, folder, [case.to_json() for case in cases], quick=args.quick)
    draw(cases, args.strategy, folder / f"{results}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
