"""(i) Workers of uneven speed: ps-hra against DistributedDataParallel, in samples/s and in what is learnt.

    python benchmarks/stragglers.py [--quick]

Each worker trains a small byte-level GPT on the standard library's source; its computing is emulated, by
sleeping in forward until forward and backward take as long as they shall (benchmarks/stragglers_worker.py):
100 ms on three workers and 400 ms on one; then eight workers with speeds of 0.1 to 0.9. The contestants are
runs of their own, by torchrun and by `atoll run`, which take turns, in a new random order in each round:
DistributedDataParallel on Gloo, ps-hra with two groups by the queue, and ps-hra with the joint chooser.

Samples/s are of the steady state: from when all workers are in their group (and have made a few steps) until
the first has no data left. What comes before, from the command on, is the start, shown beside. With four
workers, both also learn: DDP for a number of steps, and ps-hra for a time that is half of what DDP's steps
take. How long ps-hra takes to the held-out loss that DDP ends with, from the first step on, probing and
grouping included, is a part of DDP's time.

`--strategy server` takes the asynchronous parameter server without groups in place of ps-hra.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from atoll.core.events import Regrouped
from atoll.observe.journal import JournalReader
from atoll.observe.rundir import RunDirectory
from common import options, output_folder, write_results
from runs import rate_of, read_records, run_to_end, spread, time_to
from stragglers_worker import BATCH, Plan, Record

WORKER = Path(__file__).with_name("stragglers_worker.py")
DDP, QUEUE, JOINT = "DistributedDataParallel", "ps-hra, two groups", "ps-hra, joint"
SETTINGS = {
    QUEUE: ["groups.count=2", "groups.by=speed"],
    JOINT: ["groups.by=joint"],
}
FOUR = "four workers, one at a quarter"
# The least ratios of samples/s to DDP's, and the most of DDP's time to its loss.
TARGETS = {(FOUR, QUEUE): 2.3, (FOUR, JOINT): 3.0}
TIME_TARGET = 0.5
WARM = 5  # steps of the slowest worker
ROUNDS = 3
SHOWN = 0.1  # of all time: groups that had less, as while speeds are measured, are in the JSON alone
DEADLINE = 600.0  # seconds for one run


@dataclass(frozen=True)
class Setting:
    """Workers, and how long they train: DDP for `steps`, Atoll for a `part` of the time that these take."""

    name: str
    computing: list[float]  # seconds for a worker's batch
    steps: int
    part: float
    held_out: bool  # whether the loss is of interest

    @property
    def seconds(self) -> float:
        """Of DDP's training, as planned."""
        return self.steps * max(self.computing)

    def ideal(self, contestant: str) -> float:
        """Samples per second without any cost but computing."""
        batches = sorted(1 / seconds for seconds in self.computing)
        if contestant == DDP:
            return BATCH * len(batches) * batches[0]
        if contestant == QUEUE:
            half = len(batches) // 2
            return BATCH * (half * batches[0] + half * batches[half])
        return BATCH * sum(batches)

    def plan(self, contestant: str, seed: int) -> Plan:
        seconds = self.seconds if contestant == DDP else self.part * self.seconds
        windows = round(self.ideal(contestant) * seconds)
        return Plan(self.computing, windows, seconds, seed, self.held_out)


def settings(quick: bool) -> list[Setting]:
    speeds = [0.1 + 0.8 * number / 7 for number in range(8)]
    # Not by rank: who is slow must be found.
    eight = [round(0.1 / speeds[number * 3 % 8], 4) for number in range(8)]
    four = [0.1, 0.4, 0.1, 0.1]
    if quick:
        return [Setting(FOUR, four, steps=25, part=1.0, held_out=True)]
    return [
        Setting(FOUR, four, steps=240, part=TIME_TARGET, held_out=True),
        Setting("eight workers, speeds 0.1 to 0.9", eight, steps=40, part=1.0, held_out=False),
    ]


# -- a run -------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """One run of one contestant. Times are in seconds, from the first step of all workers on unless said."""

    contestant: str
    samples_per_second: float  # in the steady state
    each: list[float]  # the same, by worker
    steady: float  # how long that was
    start: float  # from the command to the steady state
    start_samples: float  # what was trained on meanwhile
    seconds: float  # of the training
    held_out: list[tuple[float, float]]  # (when, nats), in order
    groups: list[dict[str, Any]]  # of the run's summary: each group, with its staleness and its times
    groupings: list[dict[str, Any]]  # of the run's summary: who was in which, from when, and why


def command(contestant: str, setting: Setting, folder: Path, seed: int, strategy: str) -> list[str]:
    workers = str(len(setting.computing))
    plan = json.dumps(asdict(setting.plan(contestant, seed)))
    if contestant == DDP:
        launcher = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        script = ["--nproc-per-node", workers, str(WORKER), "ddp"]
    else:
        launcher = ["atoll.cli.app", "run", "--workers", workers, "--strategy", strategy]
        given = ["sync.consistency=asp", f"run.directory={folder / 'run'}", *SETTINGS[contestant]]
        script = [part for one in given for part in ("--set", one)] + [str(WORKER), "atoll"]
    return [sys.executable, "-m", *launcher, *script, str(folder), plan]


