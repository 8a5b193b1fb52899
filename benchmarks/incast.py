"""(m) Incast: eight workers answer one shard at once, over one link with a shallow queue.

    python benchmarks/incast.py [--quick] [--rounds N] [--budget SECONDS]

In the lab: a link of 1 Gbit/s with a round trip of 40 ms, whose queue holds a tenth of a bandwidth-delay
product. The shard says a word to eight workers, each over a connection of its own, and each answers with 1, 2
or 4 MB. What the link could do is one round trip and all bytes at its rate; the slowest answer's time is told
as a ratio to that. Ours: eight sessions to one link of the shard's, which shares its rate out by grants; the
same without grants; TCP with Cubic and with BBR. All are warm, and take turns in the same run. The eight
workers are of one process, ours eight sessions of one link there, for eight processes are more than the
machine has cores. Ours are of use when all high blocks (a fifth) and 97 % of the others are there.

Needs root, or a user namespace in which it counts as root.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atoll.wire.datagrams import DATAGRAM_BYTES
from common import options, output_folder, write_results
from labsites import can_begin
from shared import Link, run, verdict

LINK = Link(1e9, 0.02, 0.1)
WORKERS = 8
SIZES = (2_000_000, 4_000_000, 1_000_000)
GRANTED = LINK.rate / 8 * DATAGRAM_BYTES / (DATAGRAM_BYTES + 28)  # IP's and UDP's headers are the link's too
WAYS = {"ltp": "ltp", "ltp, no grants": "ltp", "tcp:cubic": "cubic", "tcp:bbr": "bbr"}
TARGET = 1.2
TURNS, ROUNDS, WARM = 2, 4, 3
QUICK_ROUNDS = 2
COLOURS = {"ltp": "#2a9d8f", "ltp, no grants": "#8ecdc4", "tcp:cubic": "#9db7d1", "tcp:bbr": "#2b6ca3"}


def least(size: int) -> float:
    """Seconds of the bytes' own time: all of them at the link's rate, and one round trip."""
    return 8 * WORKERS * size / LINK.rate + 2 * LINK.delay


def case(way: str, size: int, answers: Sequence[Sequence[float]], emulators: Sequence[Any]) -> dict[str, Any]:
    slowest = [max(each) for each in answers]
    ratios = np.array(slowest) / least(size)
    target = TARGET if way == "ltp" else None
    return {
        "name": f"eight answers of {size / 1e6:g} MB: {way}",
        "way": way,
        "size": size,
        "least": least(size),
        "ratio": float(np.median(ratios)),
        "spread": np.quantile(ratios, [0.1, 0.9]).tolist(),
        "worst_ratio": float(ratios.max()),
        "target": target,
        "met": None if target is None else bool(np.median(ratios) <= target),
        "slowest": slowest,
        "fastest": [min(each) for each in answers],
        "emulator": list(emulators),
    }


def line(found: dict[str, Any]) -> str:
    low, high = found["spread"]
    said = (
        f"{found['name']}: the slowest after {found['ratio']:.2f}x of {found['least']:.3f} s "
        f"({low:.2f} to {high:.2f}, worst {found['worst_ratio']:.2f}; {len(found['slowest'])} rounds)"
    )
    return said + verdict(found, "x")


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.4 * len(cases)), layout="constrained")
    for row, each in enumerate(reversed(cases)):
        colour = COLOURS[each["way"]]
        axes.barh(row, each["ratio"] - 0.9, left=0.9, color=colour, height=0.6, alpha=0.6)
        ratios = [seconds / each["least"] for seconds in each["slowest"]]
        axes.scatter(ratios, [row] * len(ratios), s=10, color=colour, zorder=3)
        axes.annotate(
            f"{each['ratio']:.2f}x", (each["ratio"], row), (4, 6), textcoords="offset points", fontsize=8
        )
    axes.axvline(TARGET, color="#c23b22", linewidth=1.2)
    axes.set_yticks(
        range(len(cases)), [f"{each['size'] / 1e6:g} MB, {each['way']}" for each in reversed(cases)]
    )
    axes.set_xscale("log")
    axes.set_xlim(left=0.9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(
        "slowest of eight / (all bytes at the link's rate + one round trip); bar: median, red: target"
    )
    figure.suptitle("Eight workers answer over 1 Gbit/s, 40 ms, a queue of a tenth", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, help=f"answers in each of {TURNS} turns (default: {ROUNDS})")
    parser.add_argument("--only", default="", help="sizes and ways whose name contains this")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which no turn begins")
    args = parser.parse_args()
    if not can_begin():
        return 0
    begun = time.monotonic()
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    wanted = [(size, way) for size in SIZES for way in WAYS if args.only in f"{size / 1e6:g} MB, {way}"]
    answers: dict[tuple[int, str], list[Any]] = {each: [] for each in wanted}
    emulators: dict[tuple[int, str], list[Any]] = {each: [] for each in wanted}
    for _ in range(1 if args.quick else TURNS):
        for size, way in wanted:
            if time.monotonic() > begun + args.budget:
                break
            plan = {
                "flows": (WAYS[way],) * WORKERS,
                "size": size,
                "rounds": rounds,
                "warm": WARM,
                "link_rate": GRANTED if way == "ltp" else None,
            }
            _, found, emulator = run(LINK, plan, 300.0)
            answers[size, way] += found
            emulators[size, way].append(emulator)
            print(
                f"{size / 1e6:g} MB, {way}: {[round(max(each) / least(size), 2) for each in found]}",
                flush=True,
            )
    measured = [each for each in wanted if answers[each]]
    cases = [case(way, size, answers[size, way], emulators[size, way]) for size, way in measured]
    for each in cases:
        print(line(each), flush=True)
    path = write_results("incast", output_folder(args), cases, args.quick)
    draw(cases, path.with_suffix(".png"))
    print(f"in {time.monotonic() - begun:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
