"""Shares by speed, simulated: workers of log-normal speeds that drift, some of them stragglers.

    python benchmarks/shares.py [--quick]

Workers in lockstep under a virtual clock: an iteration takes as long as its slowest worker. Each worker's
seconds for n samples are a + b n; b is log-normal over the workers and drifts by a random walk, and
measurements have noise. From time to time a worker becomes a straggler, at a third of its speed, for some
hundred iterations. The chooser hears of an iteration once it is over, and its parts hold two iterations
later, as in `train/data/sharereports.py`. Beside it: even parts, and the best parts for the true seconds of
each iteration.

The cost of a choice, in seconds of the processor, is measured for 10, 1,000 and 10,000 workers.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.groups.shares import Floats, ShareChooser, even, share_out
from common import options, output_folder, write_results

WORKERS, EACH = 1000, 64  # samples of a worker, on the average
SPREAD, DRIFT, NOISE = 0.4, 0.002, 0.05  # standard deviations: of the logarithm of speeds, and relative ones
FIXED = 0.1  # of a batch's seconds at even parts, on the average, those that do not depend on samples
STRAGGLERS = 1e-5  # of the workers, those that become stragglers in an iteration
SLOWER, LASTS = 3.0, 300
COUNTS = (10, 1000, 10000)


@dataclass
class Simulated:
    """What a case came to: parts of the workers' sum of speeds, and the number of changes of parts."""

    case: str
    workers: int
    iterations: int
    even: float
    auto: float
    best: float
    changes: int


class World:
    """Workers whose speeds drift; `seconds_for` is what they take now."""

    def __init__(self, workers: int, *, drift: float, stragglers: float) -> None:
        self._random = np.random.default_rng(7)
        self.each = np.exp(SPREAD * self._random.standard_normal(workers)) / EACH
        self.fixed = np.full(workers, FIXED)
        self._drift, self._stragglers = drift, stragglers
        self._left = np.zeros(workers, dtype=np.int64)

    def step(self) -> None:
        """Let an iteration's time pass."""
        self.each = self.each * np.exp(self._drift * self._random.standard_normal(len(self.each)))
        self._left = np.maximum(self._left - 1, 0)
        struck = self._random.random(len(self.each)) < self._stragglers
        self._left[struck] = LASTS

    def costs(self) -> tuple[Floats, Floats]:
        """Return what each worker takes: the fixed seconds, and those for each sample."""
        slower = np.where(self._left > 0, SLOWER, 1.0)
        return self.fixed * slower, self.each * slower

    def noise(self) -> Floats:
        """Return by what each worker's measured seconds are multiplied."""
        return 1 + NOISE * np.abs(self._random.standard_normal(len(self.each)))


def simulate(case: str, workers: int, iterations: int, *, drift: float, stragglers: float) -> Simulated:
    """Make the iterations of one case."""
    total = workers * EACH
    world, chooser = World(workers, drift=drift, stragglers=stragglers), ShareChooser(workers, total)
    coming = [chooser.parts] * 2  # parts of the next iterations
    took: dict[str, list[float]] = {"even": [], "auto": [], "best": []}
    ideal: list[float] = []
    changes = 0
    for _ in range(iterations):
        world.step()
        fixed, each = world.costs()
        noise, parts = world.noise(), coming.pop(0)
        seconds = (fixed + each * parts) * noise
        took["auto"].append(float(seconds.max()))
        took["even"].append(float(((fixed + each * even(total, workers)) * noise).max()))
        took["best"].append(float(((fixed + each * share_out(total, fixed, each)) * noise).max()))
        ideal.append(float(total / (1 / (fixed / EACH + each)).sum()))
        change = chooser.observe(seconds, parts.astype(np.float64))
        changes += change is not None
        coming.append(chooser.parts)
    used = {name: sum(ideal) / sum(seconds) for name, seconds in took.items()}
    return Simulated(case, workers, iterations, used["even"], used["auto"], used["best"], changes)


def cost_of(workers: int, iterations: int) -> dict[str, float]:
    """Return the median and the largest seconds of a choice by `workers` reports."""
    world = World(workers, drift=DRIFT, stragglers=STRAGGLERS)
    chooser = ShareChooser(workers, workers * EACH)
    taken = []
    for _ in range(iterations):
        world.step()
        fixed, each = world.costs()
        seconds, parts = (fixed + each * chooser.parts) * world.noise(), chooser.parts.astype(np.float64)
        began = time.thread_time()
        chooser.observe(seconds, parts)
        taken.append(time.thread_time() - began)
    mean, middle = statistics.fmean(taken), statistics.median(taken)
    return {"workers": workers, "mean": mean, "median": middle, "most": max(taken)}


def draw(cases: list[Simulated], costs: list[dict[str, float]], path: Path) -> None:
    """Draw what each case uses of the sum of speeds, and what a choice costs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (used, cost) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    places = np.arange(len(cases))
    for index, name in enumerate(("even", "auto", "best")):
        used.bar(places + 0.27 * (index - 1), [getattr(case, name) for case in cases], 0.25, label=name)
    used.set_xticks(places, [case.case for case in cases])
    used.set_ylabel("part of the sum of speeds")
    used.set_ylim(0, 1)
    used.legend(frameon=False)
    for name in ("median", "mean", "most"):
        cost.loglog(
            [each["workers"] for each in costs], [1e3 * each[name] for each in costs], "o-", label=name
        )
    cost.set_xlabel("workers")
    cost.set_ylabel("milliseconds of an iteration's choice")
    cost.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    given = options(__doc__).parse_args()
    folder = output_folder(given)
    iterations = 200 if given.quick else 1000
    kinds: dict[str, dict[str, Any]] = {
        "steady": {"drift": 0.0, "stragglers": 0.0},
        "drift": {"drift": DRIFT, "stragglers": 0.0},
        "drift and\nstragglers": {"drift": DRIFT, "stragglers": STRAGGLERS},
    }
    cases = [simulate(name, WORKERS, iterations, **kind) for name, kind in kinds.items()]
    for case in cases:
        print(
            f"{case.case.replace(chr(10), ' ')}: even {case.even:.3f}, auto {case.auto:.3f}, "
            f"best {case.best:.3f} of the sum of speeds; {case.changes} changes in {case.iterations} "
            "iterations"
        )
    costs = [cost_of(workers, 20 if given.quick else 200) for workers in COUNTS]
    for each in costs:
        print(
            f"{each['workers']:,} workers: median {1e3 * each['median']:.3f} ms, "
            f"mean {1e3 * each['mean']:.3f}, most {1e3 * each['most']:.3f}"
        )
    write_results("shares", folder, [*map(asdict, cases), *costs], given.quick)
    draw(cases, costs, folder / "shares.png")


if __name__ == "__main__":
    main()