def run(contestant: str, setting: Setting, seed: int, strategy: str) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.time()
        said = run_to_end(contestant, command(contestant, setting, folder, seed, strategy), DEADLINE)
        records = read_records(folder, Record, len(setting.computing))
        groups, groupings, grouped = (
            _groups(RunDirectory(folder / "run")) if contestant != DDP else ([], [], 0.0)
        )
        if contestant != DDP and strategy == "ps-hra" and not groupings:
            raise SystemExit(f"{contestant}: no groups were made\n{said}")
    return outcome(contestant, records, began, grouped, groups, groupings)


def _groups(run: RunDirectory) -> tuple[list[dict[str, Any]], list[dict[str, Any]], float]:
    """The groups of a run's summary, who was in which when, and when the last worker was in its first one."""
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    first: dict[int, float] = {}
    for path in run.journals().values():
        for event in JournalReader(path).read():
            if isinstance(event, Regrouped):
                first.setdefault(event.worker, event.time)
    return summary.get("each_group", []), summary.get("groupings", []), max(first.values(), default=0.0)


def outcome(
    contestant: str,
    records: Sequence[Record],
    began: float,
    grouped: float,
    groups: list[dict[str, Any]],
    groupings: list[dict[str, Any]],
) -> Outcome:
    """What the records of a run say. `grouped`: when all were in their group."""
    first = max(record.steps[0] for record in records)
    begin = max(grouped, *(record.steps[min(WARM, len(record.steps) // 4)] for record in records))
    end = min(record.steps[-1] for record in records)
    each = [rate_of(record.rank, record.steps, record.samples, begin, end) for record in records]
    curve = sorted((when - first, loss) for record in records for when, loss in record.held_out)
    return Outcome(
        contestant=contestant,
        samples_per_second=sum(each),
        each=each,
        steady=end - begin,
        start=begin - began,
        start_samples=float(sum(r.samples * sum(when <= begin for when in r.steps) for r in records)),
        seconds=max(record.steps[-1] for record in records) - first,
        held_out=curve,
        groups=groups,
        groupings=groupings,
    )


# -- the cases ---------------------------------------------------------------------------------------------


def case(setting: Setting, name: str, own: list[Outcome], rival: list[Outcome]) -> dict[str, Any]:
    """A contestant against DDP, round by round. Ratios are Atoll's over DDP's: more is better for samples/s,
    less for the time to DDP's loss."""
    target = TARGETS.get((setting.name, name))
    speeds = [a.samples_per_second / b.samples_per_second for a, b in zip(own, rival, strict=True)]
    found: dict[str, Any] = {
        "name": setting.name,
        "contestant": name,
        "workers": len(setting.computing),
        "computing": setting.computing,
        "samples_per_second": median(each.samples_per_second for each in own),
        "rival_samples_per_second": median(each.samples_per_second for each in rival),
        "ratio": spread(speeds),
        "most": setting.ideal(name) / setting.ideal(DDP),
        "target": target,
        "met": None if target is None else median(speeds) >= target,
        "start": median(each.start for each in own),
        "rival_start": median(each.start for each in rival),
        "start_samples": median(each.start_samples for each in own),
        "each": [{**asdict(each), "held_out": _rounded(each.held_out)} for each in own],
        "rival_each": [{**asdict(each), "held_out": _rounded(each.held_out)} for each in rival],
    }
    if setting.held_out:
        found["to_loss"] = _to_loss(own, rival)
    return found


def _to_loss(own: list[Outcome], rival: list[Outcome]) -> dict[str, Any]:
    """How long it took to the loss that DDP ended with, as a part of DDP's time."""
    parts = []
    for mine, other in zip(own, rival, strict=True):
        reached = time_to(mine.held_out, other.held_out[-1][1])
        parts.append(None if reached is None else reached / other.seconds)
    there = [part for part in parts if part is not None]
    whole = len(there) == len(parts)
    return {
        "rival_held_out": [other.held_out[-1][1] for other in rival],
        "held_out": [mine.held_out[-1][1] for mine in own],
        "rival_seconds": median(other.seconds for other in rival),
        "parts": parts,
        "part": spread(there) if there else None,
        "not_reached": len(parts) - len(there),
        "target": TIME_TARGET,
        "met": whole and median(there) <= TIME_TARGET,
    }


def _rounded(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(round(when, 2), round(loss, 5)) for when, loss in curve]


def lines(case: dict[str, Any]) -> list[str]:
    ratio = case["ratio"]
    verdict = (
        f"target {case['target']:g}x: {'met' if case['met'] else 'MISSED'}" if case["target"] else "no target"
    )
    said = [
        f"{case['name']}, {case['contestant']}: {case['samples_per_second']:.1f} samples/s, "
        f"{ratio['median']:.2f}x of DDP's {case['rival_samples_per_second']:.1f} ({ratio['least']:.2f} to "
        f"{ratio['most']:.2f}; {case['most']:.2f}x at most); {verdict}; start {case['start']:.1f} s "
        f"({case['start_samples']:.0f} samples), DDP's {case['rival_start']:.1f} s"
    ]
    if it := case.get("to_loss"):
        part = f"{it['part']['median']:.2f} of DDP's {it['rival_seconds']:.0f} s" if it["part"] else "never"
        said.append(
            f"  to DDP's held-out loss ({median(it['rival_held_out']):.4f}): {part}, {it['not_reached']} of "
            f"{len(it['parts'])} not; target {it['target']}: {'met' if it['met'] else 'MISSED'}"
        )
    last = case["each"][-1]
    for grouping in last["groupings"][-1:]:
        shown = " | ".join(" ".join(str(worker) for worker in group) for group in grouping["groups"])
        said.append(f"  groups of the last round: {shown}: {grouping['reason']}")
    whole = sum(group["seconds"] for group in last["groups"])
    for group in last["groups"]:
        if (stale := group.get("staleness")) and group["seconds"] > SHOWN * whole:
            said.append(
                f"  staleness of {' '.join(map(str, group['workers']))}: median {stale['median']:.2f}, "
                f"95 % at most {stale['p95']:.2f}, most {stale['most']:.2f}"
            )
    return said


# -- the picture -------------------------------------------------------------------------------------------

COLOURS = {DDP: "#8a8a8a", QUEUE: "#2b6ca3", JOINT: "#2a9d8f"}


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Left, samples/s as ratios to DDP's; right, the held-out loss over time in the first round."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    learnt = [case for case in cases if "to_loss" in case]
    figure, (speeds, losses) = plt.subplots(
        1, 2, figsize=(12, 1.6 + 0.75 * len(cases)), layout="constrained", width_ratios=(3, 2)
    )
    for row, case in enumerate(reversed(cases)):
        colour = COLOURS[case["contestant"]]
        ratios = [
            own["samples_per_second"] / other["samples_per_second"]
            for own, other in zip(case["each"], case["rival_each"], strict=True)
        ]
        speeds.barh(row, case["ratio"]["median"], color=colour, height=0.5, alpha=0.5)
        speeds.scatter(ratios, [row] * len(ratios), s=14, color=colour, zorder=3)
        speeds.vlines(case["most"], row - 0.35, row + 0.35, color="black", linewidth=1)
        if case["target"] is not None:
            speeds.vlines(case["target"], row - 0.35, row + 0.35, color="#c23b22", linewidth=1.5)
    speeds.axvline(1.0, color=COLOURS[DDP], linewidth=1)
    speeds.set_yticks(range(len(cases)), [f"{c['name']}\n{c['contestant']}" for c in reversed(cases)])
    speeds.set_xlabel("samples/s over DDP's (dots: rounds, black: what the groups allow, red: target)")
    if learnt:
        first = learnt[0]["rival_each"][0]["held_out"]
        losses.plot(*zip(*first, strict=True), color=COLOURS[DDP], label=DDP)
        losses.axhline(first[-1][1], color=COLOURS[DDP], linewidth=0.8, linestyle=":")
        losses.axvline(TIME_TARGET * first[-1][0], color="#c23b22", linewidth=1)
    for case in learnt:
        curve = case["each"][0]["held_out"]
        losses.plot(*zip(*curve, strict=True), color=COLOURS[case["contestant"]], label=case["contestant"])
    losses.set_xlabel("seconds since the first step (red: half of DDP's time)")
    losses.set_ylabel("held-out loss, nats a byte")
    losses.legend(frameon=False)
    for axes in (speeds, losses):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Workers of uneven speed")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--strategy", default="ps-hra", choices=("ps-hra", "server"), help="of Atoll's runs")
    parser.add_argument("--rounds", type=int, help=f"rounds of runs (default: {ROUNDS}; with --quick, 1)")
    args = parser.parse_args()
    rounds, cases = args.rounds or (1 if args.quick else ROUNDS), []
    order, start = random.Random(1), time.monotonic()
    for setting in settings(args.quick):
        outcomes: dict[str, list[Outcome]] = {name: [] for name in (DDP, *SETTINGS)}
        for seed in range(rounds):
            for name in order.sample(list(outcomes), len(outcomes)):
                outcomes[name].append(run(name, setting, seed, args.strategy))
        new = [case(setting, name, outcomes[name], outcomes[DDP]) for name in SETTINGS]
        cases += new
        print("\n".join(line for each in new for line in lines(each)), flush=True)
    folder = output_folder(args)
    path = write_results("stragglers", folder, cases, args.quick)
    draw(cases, path.with_suffix(".png"))
    print(f"in {time.monotonic() - start:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
