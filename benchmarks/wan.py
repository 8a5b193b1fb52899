"""(l) The transport across sites, against its rivals: when a gradient is usable, over good and bad links.

    python benchmarks/wan.py [--quick] [--only TEXT ..] [--list]

In the lab, two sites with one link between them, whose queue holds a bandwidth-delay product: 200 Mbit/s and
1 Gbit/s, round trips of 40 and 150 ms; without loss, and with 0.1, 1, 3 and 10 % each way, independent or in
bursts of 8 (a chain by time, so it goes on while the link is idle); and with an outage of 2 s in a transfer.
Transfers of 20 MB, and at 1 Gbit/s and 40 ms of 0.1 and 1 MB too. Contestants: TCP with Cubic, with BBR,
eight streams of BBR, Gloo's send over BBR, our full-reliability mode, and ours. All are warm, and take turns
in the same run. TCP gets buffers of 64 MiB, and keeps its window while it is idle. Who is too slow stops.

A link could do its bytes at the link's rate, one round trip, and the outage: times are ratios to that.
--only measures the cases whose name has one of these texts, and puts them into the results that are there.

Needs root, or a user namespace in which it counts as root.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from atoll.net.keys import make_keys, write_keys
from atoll.net.linkreport import nearest_rank
from common import options, output_folder, write_results
from labsites import can_begin, emulator_record, prepare
from support.sites import Sites, pair, phase
from wan_worker import GLOO, STREAMS, Plan

WORKER = Path(__file__).with_name("wan_worker.py")
OURS, RELIABLE, BBR, CUBIC = "ltp", "ltp:reliable", "tcp:bbr", "tcp:cubic"
CONTESTANTS = (OURS, RELIABLE, BBR, STREAMS, GLOO, CUBIC)
RIVALS = (RELIABLE, BBR, STREAMS, GLOO, CUBIC)
LARGE, SHORT = 20_000_000, (100_000, 1_000_000)  # bytes
BURST = 8.0
OUTAGE, FIRST_OUTAGE, NEXT_OUTAGE = 2.0, 40.0, 7.0  # seconds: how long, when from the lab's start, how often
STOP, CUBIC_STOP = 60.0, 8.0  # seconds, after which a transfer is given up
WARM = 5  # after two, our start-up was not over: its end showed as one late transfer, the second measured
SLOWER = 1.05  # of the best rival's time, at the most
FASTER_THAN_CUBIC = 30.0
DEADLINE = 900.0  # seconds for one case
PORT, GLOO_PORT = 24710, 24790  # below those that a kernel gives to connections
COLOURS = {
    CUBIC: "#9db7d1", BBR: "#2b6ca3", STREAMS: "#6d8fae", GLOO: "#c9a227", RELIABLE: "#8fc9b9",
    OURS: "#2a9d8f",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A link and what goes over it: bits per second, seconds of round trip, bytes, and what goes wrong."""

    rate: float
    round_trip: float
    size: int = LARGE
    loss: float = 0.0
    burst: float = 1.0
    outage: float = 0.0  # seconds, in the middle of each transfer

    @property
    def name(self) -> str:
        said = f"{self.size / 1e6:g} MB, {self.rate / 1e6:g} Mbit/s, {self.round_trip * 1e3:g} ms"
        if self.outage:
            return f"{said}, outage of {self.outage:g} s"
        return f"{said}, {100 * self.loss:g} % lost" + (f" in bursts of {self.burst:g}" * (self.burst > 1))

    def is_meant(self, text: str) -> bool:
        """Whether this is the case of that name, or, where there is none, has it in its name."""
        return text == self.name or (text in self.name and text not in {case.name for case in cases()})

    @property
    def least(self) -> float:
        """Seconds: the bytes at the link's rate, one round trip, and the outage."""
        return 8 * self.size / self.rate + self.round_trip + self.outage

    @property
    def targets(self) -> tuple[float, float]:
        """Ratios that the median and the 99th percentile are not to pass."""
        if self.size in SHORT:
            return 1.3, 2.0
        return (1.3, 1.5) if self.loss > 0.03 else (1.1, 1.2)

    @property
    def counts(self) -> dict[str, int]:
        """How many transfers each contestant makes."""
        cubic = 1 if self.loss else 3
        if self.outage:
            made = (4, 1, 2, 1, 1, 1)
        elif self.size in SHORT:
            made = (200, 50, 100, 50, 50, 2)
        elif self.rate < 5e8:
            made = (12, 3, 8, 3, 3, cubic)
        else:
            made = (30, 6, 15, 5, 5, cubic) if self.round_trip < 0.1 else (20, 4, 10, 4, 3, cubic)
        return dict(zip(CONTESTANTS, made, strict=True))


def cases() -> Iterator[Case]:
    for rate in (2e8, 1e9):
        for round_trip in (0.04, 0.15):
            yield Case(rate, round_trip)
            for loss in (0.001, 0.01, 0.03, 0.1):
                yield Case(rate, round_trip, loss=loss)
                yield Case(rate, round_trip, loss=loss, burst=BURST)
            yield Case(rate, round_trip, outage=OUTAGE)
    for size in SHORT:
        for loss in (0.01, 0.03):
            yield Case(1e9, 0.04, size=size, loss=loss)


