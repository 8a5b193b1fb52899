"""(z) A ring whose order is chosen by its links, against the order of ranks.

    python benchmarks/ring_order.py [--quick] [--only TEXT ..]

In the lab, workers at two sites or more, over a hub. Each worker trains a layer of 1 MiB in two sessions: one
whose ring goes by rank, and one whose order is measured (`run.ring_order`). A step's time is that of the
slowest worker, and the number is the ratio of the medians of both sessions. Where ranks alternate between two
sites, as they do where workers are numbered as they come, the order of ranks crosses the long link twice as
often as it must, and more.

Needs root, or a user namespace in which it counts as root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from atoll.core.config import LAB_WORKER_VARIABLE, RANK_VARIABLE
from common import hindrance, options, output_folder, write_results

TARGET = 1.5
STEPS, QUICK_STEPS = 12, 4
WARM = 2  # steps that do not count
SIDE = 512  # of the layer: 1 MiB of gradients
DEADLINE = 900.0  # seconds for one case


@dataclass(frozen=True)
class Case:
    """Workers at sites, their ranks in the order in which sites start them, and the links between sites."""

    name: str
    workers: Sequence[int]  # of each site
    ranks: Sequence[int]
    near: Sequence[tuple[int, int]]  # sites that are close to each other
    rate: str  # of all other links
    delay: str
    target: float | None = TARGET

    @property
    def topology(self) -> str:
        count = len(self.workers)
        text = "".join(
            f'[[site]]\nname = "{_name(site)}"\nworkers = {workers}\n'
            for site, workers in enumerate(self.workers)
        )
        for one in range(count):
            for other in range(one + 1, count):
                rate, delay = ("1Gbit/s", "200us") if (one, other) in self.near else (self.rate, self.delay)
                text += f'[[link]]\nbetween = ["{_name(one)}", "{_name(other)}"]\n'
                text += f'rate = "{rate}"\ndelay = "{delay}"\nqueue = "256KiB"\n'
        return text + f'[hub]\nsite = "{_name(0)}"\nshards = 0\n'


CASES = (
    Case("two sites of 2, 30 Mbit/s, 5 ms", (2, 2), (0, 2, 1, 3), (), "30Mbit/s", "5ms"),
    Case("two sites of 3 and 2, 30 Mbit/s, 5 ms", (3, 2), (0, 2, 4, 1, 3), (), "30Mbit/s", "5ms"),
    # Here latency sets the pace, and that of Gloo's ring is of the latest link, however often it is crossed.
    Case("two sites of 2, 200 Mbit/s, 40 ms", (2, 2), (0, 2, 1, 3), (), "200Mbit/s", "40ms", None),
    # Four machines, two and two near: the far links do not share a line.
    Case(
        "2 x 2 machines, 100 Mbit/s, 40 ms",
        (1,) * 4,
        (0, 2, 1, 3),
        ((0, 1), (2, 3)),
        "100Mbit/s",
        "40ms",
        None,
    ),
    # No order is better than another: what a second ring brings, over links of their own.
    Case("4 machines alike, 30 Mbit/s, 5 ms", (1,) * 4, (0, 1, 2, 3), (), "30Mbit/s", "5ms", None),
)


def _name(site: int) -> str:
    return "abcdefgh"[site]


# -- in each worker ----------------------------------------------------------------------------------------


def work(ranks: Sequence[int], steps: int, folder: Path) -> None:
    """Train in both sessions, and write the seconds of each step and the decision to `folder`."""
    number = int(os.environ[LAB_WORKER_VARIABLE])
    os.environ[RANK_VARIABLE] = str(ranks[number])
    import torch

    import atoll
    from atoll.core.config import load_config

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for order in ("natural", "measured"):
        torch.manual_seed(0)
        model = torch.nn.Linear(SIDE, SIDE, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        records = folder / order
        config = load_config(settings=[f"run.ring_order={order}", f"run.directory={records}"])
        begin = time.perf_counter()
        with atoll.join(config) as session:
            joined = time.perf_counter() - begin
            session.prepare(model, optimizer)
            seconds = []
            for _ in range(steps + WARM):
                loss = model(torch.ones(4, SIDE)).square().mean()
                begin = time.perf_counter()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seconds.append(time.perf_counter() - begin)
        found[order] = {"seconds": seconds[WARM:], "joined": joined}
    (folder / f"worker-{number}.json").write_text(json.dumps(found))


# -- in all ------------------------------------------------------------------------------------------------


def run(case: Case, steps: int) -> dict[str, Any]:
    """What a case gave: the seconds of each step on its slowest worker, by order, and the decision."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "lab.toml").write_text(case.topology)
        worker = [sys.executable, __file__, "--work", str(folder), "--ranks", *map(str, case.ranks)]
        command = [sys.executable, "-c", "from atoll.cli.app import main; main()", "lab", "run"]
        command += ["--directory", str(folder / "lab"), str(folder / "lab.toml"), "--", *worker]
        done = subprocess.run(
            [*command, "--steps", str(steps)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        if done.returncode:
            raise SystemExit(
                f"{case.name}: the lab ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        told = [json.loads(path.read_text()) for path in sorted(folder.glob("worker-*.json"))]
        decisions = _decisions(folder / "measured")
    turns = {
        order: [max(step) for step in zip(*(each[order]["seconds"] for each in told), strict=True)]
        for order in ("natural", "measured")
    }
    ratio = median(turns["natural"]) / median(turns["measured"])
    return {
        **asdict(case),
        "ratio": ratio,
        "met": None if case.target is None else ratio >= case.target,
        "decision": decisions,
        "seconds": turns,
        "joined": {order: max(each[order]["joined"] for each in told) for order in turns},
    }


def _decisions(records: Path) -> list[str]:
    lines = [line for path in records.rglob("*.jsonl") for line in path.read_text().splitlines()]
    events = [json.loads(line) for line in lines if "ring order" in line]
    return list(dict.fromkeys(f"{each['choice']}: {each['reason']}" for each in events if "choice" in each))


def line(found: dict[str, Any]) -> str:
    natural, measured = (median(found["seconds"][order]) for order in ("natural", "measured"))
    said = f"{found['name']}: {found['ratio']:.2f}x, {measured:.3f} s a step in place of {natural:.3f} s"
    joined = found["joined"]
    said += f"; joined in {joined['measured']:.1f} s in place of {joined['natural']:.1f} s"
    if found["target"] is not None:
        said += f" (target {found['target']:g}x: {'met' if found['met'] else 'missed'})"
    return f"{said}\n  {'; '.join(found['decision'])}"


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.0 + 0.7 * len(cases)), layout="constrained")
    for row, each in enumerate(reversed(cases)):
        for shift, order, colour in ((0.18, "natural", "#9db7d1"), (-0.18, "measured", "#2a9d8f")):
            seconds = each["seconds"][order]
            axes.barh(
                row + shift, median(seconds), color=colour, height=0.34, label=order if not row else None
            )
            axes.scatter(seconds, [row + shift] * len(seconds), s=6, color="black", alpha=0.4, zorder=3)
        axes.annotate(
            f"{each['ratio']:.2f}x",
            (median(each["seconds"]["measured"]), row - 0.18),
            (6, -3),
            textcoords="offset points",
            fontsize=9,
        )
    axes.set_yticks(range(len(cases)), [each["name"] for each in reversed(cases)])
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of a step of 1 MiB, on the slowest worker (bar: median)")
    axes.legend(title="run.ring_order")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A ring by rank, and by measured links", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--work", type=Path, help="be one of the workers, and write what was found there")
    parser.add_argument("--ranks", type=int, nargs="+", help="of a lab's workers")
    parser.add_argument("--steps", type=int, help=f"of each session (default: {STEPS})")
    args = parser.parse_args()
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    if args.work:
        work(args.ranks, steps, args.work)
        return 0
    if reason := hindrance():
        print(f"left out: {reason}")
        return 0
    found = []
    for case in CASES:
        if any(text in case.name for text in args.only):
            found.append(run(case, steps))
            print(line(found[-1]), flush=True)
    path = write_results("ring_order", output_folder(args), found, args.quick)
    draw(found, path.with_suffix(".png"))
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
