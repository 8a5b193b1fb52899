"""(o) Four nodes of wandering speed and slow links: peers, DistributedDataParallel, and no synchronisation.

    python benchmarks/peers.py [--quick] [--rounds N] [--parts PART,...]

In the lab: four sites with a node each, and a link between every two. Computing is emulated, by sleeping in
forward and before each layer's gradients (benchmarks/peers_worker.py): the seconds of a node's steps are
lognormal, p99/p50 = 3, the same for every contestant. Three parts:

- "exchange": links on which a full exchange of the model's gradients, of each node to all others, takes as
  long as a step does in the mean. That is measured before DistributedDataParallel trains, over its group.
- "all-reduce": faster ones, on which Gloo's all-reduce of the gradients takes that long: it is what
  DistributedDataParallel needs, and is half as long again as the full exchange over a link for every two.
- "slow": the first links; one node computes four times slower, and takes a smaller part of each batch
  (`session.batches`). Without synchronisation each node has the part that its speed gives it: the sum of
  speeds.

All TCP is with Cubic, as most machines have it; what BBR gives is told beside, once, where the kernel has it.
Contestants are runs of their own, which take turns in a new random order in each round. Samples/s are of the
steady state: from when all have made some steps until the first has made its last. What of its exchange
DistributedDataParallel hid is known from its step, the slowest node's computing, and its own step without
computing. The time that a device spends in exchange, waiting left out, is from the run's own records.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from atoll.core.events import StepDone
from atoll.lab.report import RECORD
from atoll.observe.journal import JournalReader
from common import options, output_folder, write_results
from peers_worker import SPREAD, Plan, Record
from runs import rate_of, read_records, run_in_lab, spread

WORKER = Path(__file__).with_name("peers_worker.py")
TCPS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
NODES, BATCH, SLOWER = 4, 16, 4.0
MEDIAN = 0.5  # seconds of a step: four nodes and the lab share the cores of one machine
MEAN = MEDIAN * float(np.exp(SPREAD**2 / 2))
EXCHANGE_LINKS, REDUCE_LINKS, DELAY = "10.8Mbit/s", "16.4Mbit/s", "5ms"
STEPS, QUICK_STEPS = 100, 40  # of the steady state
WARM, DEALT_WARM = 10, 48  # before it; where shares of a batch follow speeds, they do from step 16 on
ROUNDS = 2
DEADLINE = 300.0  # seconds for one run
OF_ALONE, OF_DDP, OF_SPEEDS, OF_STEP = 0.88, 1.6, 0.85, 0.03  # targets; the last at most


@dataclass(frozen=True)
class Contestant:
    """Who synchronises, and how: `system` of the worker, the configuration's `sync`, and all sites' TCP."""

    name: str
    system: str
    stale_max: int = 0
    tcp: str = "cubic"

    @property
    def configuration(self) -> str:
        return f'[run]\nstrategy = "peers"\n[sync]\nstale_max = {self.stale_max}\n'


ALONE = Contestant("no synchronisation", "alone")
DDP = Contestant("DistributedDataParallel", "ddp")
PEERS = Contestant("peers, stale_max 4", "atoll", 4)
OTHERS = tuple(Contestant(f"peers, stale_max {stale}", "atoll", stale) for stale in (0, 1, 16))
DDP_OVER_BBR = replace(DDP, name=f"{DDP.name} over BBR", tcp="bbr")
PEERS_OVER_BBR = replace(PEERS, name=f"{PEERS.name}, over BBR", tcp="bbr")


@dataclass(frozen=True)
class Part:
    """What is compared. `once`: contestants that run in the first round alone, for information."""

    name: str
    about: str
    rate: str
    contestants: tuple[Contestant, ...]
    once: tuple[Contestant, ...] = ()
    slow: tuple[float, ...] = (1.0,) * NODES

    @property
    def dealt(self) -> bool:
        return max(self.slow) > 1

    @property
    def warm(self) -> int:
        """Steps before the steady state."""
        return DEALT_WARM if self.dealt else WARM

    @property
    def shares(self) -> list[int]:
        """Samples of each node's batch, by its speed."""
        return [round(BATCH / slow) for slow in self.slow]

    def plan(self, contestant: Contestant, seed: int, quick: bool) -> Plan:
        steps = self.warm + (QUICK_STEPS if quick else STEPS)
        return Plan(contestant.system, steps, MEDIAN, BATCH, list(self.slow), self.shares, seed, self.dealt)

    def configuration(self, contestant: Contestant) -> str:
        batch = f"global_batch = {sum(self.shares)}\n" if self.dealt else ""
        return contestant.configuration + batch


