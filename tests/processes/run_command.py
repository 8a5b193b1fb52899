"""Starts `atoll run` on a script as a user would, and finds whatever it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

DEADLINE = 120.0  # seconds; a launch takes about five, and much longer on a busy machine


class Command:
    """Starts `atoll run` on scripts, and finds whatever it left behind by a mark in the environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._mark = uuid.uuid4().hex
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self,
        script: str,
        *arguments: str,
        workers: int = 2,
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        output: int = subprocess.PIPE,
        errors: int = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """`output` and `errors` are descriptors."""
        path = self.directory / "train.py"
        path.write_text(script)
        options = ["--workers", str(workers), "--set", "run.directory=run", *options]
        code = "from atoll.cli.app import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "run", *options, "train.py", *arguments],
            cwd=self.directory,
            env={**os.environ, "ATOLL_TEST_MARK": self._mark, "OMP_NUM_THREADS": "1", **(environment or {})},
            stdout=output,
            stderr=errors,
            text=True,
        )
        self.started.append(process)
        return process

    def run(
        self,
        script: str,
        *arguments: str,
        workers: int = 2,
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> tuple[int, str, str]:
        """The exit status, stdout and stderr of a run that ends by itself."""
        process = self.start(script, *arguments, workers=workers, environment=environment, options=options)
        out, err = process.communicate(timeout=DEADLINE)
        return process.returncode, out, err

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.directory / "run" / "summary.json").read_text())
        return summary

    def alive(self) -> list[psutil.Process]:
        """The processes that carry the mark, zombies left out."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get("ATOLL_TEST_MARK") == self._mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def worker_pid(self, rank: int) -> int:
        """The process of a worker that has joined the run, in its first life."""
        journal = self.directory / "run" / "workers" / f"{rank}.jsonl"
        events = (json.loads(line) for line in journal.read_text().splitlines())
        return int(next(event["pid"] for event in events if event["event"] == "started"))

    def steps(self) -> int:
        journal = self.directory / "run" / "workers" / "1.jsonl"
        return journal.read_text().count("stepdone") if journal.exists() else 0


def cause_of(err: str) -> str:
    """The line on the first cause: the command's last, or the one before what followed from the cause."""
    lines = err.splitlines()
    return lines[-2] if lines[-1].startswith("atoll: then ") else lines[-1]


def wait_for(condition: Callable[[], object], what: str, deadline: float = DEADLINE) -> None:
    until = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < until, f"waited {deadline:g} s for {what}"
        time.sleep(0.05)
