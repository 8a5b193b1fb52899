"""What the benchmarks share: interleaved timing, statistics of paired ratios, and writers of results.

Two programs are compared by letting them take turns on the same input in the same process. What else the
machine does then falls on both alike, and the ratio of each pair tells more than two separate times.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from atoll.core.errors import UserError
from atoll.lab.emulator import available
from atoll.lab.namespaces import find_way
from atoll.observe.rundir import DIRECTORY_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
QUICK_RESULTS = ROOT / "build" / "benchmarks"  # not kept: a quick run only shows that the benchmark works
MIB = 2**20
_INSIDE = "ATOLL_BENCHMARK_INSIDE"

Array = npt.NDArray[np.float64]
T = TypeVar("T")

sys.path.append(str(ROOT / "tests"))  # for who imports `support` after this module


# -- where it runs -----------------------------------------------------------------------------------------


def hindrance() -> str:
    """Why sites cannot be made here; empty if they can. Where a user may only make namespaces of its own, the
    benchmark begins anew in one."""
    try:
        way = find_way()
    except UserError as error:
        return str(error)
    if "--user" in way and not os.environ.get(_INSIDE):
        os.execvpe(way[0], [*way, sys.executable, *sys.argv], {**os.environ, _INSIDE: "1"})
    return available()


# -- measuring ---------------------------------------------------------------------------------------------


@dataclass
class Timings:
    """One contestant's measured blocks: wall-clock and CPU seconds of each, in order of the pairs."""

    seconds: list[float]
    cpu_seconds: list[float]

    def extend(self, more: Timings) -> None:
        self.seconds += more.seconds
        self.cpu_seconds += more.cpu_seconds


def interleave(
    contestants: Mapping[str, Callable[[int], object]],
    pairs: int,
    seed: int,
    fence: Callable[[], object] = lambda: None,
    cpu: Callable[[], float] = time.process_time,
) -> dict[str, Timings]:
    """Let the contestants take turns, `pairs` times each, in a new random order each time.

    Each is called with the number of the pair, so that all work on the same input. `fence` runs, unmeasured,
    before each block. The order is drawn from `seed`: equal on every worker that gives the same one. `cpu`
    says how many CPU seconds were spent so far.
    """
    order = random.Random(seed)
    timings = {name: Timings([], []) for name in contestants}
    for pair in range(pairs):
        for name in order.sample(list(contestants), len(contestants)):
            fence()
            spent, start = cpu(), time.perf_counter()
            contestants[name](pair)
            timings[name].seconds.append(time.perf_counter() - start)
            timings[name].cpu_seconds.append(cpu() - spent)
    return timings


def over_workers(timings: Sequence[Mapping[str, Timings]]) -> dict[str, Timings]:
    """Each turn's seconds on its slowest worker, and the CPU seconds of all together."""
    return {
        name: Timings(
            [max(turn) for turn in zip(*(worker[name].seconds for worker in timings), strict=True)],
            [sum(turn) for turn in zip(*(worker[name].cpu_seconds for worker in timings), strict=True)],
        )
        for name in timings[0]
    }


