"""(k) One flow over a long link: when a transfer is usable, by TCP with Cubic, with BBR, and by ours.

    python benchmarks/transport.py [--quick] [--rounds N]

In the lab: `atoll link serve` in one site and `atoll link test` in another, with a link of 200 Mbit/s or
1 Gbit/s and a round trip of 40 ms between them, without loss and with 1 % each way; its queue holds one
bandwidth-delay product. 20 MB at a time, on connections that are warm; the transports take turns in the same
run. What a link could do is its bytes at the link's rate and one round trip: times are told as a ratio to
that. TCP gets buffers of 64 MiB and keeps its window while it is idle. Cubic at 1 % takes so long that it
makes most of its transfers after the others, and stops after a few (--budget).

Needs root, or a user namespace in which it counts as root.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.net.keys import make_keys, write_keys
from common import options, output_folder, write_results
from labsites import can_begin, emulator_record, prepare
from support.sites import Sites, pair, phase

DELAY = 0.02  # seconds each way
SIZE = 20_000_000  # bytes of a transfer
ROUNDS, QUICK_ROUNDS = 20, 3
BUDGET, QUICK_BUDGET = 250.0, 5.0  # seconds that one transport may take of a link's run
TARGET = 1.15
OURS = "ltp"
TRANSPORTS = ("tcp:cubic", "tcp:bbr", OURS)
PORT = 47710
COLOURS = {"tcp:cubic": "#9db7d1", "tcp:bbr": "#2b6ca3", OURS: "#2a9d8f"}


@dataclass(frozen=True)
class Way:
    """A link: bits per second, and the share of packets lost, each way."""

    rate: float
    loss: float

    @property
    def name(self) -> str:
        return f"{self.rate / 1e6:g} Mbit/s, {self.loss:.0%} lost"

    @property
    def least(self) -> float:
        """Seconds that the bytes take at the link's rate, and one round trip."""
        return 8 * SIZE / self.rate + 2 * DELAY


WAYS = (Way(2e8, 0.0), Way(2e8, 0.01), Way(1e9, 0.0), Way(1e9, 0.01))


def run(way: Way, transports: Sequence[str], rounds: int, budget: float, folder: Path) -> dict[str, Any]:
    """A link's report, as `atoll link test --json` gives it, and how the emulator kept up."""
    queue = round(way.rate / 8 * 2 * DELAY)
    command = [sys.executable, "-m", "atoll.cli.app", "link"]
    keys = ["--key-file", str(folder / "keys")]
    with Sites(pair([phase(way.rate, delay=DELAY, queue=queue, loss=way.loss)])) as sites:
        prepare(sites)
        address = f"{sites.address(1)}:{PORT}"
        server = sites.start(1, [*command, "serve", "--listen", address, *keys])
        try:
            assert server.stdout is not None
            server.stdout.readline()  # it listens
            asked = ["test", address, *keys, "--bytes", str(SIZE), "--count", str(rounds), "--json"]
            asked += ["--transport", ",".join(transports), "--budget", f"{budget:g}", "--deadline", "200s"]
            client = sites.start(0, [*command, *asked])
            out, err = client.communicate(timeout=60 + 3 * len(transports) * (budget + 200))
        finally:
            server.terminate()
            said = server.communicate(timeout=60)
        if client.returncode:
            raise SystemExit(f"{way.name}: status {client.returncode}\n{out}\n{err}\n{said}")
        emulator = emulator_record(sites)
    return {**json.loads(out), "emulator": emulator}


def cases(way: Way, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Each transport over one link."""
    found = []
    for each in report["transports"]:
        target = TARGET if each["transport"] == OURS else None
        ratio = each["median"] / way.least if each["transfers"] else None
        found.append(
            {
                "name": f"{way.name}: {each['transport']}",
                "link": asdict(way),
                "least": way.least,
                "ratio": ratio,
                "worst_ratio": each["worst"] / way.least if each["transfers"] else None,
                "target": target,
                "met": None if target is None else ratio is not None and ratio <= target,
                "round_trip": report["round_trip"],
                "emulator": report["emulator"],
                **each,
            }
        )
    return found


def line(case: dict[str, Any]) -> str:
    if not case["transfers"]:
        return f"{case['name']}: {case['stopped']}"
    said = (
        f"{case['name']}: {case['median']:.3f} s until usable, {case['ratio']:.2f}x of {case['least']:.3f} s"
    )
    said += f"; worst {case['worst']:.3f} s ({case['worst_ratio']:.2f}x), {case['transfers']} transfers"
    said += f"; {case['detail']}; {case['loss']:.2%} lost"
    if case["blocks"]:
        said += f", {case['repaired']} repaired, {case['borne']} borne, {case['filled']} filled"
    if case["target"]:
        said += f"; target {case['target']:g}x: {'met' if case['met'] else 'MISSED'}"
    if case["emulator"]["behind_seconds"]:
        said += f"; the emulator was BEHIND for {case['emulator']['behind_seconds']} s"
    return said


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Each transport's median, and each transfer, as a ratio to the least time; a panel for each link."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(re.sub(": [^:]*(:[^:]*)?$", "", case["name"]) for case in found))
    figure, panels = plt.subplots(
        len(names), 1, figsize=(9, 0.6 + 1.3 * len(names)), sharex=True, layout="constrained", squeeze=False
    )
    for name, axes in zip(names, panels[:, 0], strict=True):
        rows = [case for case in found if case["name"].startswith(f"{name}: ") and case["transfers"]]
        for row, case in enumerate(reversed(rows)):
            colour = COLOURS.get(case["transport"], "#777777")
            axes.barh(row, case["ratio"] - 0.9, left=0.9, color=colour, height=0.6, alpha=0.6)
            ratios = [each / case["least"] for each in case["seconds"]]
            axes.scatter(ratios, [row] * len(ratios), s=10, color=colour, zorder=3)
            axes.annotate(
                f"{case['ratio']:.2f}x", (case["ratio"], row), (4, 6), textcoords="offset points", fontsize=8
            )
        axes.axvline(TARGET, color="#c23b22", linewidth=1.2)
        axes.set_yticks(range(len(rows)), [case["transport"] for case in reversed(rows)])
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xscale("log")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlim(left=0.9)
    panels[-1, 0].set_xlabel(
        "time until usable / (bytes at the link's rate + one round trip); bar: median, red: target"
    )
    figure.suptitle("20 MB over a link of 40 ms, one flow, warm", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, help=f"transfers of each transport (default: {ROUNDS})")
    parser.add_argument("--transport", default=",".join(TRANSPORTS), help="as `atoll link test` has it")
    args = parser.parse_args()
    if not can_begin():
        return 0
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    begun, found = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_keys(folder / "keys", make_keys())
        for way in WAYS:
            budget = QUICK_BUDGET if args.quick else BUDGET
            report = run(way, args.transport.split(","), rounds, budget, folder)
            found += (made := cases(way, report))
            for case in made:
                print(line(case), flush=True)
    path = write_results("transport", output_folder(args), found, args.quick)
    draw(found, path.with_suffix(".png"))
    print(f"in {time.monotonic() - begun:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
