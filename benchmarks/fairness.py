"""(n) Two of our flows and one of TCP share a link: how equal their rates are, and whose queue stands.

    python benchmarks/fairness.py [--quick] [--rounds N] [--only WORDS] [--budget SECONDS]

In the lab: a link of 200 Mbit/s with a round trip of 40 ms, whose queue holds a tenth, one or two bandwidth-
delay products. Two of our flows send transfers back to back, and one of TCP (Cubic, BBR) without end; they
start within a second, in an order that changes from round to round, and are counted for 30 s from the fifth
second on: bytes that came, told by each sender (ours of datagrams, TCP's of payload; headers below are nearly
alike). Jain's index says how equal the three rates are: 1 all the same, 1/3 one alone. Three of TCP's and
three of ours take turns with them, with a queue of one product, for comparison. A flow's queueing delay is
its own smoothed round trip above its own least one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common import options, output_folder, write_results
from labsites import can_begin
from shared import Link, run, verdict

RATE, DELAY = 2e8, 0.02
QUEUES = (1.0, 0.1, 2.0)  # bandwidth-delay products
SIZE = 20_000_000
MIXES = {
    "two of ours and Cubic": ("ltp", "ltp", "cubic"),
    "two of ours and BBR": ("ltp", "ltp", "bbr"),
    "three of ours": ("ltp", "ltp", "ltp"),
    "three of Cubic": ("cubic", "cubic", "cubic"),
    "three of BBR": ("bbr", "bbr", "bbr"),
}
ALONE = ("three of ours", "three of Cubic", "three of BBR")
TARGET = 0.9
WARM, SECONDS, QUICK_SECONDS = 5.0, 30.0, 3.0
# What is measured, round after round: what a budget of time cuts off is the last of it.
SCHEDULE = (
    *((mix, 1.0) for mix in MIXES if mix not in ALONE),
    *((mix, 1.0) for mix in reversed(ALONE)),
    *((mix, queue) for queue in QUEUES[1:] for mix in MIXES if mix not in ALONE),
)
ROUNDS = 3
STARTS = ((0.0, 0.5, 1.0), (0.5, 1.0, 0.0), (1.0, 0.0, 0.5), (0.0, 1.0, 0.5))
COLOURS = {"ltp": "#2a9d8f", "cubic": "#9db7d1", "bbr": "#2b6ca3"}


def jain(rates: Sequence[float]) -> float:
    total = sum(rates)
    return total * total / (len(rates) * sum(rate * rate for rate in rates)) if total else 0.0


def measured(seen: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """One turn's rates (bits per second), index, and delays (seconds)."""
    rates: list[float] = []
    delays: list[float] = []
    for each in seen:
        at = np.array(each["at"])
        inside = (at >= WARM) & (at <= WARM + seconds)
        came, when = np.array(each["came"])[inside], at[inside]
        rates.append(8 * float(came[-1] - came[0]) / float(when[-1] - when[0]))
        least = min(value for value in each["least"] if value > 0)
        delays.append(float(np.median(np.array(each["rtt"])[inside] - least)))
    # What each had in each second, for the picture and for who looks into it.
    ends = np.arange(0.0, WARM + seconds)
    course = [
        np.round(8e-6 * np.diff(np.interp(ends, each["at"], each["came"])), 1).tolist() for each in seen
    ]
    return {"jain": jain(rates), "rates": rates, "delays": delays, "megabits_each_second": course}


def case(mix: str, queue: float, turns: Sequence[dict[str, Any]], emulators: Sequence[Any]) -> dict[str, Any]:
    flows = MIXES[mix]
    indices = [turn["jain"] for turn in turns]
    target = None if mix in ALONE else TARGET
    by_flow = {
        flow: float(np.median([turn["delays"][i] for turn in turns for i in range(3) if flows[i] == flow]))
        for flow in dict.fromkeys(flows)
    }
    rates = np.array([turn["rates"] for turn in turns])
    return {
        "name": f"{mix}, a queue of {queue:g} bandwidth-delay products",
        "mix": mix,
        "flows": flows,
        "queue": queue,
        "jain": float(np.median(indices)),
        "spread": [min(indices), max(indices)],
        "target": target,
        "met": None if target is None else float(np.median(indices)) >= target,
        "queueing_delay": by_flow,
        "share_of_link": (np.median(rates, axis=0) / RATE).tolist(),
        "used": float(np.median(rates.sum(axis=1)) / RATE),
        "turns": list(turns),
        "emulator": list(emulators),
    }


