"""What the benchmarks of whole runs share: a lab around a run, and the samples/s of its steady state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from atoll.lab.report import RECORD


def in_lab(
    folder: Path, topology: str, configuration: str, command: Sequence[str], deadline: float
) -> dict[str, Any]:
    """Run `command` for each worker of the lab that `topology` describes, under the configuration given.

    Both are files' texts, and are written into `folder`. Gives what lab.json says; the rest of the lab's
    records stays in `folder`/lab. A run that fails, or lasts longer than `deadline` seconds, raises
    SystemExit with what it said.
    """
    (folder / "lab.toml").write_text(topology, encoding="utf-8")
    (folder / "atoll.toml").write_text(configuration, encoding="utf-8")
    lab = [sys.executable, "-m", "atoll.cli.app", "lab", "run", "--directory", "lab", "lab.toml", "--"]
    ended = subprocess.run(
        [*lab, *command],
        cwd=folder,
        env={**os.environ, "ATOLL_CONFIG": str(folder / "atoll.toml"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"status {ended.returncode}\n{configuration}{ended.stdout}\n{ended.stderr}")
    record: dict[str, Any] = json.loads((folder / "lab" / RECORD).read_text(encoding="utf-8"))
    return record


def write_record(record: Any, path: Path) -> None:
    """Write a worker's record, a dataclass, as JSON: there is all of it in `path` or none."""
    path.with_suffix(".new").write_text(json.dumps(asdict(record)), encoding="utf-8")
    path.with_suffix(".new").replace(path)


def steady_rate(
    worker: int, steps: Sequence[float], samples: Sequence[float], window: tuple[float, float]
) -> float:
    """A worker's samples per second between its first and its last step in the window, which ends with
    neither. `steps` says when each was made, `samples` how many each had."""
    begin, end = window
    inside = [number for number, when in enumerate(steps) if begin <= when <= end]
    if len(inside) < 2:
        raise SystemExit(f"worker {worker} made {len(inside)} steps in {end - begin:.1f} s of steady state")
    return sum(samples[number] for number in inside[1:]) / (steps[inside[-1]] - steps[inside[0]])


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
