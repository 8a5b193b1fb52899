"""What benchmarks share that start runs of their own: a command to its end, and what its workers recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(
    name: str, command: Sequence[str], seconds: float, folder: Path | None = None, **environment: str
) -> str:
    """Run a command (in `folder`) with one torch thread a process; what it said on stderr. The benchmark
    ends if the command fails, with all that `name`'s run said."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"{name}: status {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    return ended.stderr


def run_in_lab(name: str, worker: Path, plan: Any, folder: Path, seconds: float) -> None:
    """Run a worker's file with its plan (a dataclass) in the lab of `folder`/lab.toml, whose configuration is
    `folder`/atoll.toml. The lab leaves `folder`/lab."""
    lab = [sys.executable, "-m", "atoll.cli.app", "lab", "run", "--directory", "lab", "lab.toml", "--"]
    command = [*lab, sys.executable, str(worker), str(folder), json.dumps(asdict(plan))]
    run_to_end(name, command, seconds, folder, ATOLL_CONFIG=str(folder / "atoll.toml"))


def write_record(folder: Path, rank: int, record: Any) -> None:
    """What a worker recorded (a dataclass), whole or not at all."""
    path = folder / f"{rank}.json"
    path.with_suffix(".new").write_text(json.dumps(asdict(record)), encoding="utf-8")
    path.with_suffix(".new").replace(path)


def read_records(folder: Path, kind: type[T], workers: int) -> list[T]:
    """The workers' records, by rank."""
    return [
        kind(**json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))) for rank in range(workers)
    ]


def rate_of(
    rank: int, steps: Sequence[float], samples: int | Sequence[int], begin: float, end: float
) -> float:
    """Samples per second of a worker, whose steps of so many (each, or of all alike) ended at these times,
    between the first and the last of them in the window, which ends with neither."""
    inside = [number for number, when in enumerate(steps) if begin <= when <= end]
    if len(inside) < 2:
        raise SystemExit(f"worker {rank} made {len(inside)} steps in {end - begin:.1f} s of steady state")
    each = [samples] * len(steps) if isinstance(samples, int) else samples
    made = sum(each[number] for number in inside[1:])
    return made / (steps[inside[-1]] - steps[inside[0]])


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """The ratios of the rounds, in numbers."""
    return {"median": median(ratios), "least": min(ratios), "most": max(ratios), "rounds": len(ratios)}


def time_to(curve: Sequence[tuple[float, float]], loss: float) -> float | None:
    """When a held-out loss of at most `loss` is first reached, and the mean of the rest is no worse."""
    for place, (when, reached) in enumerate(curve):
        rest = [value for _, value in curve[place:]]
        if reached <= loss and sum(rest) / len(rest) <= loss:
            return when
    return None