def line(found: dict[str, Any]) -> str:
    low, high = found["spread"]
    each = "; ".join(
        " ".join(f"{flow} {rate / 1e6:.0f}" for flow, rate in zip(found["flows"], turn["rates"], strict=True))
        for turn in found["turns"]
    )
    delays = ", ".join(f"{flow} {1e3 * delay:.1f} ms" for flow, delay in found["queueing_delay"].items())
    said = f"{found['name']}: Jain {found['jain']:.3f} ({low:.3f} to {high:.3f})"
    said += f"; {each} Mbit/s; queued: {delays}"
    return said + verdict(found)


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Left: Jain's index of each mix and queue; right: the queueing delay that each flow saw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 0.8 + 0.42 * len(cases)), sharey=True, layout="constrained"
    )
    for row, each in enumerate(reversed(cases)):
        colour = "#777777" if each["target"] is None else COLOURS["ltp"]
        left.barh(row, each["jain"], color=colour, height=0.6, alpha=0.6)
        left.scatter(
            [turn["jain"] for turn in each["turns"]], [row] * len(each["turns"]), s=10, color="black"
        )
        for flow, delay in each["queueing_delay"].items():
            right.scatter(1e3 * delay, row, color=COLOURS[flow], s=36)
    left.axvline(TARGET, color="#c23b22", linewidth=1.2)
    left.set_yticks(range(len(cases)), [f"{each['mix']}, {each['queue']:g} BDP" for each in reversed(cases)])
    left.set_xlim(1 / 3, 1.0)
    left.set_xlabel("Jain's index over 30 s; bar: median, dots: turns, red: target")
    right.set_xlabel("queueing delay that a flow saw, median (ms)")
    for flow, colour in COLOURS.items():
        right.scatter([], [], color=colour, label={"ltp": "ours"}.get(flow, flow))
    right.legend(loc="lower right", fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Three flows over 200 Mbit/s, 40 ms; BDP: bandwidth-delay product", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def measure(wanted: Sequence[tuple[str, float]], rounds: int, seconds: float, until: float) -> list[Any]:
    """The cases, whose turns are taken round by round, until that time."""
    turns: dict[tuple[str, float], list[Any]] = {each: [] for each in wanted}
    emulators: dict[tuple[str, float], list[Any]] = {each: [] for each in wanted}
    for number in range(rounds):
        for mix, queue in wanted:
            if time.monotonic() > until:
                break
            starts = STARTS[number % len(STARTS)]
            plan = {"flows": MIXES[mix], "size": SIZE, "seconds": WARM + seconds, "starts": starts}
            seen, _, emulator = run(Link(RATE, DELAY, queue), plan, 120.0 + seconds)
            turns[mix, queue].append(measured(seen, seconds))
            emulators[mix, queue].append(emulator)
            print(f"round {number + 1}: {mix}, {queue:g}: {turns[mix, queue][-1]['jain']:.3f}", flush=True)
    return [case(*each, turns[each], emulators[each]) for each in wanted if turns[each]]


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, help=f"turns of each mix (default: {ROUNDS})")
    parser.add_argument(
        "--only", default="", help="mixes and queues whose name contains this, beside the others"
    )
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which no turn begins")
    args = parser.parse_args()
    if not can_begin():
        return 0
    begun = time.monotonic()
    wanted = [each for each in SCHEDULE if args.only in f"{each[0]}, {each[1]:g} BDP"]
    if not wanted:
        parser.error(
            f"--only {args.only!r}: no case has that in its name, such as 'two of ours and BBR, 1 BDP'"
        )
    cases = measure(
        wanted,
        1 if args.quick else args.rounds or ROUNDS,
        QUICK_SECONDS if args.quick else SECONDS,
        begun + args.budget,
    )
    for each in cases:
        print(line(each), flush=True)
    folder = output_folder(args)
    path = folder / "fairness.json"
    if args.only and path.exists():
        names = {each["name"] for each in cases}
        before = json.loads(path.read_text(encoding="utf-8"))["cases"]
        cases = [*(each for each in before if each["name"] not in names), *cases]
    path = write_results("fairness", folder, cases, args.quick)
    draw(cases, path.with_suffix(".png"))
    print(f"in {time.monotonic() - begun:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
