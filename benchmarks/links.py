"""(j) Workers at two sites: ps-hra grouped by speed, by site, and by both, in samples/s.

    python benchmarks/links.py [--quick] [--rounds N]

In the lab (examples/lab/two-by-three.toml): two sites of three workers, one fast and one slow in each, and a
link of 100 Mbit/s and 40 ms between them. The model's gradients take 2 MB. Each contestant is a run of its
own, from the probe on; they take turns, in a new random order in each round. Samples/s are of the steady
state: from when all workers are in their groups (and have made a few steps) until the first has no data left.
The joint chooser measures the links itself, and its reason is in the results. What the lab's emulator could
not keep up with is in them too: then links were worse than they shall be.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from atoll.core.events import Regrouped
from atoll.lab.report import RECORD
from atoll.observe.journal import JournalReader
from common import ROOT, options, output_folder, write_results
from links_worker import Plan, Record
from runs import rate_of, read_records, run_in_lab

WORKER = Path(__file__).with_name("links_worker.py")
TOPOLOGY = ROOT / "examples" / "lab" / "two-by-three.toml"
WORKERS = 6
WIDTH, BATCH, PASSES = 700, 8, 1
WARM = 3  # steps of the slowest worker
ROUNDS = 3
PROBING, STEADY = 8.0, 20.0  # seconds, about
DEADLINE = 300.0  # seconds for one run


@dataclass(frozen=True)
class Contestant:
    """How workers are grouped, and about how many samples per second that gives: so a run is long enough."""

    name: str
    groups: str  # as the lab's file has it
    by: str
    rate: float


ALONE = 250.0  # samples per second, about, while speeds are measured
JOINT = Contestant("speed and links (joint)", '"auto"', "joint", 240.0)
RIVALS = (
    Contestant("speed, 3 groups", "3", "speed", 90.0),
    Contestant("speed, as many as compute most", '"auto"', "speed", 100.0),
    Contestant("site", '"auto"', "site", 140.0),
)


@dataclass
class Outcome:
    """One run. Times are in seconds."""

    contestant: str
    samples_per_second: float  # in the steady state
    each: list[float]  # the same, by worker
    steady: float  # how long that was
    groups: list[str]  # what the hub decided on groups, with its reasons, in order
    links: list[str]  # and on links
    behind: int  # seconds in which the lab's emulator could not keep up


def run(contestant: Contestant, seed: int, quick: bool) -> Outcome:
    steady = STEADY / 2 if quick else STEADY
    samples = round(ALONE * PROBING + contestant.rate * steady)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = TOPOLOGY.read_text(encoding="utf-8")
        text = re.sub(r"^groups = .*$", f"groups = {contestant.groups}", text, flags=re.MULTILINE)
        text = re.sub(r"^group_by = .*$", f'group_by = "{contestant.by}"', text, flags=re.MULTILINE)
        (folder / "lab.toml").write_text(text, encoding="utf-8")
        (folder / "atoll.toml").write_text('[run]\nstrategy = "ps-hra"\n', encoding="utf-8")
        plan = Plan(WIDTH, BATCH, samples, PASSES, seed)
        run_in_lab(contestant.name, WORKER, plan, folder, DEADLINE)
        return outcome(contestant, folder)


def outcome(contestant: Contestant, folder: Path) -> Outcome:
    """What a run's records say."""
    records = read_records(folder, Record, WORKERS)
    moved = [
        event.time
        for path in (folder / "lab" / "journals").iterdir()
        for event in JournalReader(path).read()
        if isinstance(event, Regrouped)
    ]
    log = (folder / "lab" / "logs" / "hub.log").read_text(encoding="utf-8")
    groups = re.findall(r"^\S+ groups: (.*)$", log, flags=re.MULTILINE)
    if not groups:
        raise SystemExit(f"{contestant.name}: no groups were made\n{log}")
    end = min(record.steps[-1] for record in records)
    # Who is left when others have no more data may be grouped anew: that is no start.
    begin = max([record.steps[WARM] for record in records] + [when for when in moved if when < end])
    each = [rate_of(record.rank, record.steps, record.batch, begin, end) for record in records]
    lab = json.loads((folder / "lab" / RECORD).read_text(encoding="utf-8"))
    return Outcome(
        contestant=contestant.name,
        samples_per_second=sum(each),
        each=each,
        steady=end - begin,
        groups=groups,
        links=re.findall(r"^\S+ links: (.*)$", log, flags=re.MULTILINE),
        behind=int(lab["emulator"]["behind_seconds"]),
    )


def cases(outcomes: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    """Each way of grouping, with the joint chooser's samples/s as a ratio to its own, round by round."""
    found = []
    for name, own in outcomes.items():
        ratios = [
            joint.samples_per_second / each.samples_per_second
            for joint, each in zip(outcomes[JOINT.name], own, strict=True)
        ]
        found.append(
            {
                "name": name,
                "samples_per_second": median(each.samples_per_second for each in own),
                "joint_ratio": {"median": median(ratios), "least": min(ratios), "most": max(ratios)},
                "target": None if name == JOINT.name else 1.0,
                "met": None if name == JOINT.name else median(ratios) >= 1.0,
                "each": [asdict(each) for each in own],
            }
        )
    return found


def lines(case: dict[str, Any]) -> list[str]:
    ratio, last = case["joint_ratio"], case["each"][-1]
    said = f"{case['name']}: {case['samples_per_second']:.1f} samples/s"
    if case["target"]:
        verdict = "met" if case["met"] else "MISSED"
        said += (
            f"; joint gives {ratio['median']:.2f}x of that ({ratio['least']:.2f} to {ratio['most']:.2f}; "
            f"target {case['target']:g}x: {verdict})"
        )
    behind = f"  the emulator was behind for {last['behind']} s" if last["behind"] else ""
    told = [f"  {each}" for each in [*last["links"], *last["groups"][-3:]]]
    return [said, *told, *([behind] if behind else [])]


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Samples/s of each way of grouping: the median, and each round."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.5 * len(found)), layout="constrained")
    for row, case in enumerate(reversed(found)):
        colour = "#2a9d8f" if case["name"] == JOINT.name else "#2b6ca3"
        axes.barh(row, case["samples_per_second"], color=colour, height=0.5, alpha=0.5)
        rates = [each["samples_per_second"] for each in case["each"]]
        axes.scatter(rates, [row] * len(rates), s=14, color=colour, zorder=3)
    axes.set_yticks(range(len(found)), [case["name"] for case in reversed(found)])
    axes.set_xlabel("samples/s, two sites of three workers, 100 Mbit/s and 40 ms between them")
    axes.set_xlim(left=0)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, help=f"rounds of runs (default: {ROUNDS}; with --quick, 1)")
    args = parser.parse_args()
    order, start = random.Random(1), time.monotonic()
    outcomes: dict[str, list[Outcome]] = {each.name: [] for each in (*RIVALS, JOINT)}
    for seed in range(args.rounds or (1 if args.quick else ROUNDS)):
        for contestant in order.sample((*RIVALS, JOINT), len(RIVALS) + 1):
            outcomes[contestant.name].append(run(contestant, seed, args.quick))
            last = outcomes[contestant.name][-1]
            print(f"round {seed}: {contestant.name}: {last.samples_per_second:.1f} samples/s", flush=True)
    found = cases(outcomes)
    for case in found:
        print("\n".join(lines(case)), flush=True)
    path = write_results("links", output_folder(args), found, args.quick)
    draw(found, path.with_suffix(".png"))
    print(f"in {time.monotonic() - start:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