# -- measuring ---------------------------------------------------------------------------------------------


def run(
    case: Case, counts: Mapping[str, int], warm: int, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the contestants made, by name, and how the emulator kept up."""
    delay = case.round_trip / 2
    how = {"delay": delay, "queue": round(case.rate / 8 * case.round_trip)}
    phases = [phase(case.rate, loss=case.loss, burst=case.burst, **how)]
    number = sum(counts.values()) + len(counts) if case.outage else 0
    begins = [FIRST_OUTAGE + NEXT_OUTAGE * each for each in range(number)]
    for begin in begins:
        phases.append(phase(case.rate, at=begin, down=True, **how))
        phases.append(phase(case.rate, at=begin + case.outage, **how))
    with Sites(pair(phases)) as sites:
        prepare(sites, tcp_congestion_control="bbr")  # for Gloo
        plan = Plan(
            f"tcp://{sites.address(1)}:{PORT}",
            str(folder / "keys"),
            case.size,
            dict(counts),
            {name: CUBIC_STOP if name == CUBIC and case.loss else STOP for name in counts},
            warm,
            [CUBIC] if CUBIC in counts and case.loss else [],
            f"{sites.address(0)}:{GLOO_PORT}",
            [sites.emulator.totals().started + begin for begin in begins],
            4 * case.size / case.rate,
        )
        made = measured(sites, plan)
        emulator = emulator_record(sites)
    return made, emulator


def measured(sites: Sites, plan: Plan) -> dict[str, Any]:
    serve = [sys.executable, "-m", "atoll.cli.app", "link", "serve", "--listen", plan.address]
    others = [sites.start(1, [*serve, "--key-file", plan.keys])]
    if GLOO in plan.counts:
        others.append(sites.start(1, [sys.executable, str(WORKER), "gloo", plan.gloo, str(plan.size)]))
    try:
        assert others[0].stdout is not None
        others[0].stdout.readline()  # it listens
        client = sites.start(0, [sys.executable, str(WORKER), "client", json.dumps(asdict(plan))])
        out, err = client.communicate(timeout=DEADLINE)
    finally:
        for other in others:
            other.terminate()
        said = [other.communicate(timeout=60) for other in others]
    if client.returncode:
        raise SystemExit(f"the client ended with status {client.returncode}\n{out}\n{err}\n{said}")
    made: dict[str, Any] = json.loads(out)
    return made


def records(case: Case, made: Mapping[str, Any], emulator: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One for each contestant: its figures, and ours with what it was to reach."""
    found = [record(case, name, each) for name, each in made.items()]
    for each in found:
        each["emulator"] = emulator
        if each["contestant"] == OURS:
            judge(case, each, [rival for rival in found if rival["contestant"] in RIVALS])
    return found


def record(case: Case, name: str, made: Mapping[str, Any]) -> dict[str, Any]:
    seconds = made.pop("seconds")
    there = bool(seconds)
    packets = made.pop("packets")
    return {
        "name": f"{case.name}: {name}",
        "contestant": name,
        "link": asdict(case),
        "least": case.least,
        "transfers": len(seconds),
        "median": median(seconds) if there else None,
        "p99": nearest_rank(seconds, 0.99) if there else None,  # of fewer than 100, the worst
        "ratio": median(seconds) / case.least if there else None,
        "p99_ratio": nearest_rank(seconds, 0.99) / case.least if there else None,
        "more_than": None if there or not made["stopped"] else stop_of(name, case),
        "sent": packets["sent"],
        "again": packets["again"],
        **made,
        "seconds": [round(each, 5) for each in seconds],
    }


def stop_of(name: str, case: Case) -> float:
    """Seconds after which a contestant's transfer is given up."""
    return CUBIC_STOP if name == CUBIC and case.loss else STOP


def judge(case: Case, ours: dict[str, Any], rivals: Sequence[Mapping[str, Any]]) -> None:
    """What was to be reached, and what was."""
    verdicts: dict[str, bool] = {}
    there = bool(ours["transfers"])
    for key, target in zip(("ratio", "p99_ratio"), case.targets, strict=True):
        verdicts[key] = there and ours[key] <= target
    measured_rivals = [rival for rival in rivals if rival["transfers"]]
    best: dict[str, Any] = {}
    for key in ("median", "p99"):
        rival = min(measured_rivals, key=lambda each: each[key], default=None)
        if rival is not None and there:
            best[key] = {"contestant": rival["contestant"], "to_it": ours[key] / rival[key]}
            verdicts[f"{key} to the best rival"] = best[key]["to_it"] <= SLOWER
    cubic = next((rival for rival in rivals if rival["contestant"] == CUBIC), None)
    if cubic is not None and case.size == LARGE and (case.rate, case.round_trip) == (1e9, 0.04) and case.loss:
        slowest = cubic["median"] or cubic["more_than"]
        if slowest and there:
            best["cubic"] = slowest / ours["median"]
            verdicts["to Cubic"] = best["cubic"] >= FASTER_THAN_CUBIC
    ours.update(targets=case.targets, best=best, verdicts=verdicts, met=all(verdicts.values()))


def line(case: Mapping[str, Any]) -> str:
    if not case["transfers"]:
        return f"{case['name']}: {case['stopped']}"
    said = (
        f"{case['name']}: {case['median']:.3f} s, {case['ratio']:.2f}x of {case['least']:.3f} s; 99th "
        f"percentile {case['p99_ratio']:.2f}x, {case['transfers']} transfers"
    )
    if case["contestant"] == OURS:
        missed = [key for key, met in case["verdicts"].items() if not met]
        rivals = [
            f"{key} {each['to_it']:.2f}x of {each['contestant']}"
            for key, each in case["best"].items()
            if key != "cubic"
        ]
        said += f"; {case['short']} short, {case['again']} sent again; {', '.join(rivals)}"
        said += f"; MISSED: {', '.join(missed)}" if missed else "; all met"
    behind = case["emulator"]["behind_seconds"]
    return said + (f"; the emulator was behind for {behind} s" if behind else "")


# -- the picture -------------------------------------------------------------------------------------------


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Medians, and 99th percentiles as whiskers, as ratios; a panel for each link, a group for each loss."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, dict[str, dict[str, Mapping[str, Any]]]] = {}
    for each in found:
        way, trouble = each["name"].rsplit(": ", 1)[0].rsplit(", ", 1)
        if each["contestant"] not in way:
            panels.setdefault(way, {}).setdefault(trouble, {})[each["contestant"]] = each
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(11, 2.3 * len(panels)), layout="constrained", squeeze=False
    )
    for plot, (way, groups) in zip(axes[:, 0], panels.items(), strict=True):
        for place, contestants in enumerate(groups.values()):
            for turn, name in enumerate(CONTESTANTS):
                each = contestants.get(name)
                if each is None or not (each["transfers"] or each["more_than"]):
                    continue
                at, ratio = place + 0.13 * (turn - 2.5), each["ratio"] or each["more_than"] / each["least"]
                plot.bar(at, ratio - 0.6, 0.12, 0.6, color=COLOURS[name], label=name if not place else None)
                if each["transfers"]:
                    plot.vlines(at, ratio, max(each["p99_ratio"], ratio), color="black", linewidth=0.8)
                else:
                    plot.annotate(">", (at, ratio), ha="center", fontsize=8)
            target = (contestants.get(OURS) or {}).get("targets")
            if target:
                plot.hlines(target[0], place - 0.4, place + 0.4, color="#c23b22", linewidth=1)
        plot.set_xticks(range(len(groups)), list(groups), fontsize=7)
        plot.set_title(way, fontsize=10, loc="left")
        plot.set_yscale("log")
        plot.set_ylim(bottom=0.6)
        plot.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        plot.minorticks_off()
        plot.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(fontsize=8, ncols=6, loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.supylabel("time / least (line: 99th percentile; red: the median's target)", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# -- the command -------------------------------------------------------------------------------------------


def kept(path: Path, quick: bool) -> list[dict[str, Any]]:
    """The results that are there."""
    if quick or not path.exists():
        return []
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return found


def merged(before: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of them in the order of `cases`; of a case that was measured again, the new ones."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for some in (before, new):
        fresh: dict[str, list[dict[str, Any]]] = {}
        for each in some:
            fresh.setdefault(each["name"].rsplit(": ", 1)[0], []).append(each)
        by_case.update(fresh)
    return [each for case in cases() for each in by_case.get(case.name, [])]


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cases of these names, or parts of names")
    parser.add_argument("--contestant", nargs="+", metavar="NAME", choices=CONTESTANTS, help="these alone")
    parser.add_argument("--list", action="store_true", help="print the cases, and measure nothing")
    args = parser.parse_args()
    chosen = [case for case in cases() if not args.only or any(case.is_meant(text) for text in args.only)]
    if args.list or not chosen:
        print("\n".join(case.name for case in (chosen or cases())))
        return 0 if chosen else 2
    if not can_begin():
        return 0
    os.environ["GLOO_SOCKET_IFNAME"] = "wan0"  # in both sites
    begun, path = time.monotonic(), output_folder(args) / "wan.json"
    found = kept(path, args.quick)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_keys(folder / "keys", make_keys())
        for case in chosen:
            counts = {
                name: 2 if args.quick else count
                for name, count in case.counts.items()
                if not args.contestant or name in args.contestant
            }
            made, emulator = run(case, counts, WARM, folder)
            new = records(case, made, emulator)
            print("\n".join(map(line, new)), flush=True)
            found = merged(found, new)
            write_results(
                "wan", path.parent, found, args.quick
            )  # a long run that is broken off keeps what it has
    draw(found, path.with_suffix(".png"))
    print(f"in {time.monotonic() - begun:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
