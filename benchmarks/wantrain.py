"""(n) A small GPT trained over two sites with a bad link between them: what it learns, and how fast.

    python benchmarks/wantrain.py [--quick] [--seeds 3] [--cases CASE,...]

In the lab: two sites with a worker each, hub and shard in the first, and a link of 200 Mbit/s with a round
trip of 40 ms. Its loss comes in bursts of 8 packets: none, 3 %, or 10 %. Strategy server, bsp: all see the
same samples in the same order, so what differs is what the link did to the gradients. Over TCP that is
nothing, at any loss: its held-out loss is the lossless run's, and its time is its own.

Contestants: the transport with error feedback (the default), in full-reliability mode, with each way to
fill without feedback; TCP with BBR, and with Cubic, which stops after some steps, and whose time to the loss
is its time for a step times the steps. Each round is a seed, in a new random order.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from atoll.lab.report import RECORD
from common import options, output_folder, write_results
from runs import read_records, run_in_lab
from wantrain_worker import Plan, Record

WORKER = Path(__file__).with_name("wantrain_worker.py")
WORKERS, BATCH, STEPS, QUICK_STEPS = 2, 8, 200, 40
LOOK = 25  # steps
RATE, DELAY, BURST = "200Mbit/s", "20ms", 8
WITHIN = 0.01  # of the lossless held-out loss, the mean over the seeds
SHORT = 30  # steps of a contestant that is only timed
DEADLINE = 900.0  # seconds for one run
LTP = {"transport": "ltp"}


@dataclass(frozen=True)
class Contestant:
    """How gradients cross the link, and how many packets that loses. `timed`: it makes a few steps only, to
    know how long one takes."""

    name: str
    loss: float
    link: dict[str, Any] = field(default_factory=dict)  # the [link] table
    tcp: str = "bbr"
    target: float | None = None
    timed: bool = False


LOSSLESS = Contestant("no loss, TCP (BBR)", 0.0)
CONTESTANTS = (
    LOSSLESS,
    Contestant("3 %, ltp", 0.03, LTP, target=WITHIN),
    Contestant("10 %, ltp", 0.1, LTP),
    Contestant("3 %, ltp, fully reliable", 0.03, {**LTP, "reliable": True}),
    Contestant("3 %, ltp, zero, no feedback", 0.03, {**LTP, "feedback": False, "fill": "zero"}),
    Contestant("3 %, ltp, last, no feedback", 0.03, {**LTP, "feedback": False, "fill": "last"}),
    Contestant("3 %, ltp, rescale, no feedback", 0.03, {**LTP, "feedback": False, "fill": "rescale"}),
    Contestant("3 %, TCP (BBR)", 0.03),
    Contestant("3 %, TCP (Cubic)", 0.03, tcp="cubic", timed=True),
    Contestant("10 %, TCP (BBR)", 0.1, timed=True),
)


@dataclass
class Outcome:
    """One run. Times are in seconds."""

    seed: int
    held_out: list[tuple[int, float]]  # (steps made, nats)
    seconds_step: float  # the median
    seconds: float  # of all steps but the first
    steps: int
    lost: float  # of the packets that the link was offered, both ways
    behind: int  # seconds in which the lab's emulator could not keep up


def topology(contestant: Contestant, seed: int) -> str:
    loss = f"loss = {contestant.loss}\nburst = {BURST}\n" if contestant.loss else ""
    return (
        f'seed = {seed + 1}\ncongestion_control = "{contestant.tcp}"\n'
        '[[site]]\nname = "here"\n[[site]]\nname = "there"\n'
        f'[[link]]\nbetween = ["here", "there"]\nrate = "{RATE}"\ndelay = "{DELAY}"\nqueue = "40ms"\n{loss}'
        '[hub]\nsite = "here"\nshards = 1\n'
    )


def configuration(contestant: Contestant) -> str:
    lines = ["[run]", 'strategy = "server"', "[link]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in contestant.link.items()]
    return "\n".join(lines if contestant.link else lines[:-1]) + "\n"


def run(contestant: Contestant, seed: int, steps: int) -> Outcome:
    stop = min(steps, SHORT) if contestant.timed else steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lab.toml").write_text(topology(contestant, seed), encoding="utf-8")
        (folder / "atoll.toml").write_text(configuration(contestant), encoding="utf-8")
        plan = Plan(seed, WORKERS, BATCH, steps, stop, min(LOOK, steps))
        run_in_lab(contestant.name, WORKER, plan, folder, DEADLINE)
        records = read_records(folder, Record, WORKERS)
        lab_record = json.loads((folder / "lab" / RECORD).read_text(encoding="utf-8"))
    return outcome(seed, records, lab_record)


def outcome(seed: int, records: Sequence[Record], lab: dict[str, Any]) -> Outcome:
    first = records[0]
    offered = sum(link["offered"]["packets"] for link in lab["links"])
    delivered = sum(link["delivered"]["packets"] for link in lab["links"])
    spans = [later - sooner for sooner, later in zip(first.steps, first.steps[1:], strict=False)]
    return Outcome(
        seed=seed,
        held_out=[(made, loss) for made, loss in first.held_out],
        seconds_step=median(spans),
        seconds=first.steps[-1],
        steps=len(first.steps),
        lost=1 - delivered / offered,
        behind=int(lab["emulator"]["behind_seconds"]),
    )


def seconds_to(outcome: Outcome, loss: float) -> float | None:
    """When the held-out loss was at most this, between two looks by a straight line; None: never."""
    each = outcome.seconds / max(1, outcome.steps - 1)
    before = outcome.held_out[0]
    for made, found in outcome.held_out:
        if found <= loss:
            if made == before[0]:
                return made * each
            share = (before[1] - loss) / (before[1] - found)
            return (before[0] + share * (made - before[0])) * each
        before = made, found
    return None


def case_of(contestant: Contestant, own: Sequence[Outcome], lossless: Sequence[Outcome]) -> dict[str, Any]:
    """One contestant beside the lossless run of the same seeds, to whose last loss and 1 % it is to come."""
    pairs = [(each, next(other for other in lossless if other.seed == each.seed)) for each in own]
    final = [each.held_out[-1][1] for each in own] if not contestant.timed else []
    offs = [each.held_out[-1][1] / other.held_out[-1][1] - 1 for each, other in pairs if final]
    times = []
    for each, other in pairs:
        wanted = other.held_out[-1][1] * (1 + WITHIN)
        if contestant.link:
            times.append(seconds_to(each, wanted))
        else:  # step by step it learns what the lossless run does
            span = each.seconds / max(1, each.steps - 1)
            there = seconds_to(other, wanted)
            times.append(None if there is None else there / (other.seconds / (other.steps - 1)) * span)
    off = mean(offs) if offs else None
    return {
        "name": contestant.name,
        "link": {
            "rate": RATE,
            "delay": DELAY,
            "loss": contestant.loss,
            "burst": BURST,
            "tcp": contestant.tcp,
        },
        "settings": contestant.link,
        "timed": contestant.timed,
        "held_out": final,
        "offs": offs,
        "off": off,
        "target": contestant.target,
        "met": None if contestant.target is None or off is None else off <= contestant.target,
        "seconds_step": median(each.seconds_step for each in own),
        "seconds_to_loss": times,
        "each": [asdict(each) for each in own],
    }


def line(case: dict[str, Any], ours: Sequence[float | None]) -> str:
    said = f"{case['name']}: {1e3 * case['seconds_step']:.0f} ms a step"
    if case["held_out"]:
        losses = ", ".join(f"{loss:.4f}" for loss in case["held_out"])
        said += f"; held-out loss {losses}: {case['off']:+.2%} of the lossless run's"
    ratios = [t / o for t, o in zip(case["seconds_to_loss"], ours, strict=False) if t and o]
    if ratios:
        said += f"; to within 1 % of its loss in {median(ratios):.2f}x of ltp's time at 3 %"
    elif None in case["seconds_to_loss"]:
        said += "; it does not come within 1 % of its loss"
    if case["target"] is not None:
        said += f" (target {case['target']:.0%}: {'met' if case['met'] else 'MISSED'})"
    return said


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Held-out loss over seconds, of each contestant that trained to the end: one line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, bars) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    whole = [case for case in cases if not case["timed"]]
    for number, case in enumerate(whole):
        for each in case["each"]:
            span = each["seconds"] / max(1, each["steps"] - 1)
            steps, losses = zip(*each["held_out"], strict=True)
            label = case["name"] if each is case["each"][0] else None
            curves.plot([made * span for made in steps], losses, color=f"C{number}", linewidth=1, label=label)
    curves.set_xlabel("seconds")
    curves.set_ylabel("held-out loss, nats")
    curves.legend(fontsize=7)
    for row, case in enumerate(reversed(cases)):
        bars.barh(row, 1e3 * case["seconds_step"], color="#2a9d8f" if case["settings"] else "#2b6ca3")
    bars.set_yticks(range(len(cases)), [case["name"] for case in reversed(cases)], fontsize=7)
    bars.set_xscale("log")
    bars.set_xlabel("ms a step")
    figure.suptitle(f"GPT, 0.1M parameters, two sites, {RATE}, round trip 40 ms, loss in bursts of {BURST}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0")
    parser.add_argument(
        "--cases", default="", help="parts of names, with commas between; the lossless one always runs"
    )
    args = parser.parse_args()
    asked = [part for part in args.cases.split(",") if part]
    wanted = [
        each for each in CONTESTANTS if each is LOSSLESS or not asked or any(p in each.name for p in asked)
    ]
    order, start = random.Random(1), time.monotonic()
    steps = QUICK_STEPS if args.quick else STEPS
    outcomes: dict[str, list[Outcome]] = {each.name: [] for each in wanted}
    for seed in range(1 if args.quick else args.seeds):
        for contestant in order.sample(wanted, len(wanted)):
            if contestant.timed and seed:
                continue
            own = run(contestant, seed, steps)
            outcomes[contestant.name].append(own)
            print(
                f"seed {seed}: {contestant.name}: {1e3 * own.seconds_step:.0f} ms a step, "
                f"{own.held_out[-1][1]:.4f}",
                flush=True,
            )
    lossless = outcomes[LOSSLESS.name]
    cases = [case_of(each, outcomes[each.name], lossless) for each in wanted]
    ours = next((case["seconds_to_loss"] for case in cases if case["name"] == "3 %, ltp"), [])
    for case in cases:
        print(line(case, ours), flush=True)
    path = write_results("wantrain", output_folder(args), cases, args.quick)
    draw(cases, path.with_suffix(".png"))
    print(f"in {time.monotonic() - start:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