def over_group(timings: Mapping[str, Timings]) -> dict[str, Timings]:
    """The same, asked of torch's default process group by each of its workers."""
    slowest = torch.tensor([t.seconds for t in timings.values()], dtype=torch.float64)
    together = torch.tensor([t.cpu_seconds for t in timings.values()], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(together, dist.ReduceOp.SUM)
    return {
        name: Timings(seconds, cpu)
        for name, seconds, cpu in zip(timings, slowest.tolist(), together.tolist(), strict=True)
    }


def pairs_of_group(pairs: int, quick: bool) -> int:
    """How many pairs this group measures where two workers measure `pairs`: with twice the workers on the
    same cores a turn takes twice the time."""
    return 4 if quick else 2 * pairs // dist.get_world_size()


@contextmanager
def recorded() -> Iterator[Path]:
    """Within it a session keeps records there, as a worker of `atoll run` does; they are removed
    afterwards."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {DIRECTORY_VARIABLE: folder}):
        yield Path(folder)


def torchrun(script: str, workers: int, *arguments: str) -> None:
    """Run a benchmark's file as `workers` processes of one group, with one torch thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(workers), script, *arguments]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def measured_by(script: str, workers: int, quick: bool, kind: type[T]) -> T:
    """What worker 0 of such a group has written: with --work FILE each is one of the workers."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        torchrun(script, workers, "--work", str(output), *["--quick"] * quick)
        return msgspec.json.decode(output.read_bytes(), type=kind)


def leave_group() -> None:
    """End torch's default process group in good order.

    DistributedDataParallel's wrappers lie in reference cycles and hold the group; if it is torn down with the
    interpreter, under threads that still run, the process aborts.
    """
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


# -- statistics --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """The ratios of the pairs: median, spread, and what the median is below at 95 % confidence."""

    median: float
    p10: float
    p90: float
    bound95: float
    pairs: int


def ratio_of(ratios: Sequence[float] | Array, seed: int = 0) -> Ratio:
    """The statistics of `ratios`, given in the order in which they were measured."""
    values = np.asarray(ratios, dtype=np.float64)
    p10, median, p90 = np.quantile(values, (0.1, 0.5, 0.9))
    bound = np.quantile(bootstrap_medians(values, seed), 0.95)
    return Ratio(float(median), float(p10), float(p90), float(bound), len(values))


def bootstrap_medians(values: Array, seed: int, draws: int = 4000) -> Array:
    """Medians of `draws` resamples.

    Runs of neighbouring pairs are drawn whole (the moving-block bootstrap): noise on a shared machine comes
    in bursts, and pairs drawn one by one would make the bound look better than it is.
    """
    count = len(values)
    length = max(1, round(count ** (1 / 3)))
    generator = np.random.default_rng(seed)
    starts = generator.integers(0, count - length + 1, size=(draws, -(-count // length)))
    indices = (starts[:, :, None] + np.arange(length)).reshape(draws, -1)[:, :count]
    medians: Array = np.median(values[indices], axis=1)
    return medians


@dataclass(frozen=True)
class Target:
    """What a case must reach: the ratio's median, and the median's 95 % bound where one is asked for."""

    median: float
    bound95: float | None = None

    def met_by(self, ratio: Ratio) -> bool:
        return ratio.median <= self.median and (self.bound95 is None or ratio.bound95 <= self.bound95)

    def __str__(self) -> str:
        bound = "" if self.bound95 is None else f", 95 % bound {self.bound95:.2f}x"
        return f"median {self.median:.2f}x{bound}"


@dataclass(frozen=True)
class Case:
    """One comparison, measured: Atoll's time over the rival's, pair by pair."""

    name: str
    rival: str
    workers: int
    threads: int  # of torch, in each worker
    seconds: float  # Atoll's median step
    rival_seconds: float  # the rival's
    ratio: Ratio
    cpu_ratio: float  # of the medians of CPU time, all workers' together: less moved by what else runs
    target: Target | None
    ratios: list[float]

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.target.met_by(self.ratio)

    def line(self) -> str:
        ratio = self.ratio
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        verdict = f"target {self.target}: {'met' if self.met else 'MISSED'}" if self.target else "no target"
        return (
            f"{self.name}, {workers}: {ratio.median:.3f}x of {self.rival} "
            f"(95 % bound {ratio.bound95:.3f}, p10 {ratio.p10:.3f}, p90 {ratio.p90:.3f}, "
            f"{milliseconds(self.seconds)} against {milliseconds(self.rival_seconds)} a step, "
            f"CPU time {self.cpu_ratio:.3f}x, {ratio.pairs} pairs); {verdict}"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met, "ratios": [round(ratio, 4) for ratio in self.ratios]}


def compare(
    name: str,
    rival: str,
    own: Timings,
    other: Timings,
    *,
    workers: int,
    steps: int,
    target: Target | None,
    threads: int,
) -> Case:
    """The case of `own` (Atoll's timings) against `other`, where a measured block is `steps` steps."""
    ratios = np.asarray(own.seconds) / np.asarray(other.seconds)
    return Case(
        name=name,
        rival=rival,
        workers=workers,
        threads=threads,
        seconds=float(np.median(own.seconds)) / steps,
        rival_seconds=float(np.median(other.seconds)) / steps,
        ratio=ratio_of(ratios),
        cpu_ratio=float(np.median(own.cpu_seconds) / np.median(other.cpu_seconds)),
        target=target,
        ratios=ratios.tolist(),
    )


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


# -- writing -----------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the numbers depend on; nothing that names the machine."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": platform.system(),
        "kernel": ".".join(re.findall(r"\d+", platform.release())[:2]),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def write_results(name: str, folder: Path, cases: Sequence[Mapping[str, Any]], quick: bool) -> Path:
    """Write `folder`/`name`.json: the machine, the day, and the cases."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine(),
        "quick": quick,
        "cases": list(cases),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def write_ratios(
    name: str,
    args: argparse.Namespace,
    cases: Sequence[Case],
    title: str,
    records: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Write the results, `records` or else the cases, and beside them a picture of the cases, `name`.png."""
    folder = output_folder(args)
    written = [case.to_json() for case in cases] if records is None else records
    write_results(name, folder, written, quick=args.quick)
    draw_ratios(cases, folder / f"{name}.png", title)


def draw_ratios(cases: Sequence[Case], path: Path, title: str) -> None:
    """A picture of each case's pairs, with 1 (the rival's own time) and the target marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 1.4 + 0.55 * len(cases)), layout="constrained")
    scatter = random.Random(0)
    for row, case in enumerate(reversed(cases)):
        heights = [row + scatter.uniform(-0.25, 0.25) for _ in case.ratios]
        axes.scatter(case.ratios, heights, s=5, color="#9db7d1", linewidths=0, zorder=2)
        axes.hlines(row, case.ratio.p10, case.ratio.p90, color="#2b6ca3", linewidth=2, zorder=3)
        axes.plot(case.ratio.median, row, "o", color="#2b6ca3", markersize=7, zorder=4)
        if case.target is not None:
            axes.vlines(case.target.median, row - 0.32, row + 0.32, color="#c23b22", linewidth=1.5, zorder=3)
    axes.axvline(1.0, color="black", linewidth=1, zorder=1)
    axes.set_yticks(range(len(cases)), [_label(case) for case in reversed(cases)])
    axes.set_ylim(-0.6, len(cases) - 0.4)
    shown = np.concatenate([case.ratios for case in cases])
    low, high = np.quantile(shown, (0.01, 0.99))
    axes.set_xlim(min(low, 0.95) - 0.01, max(high, 1.05) + 0.01)
    axes.set_xlabel("Atoll's time / the rival's, pair by pair\n(bar: p10 to p90, dot: median, red: target)")
    figure.suptitle(title, fontsize=12)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(case: Case) -> str:
    workers = "" if case.workers == 1 else f"{case.workers} workers, "
    return f"{case.name}\n{workers}against {case.rival}"


# -- the command lines -------------------------------------------------------------------------------------


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few pairs only, to see that it works")
    folders = "benchmarks/results, or build/benchmarks with --quick"
    parser.add_argument("--output", type=Path, help=f"folder for the results (default: {folders})")
    return parser


def group_options(description: str | None, sizes: Sequence[int]) -> argparse.ArgumentParser:
    """The same, of a benchmark that runs itself as the workers of groups (`measured_by`)."""
    parser = options(description)
    shown = " ".join(map(str, sizes))
    parser.add_argument(
        "--workers", type=int, nargs="+", default=sizes, help=f"group sizes (default: {shown})"
    )
    parser.add_argument("--work", type=Path, help="be one of the workers, and write timings to this file")
    return parser


def output_folder(args: argparse.Namespace) -> Path:
    chosen: Path | None = args.output
    return chosen or (QUICK_RESULTS if args.quick else RESULTS)