PARTS = (
    Part(
        "exchange",
        "a full exchange takes a step",
        EXCHANGE_LINKS,
        (ALONE, DDP, PEERS),
        (*OTHERS, DDP_OVER_BBR, PEERS_OVER_BBR),
    ),
    Part("all-reduce", "Gloo's all-reduce takes a step", REDUCE_LINKS, (ALONE, DDP, PEERS)),
    Part(
        "slow",
        "one node four times slower",
        EXCHANGE_LINKS,
        (ALONE, PEERS),
        (PEERS_OVER_BBR,),
        slow=(1, SLOWER, 1, 1),
    ),
)


# -- a run -------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """One run of one contestant. Times are in seconds; shares are parts of the steps' time, over all nodes in
    the steady state, and None where the run keeps no such records."""

    contestant: str
    seed: int
    samples_per_second: float  # in the steady state
    each: list[float]  # the same, by node
    steady: float  # how long that was
    step: float  # the mean of a node's step in it
    computing: float  # the part of the step that was emulated
    slowest: float  # the mean over the steps, of the slowest node's computing
    samples: list[float]  # the mean of each node's batch
    exchange_share: float | None  # of the device's time
    waiting_share: float | None
    staleness: dict[str, float] | None  # mean, and most
    exchanges: dict[str, list[float]]  # as measured before DistributedDataParallel trains
    buckets: list[int]  # its, in bytes
    behind: int  # seconds in which the lab's emulator could not keep up
    late_p99: float  # packets, by the emulator


def topology(rate: str, hub: bool, tcp: str) -> str:
    names = [f"site{number}" for number in range(NODES)]
    lines = [f'congestion_control = "{tcp}"', *(f'[[site]]\nname = "{name}"' for name in names)]
    lines += [
        f'[[link]]\nbetween = ["{one}", "{other}"]\nrate = "{rate}"\ndelay = "{DELAY}"\nqueue = "100ms"'
        for number, one in enumerate(names)
        for other in names[number + 1 :]
    ]
    lines += [f'[hub]\nsite = "{names[0]}"\nshards = 0'] if hub else []
    return "\n".join(lines) + "\n"


def run(part: Part, contestant: Contestant, seed: int, quick: bool) -> Outcome:
    hub = contestant.system == "atoll"
    plan = part.plan(contestant, seed, quick)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lab.toml").write_text(topology(part.rate, hub, contestant.tcp), encoding="utf-8")
        (folder / "atoll.toml").write_text(part.configuration(contestant) if hub else "", encoding="utf-8")
        run_in_lab(contestant.name, WORKER, plan, folder, DEADLINE)
        records = read_records(folder, Record, NODES)
        lab = json.loads((folder / "lab" / RECORD).read_text(encoding="utf-8"))
        journals = folder / "lab" / "journals"
        done = [list(steps_in(journals, node)) for node in range(NODES)] if hub else []
    return outcome(part, contestant, plan, records, done, lab)


def steps_in(journals: Path, node: int) -> Iterator[StepDone]:
    for path in sorted(journals.glob(f"{node}-*.jsonl")):
        yield from (event for event in JournalReader(path).read() if isinstance(event, StepDone))


def outcome(
    part: Part,
    contestant: Contestant,
    plan: Plan,
    records: Sequence[Record],
    done: Sequence[Sequence[StepDone]],
    lab: dict[str, Any],
) -> Outcome:
    """What a run's records say. `done`: under Atoll, each node's journal."""
    window = max(record.steps[part.warm] for record in records), min(record.steps[-1] for record in records)
    inside = [
        [number for number, when in enumerate(r.steps) if window[0] < when <= window[1]] for r in records
    ]
    each = [rate_of(record.node, record.steps, record.samples, *window) for record in records]
    computed = [
        [record.computed[number] for number in own] for record, own in zip(records, inside, strict=True)
    ]
    told = [event for steps in done for event in steps if window[0] < event.time <= window[1]]
    seconds = sum(event.seconds for event in told)
    return Outcome(
        contestant=contestant.name,
        seed=plan.seed,
        samples_per_second=sum(each),
        each=each,
        steady=window[1] - window[0],
        step=mean(
            (r.steps[own[-1]] - r.steps[own[0]]) / (len(own) - 1)
            for r, own in zip(records, inside, strict=True)
        ),
        computing=mean(mean(own) for own in computed),
        slowest=mean(max(r.computed[number] for r in records) for number in inside[0]),
        samples=[mean(r.samples[number] for number in own) for r, own in zip(records, inside, strict=True)],
        exchange_share=sum(event.exchange for event in told) / seconds if told else None,
        waiting_share=sum(event.waiting for event in told) / seconds if told else None,
        staleness=staleness_of(told),
        exchanges={
            "full": records[0].full,
            "all-reduce": records[0].all_reduce,
            "bare step": records[0].bare,
        },
        buckets=records[0].buckets,
        behind=int(lab["emulator"]["behind_seconds"]),
        late_p99=lab["emulator"]["lateness_p99"],
    )


def staleness_of(told: Sequence[StepDone]) -> dict[str, float] | None:
    if not told:
        return None
    return {"mean": mean(event.staleness for event in told), "most": max(event.staleness for event in told)}


# -- the cases ---------------------------------------------------------------------------------------------


def hidden(each: Outcome) -> float:
    """The part of its exchange that DistributedDataParallel hid behind computing, 0 to 1."""
    exchange = median(each.exchanges["bare step"])
    return 1 - (each.step - each.slowest) / exchange


def case(part: Part, contestant: Contestant, outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    """A contestant beside those without synchronisation and DistributedDataParallel, round by round."""
    own = outcomes[contestant.name]
    found: dict[str, Any] = {
        "part": part.name,
        "about": part.about,
        "contestant": contestant.name,
        "link": {"rate": part.rate, "delay": DELAY, "tcp": contestant.tcp},
        "computing": {"median": MEDIAN, "mean": MEAN, "p99": 3 * MEDIAN, "slow": list(part.slow)},
        "samples_per_second": median(each.samples_per_second for each in own),
    }
    for key, rival in (("of_alone", ALONE), ("of_ddp", DDP)):
        pairs = zip(own, outcomes.get(rival.name, []), strict=False)
        ratios = [mine.samples_per_second / other.samples_per_second for mine, other in pairs]
        found[key] = spread(ratios) if ratios and rival is not contestant else None
    if contestant is PEERS:
        found["verdicts"] = verdicts(part, own, found)
        found["met"] = all(verdict["met"] for verdict in found["verdicts"].values())
    if contestant.system == "ddp":
        found["hidden"] = spread([hidden(each) for each in own])
        found["exchanges"] = {
            name: median(second for each in own for second in each.exchanges[name])
            for name in own[0].exchanges
        }
    return {**found, "each": [asdict(each) for each in own]}


def verdicts(part: Part, own: Sequence[Outcome], found: dict[str, Any]) -> dict[str, Any]:
    """What peers shall reach, and whether they do."""
    least = {"of_alone": OF_SPEEDS if part.dealt else OF_ALONE} | ({} if part.dealt else {"of_ddp": OF_DDP})
    said = {
        key: {"target": target, "found": found[key]["median"], "met": found[key]["median"] >= target}
        for key, target in least.items()
    }
    share = median(each.exchange_share or 0.0 for each in own)
    return {**said, "exchange": {"target": OF_STEP, "found": share, "met": 0 < share <= OF_STEP}}


def line(case: dict[str, Any]) -> str:
    last = case["each"][-1]
    said = f"{case['about']}; {case['contestant']}: {case['samples_per_second']:.1f} samples/s"
    for key, name in (("of_alone", "of no synchronisation"), ("of_ddp", "of DDP's")):
        if it := case[key]:
            said += f"; {it['median']:.3f} {name} ({it['least']:.3f} to {it['most']:.3f})"
    if it := last["staleness"]:
        said += (
            f"; exchange {last['exchange_share']:.2%} of a device's step, waiting "
            f"{last['waiting_share']:.1%}, staleness {it['mean']:.2f}, {it['most']} at most"
        )
    if "hidden" in case:
        times = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in case["exchanges"].items())
        said += f"; {times} (a step's mean: {1e3 * MEAN:.0f} ms); hid {case['hidden']['median']:.0%} of it"
    for name, verdict in case.get("verdicts", {}).items():
        said += f"; {name} {verdict['target']:g}: {'met' if verdict['met'] else 'MISSED'}"
    behind = sum(each["behind"] for each in case["each"])
    return said + (f"; THE EMULATOR WAS BEHIND for {behind} s" if behind else "")


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """Samples/s of each contestant as a part of no synchronisation's, by part; red: the target."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [case for case in cases if case["of_alone"]]
    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.5 * len(shown)), layout="constrained")
    for row, case in enumerate(reversed(shown)):
        colour = "#8a8a8a" if case["contestant"].startswith(DDP.name) else "#2a9d8f"
        it = case["of_alone"]
        axes.barh(row, it["median"], color=colour, height=0.5, alpha=0.6)
        axes.hlines(row, it["least"], it["most"], color=colour, linewidth=3)
        if verdict := case.get("verdicts", {}).get("of_alone"):
            axes.vlines(verdict["target"], row - 0.35, row + 0.35, color="#c23b22", linewidth=1.5)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(
        range(len(shown)), [f"{case['contestant']}\n{case['about']}" for case in reversed(shown)], fontsize=8
    )
    axes.set_xlabel(
        "samples/s, as a part of the same nodes' without synchronisation (bar: median, red: target)"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, help=f"rounds of runs (default: {ROUNDS}; with --quick, 1)")
    parser.add_argument("--parts", default=",".join(part.name for part in PARTS), help="with commas between")
    args = parser.parse_args()
    parts = [part for part in PARTS if part.name in args.parts.split(",")]
    if "bbr" not in TCPS.read_text(encoding="ascii").split():
        print("this kernel has no BBR: nothing is measured over it", flush=True)
        parts = [replace(part, once=tuple(c for c in part.once if c.tcp != "bbr")) for part in parts]
    order, start = random.Random(1), time.monotonic()
    outcomes: dict[str, dict[str, list[Outcome]]] = {part.name: {} for part in parts}
    for seed in range(args.rounds or (1 if args.quick else ROUNDS)):
        turns = [
            (part, each) for part in parts for each in (*part.contestants, *(part.once if not seed else ()))
        ]
        for part, contestant in order.sample(turns, len(turns)):
            own = run(part, contestant, seed, args.quick)
            outcomes[part.name].setdefault(contestant.name, []).append(own)
            print(
                f"round {seed}: {part.name}: {own.contestant}: {own.samples_per_second:.1f} samples/s",
                flush=True,
            )
    found = [
        case(part, each, outcomes[part.name]) for part in parts for each in (*part.contestants, *part.once)
    ]
    for each in found:
        print(line(each), flush=True)
    path = write_results("peers", output_folder(args), found, args.quick)
    draw(found, path.with_suffix(".png"))
    print(f"in {time.monotonic() - start:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
