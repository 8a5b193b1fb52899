"""`atoll run` with real processes: how it ends, what it leaves, and that no process outlives it.

The workers here write a session's events themselves, so that nothing has to import torch but torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

PREAMBLE = """
import os, signal, subprocess, sys, time
from atoll.core.events import Expected, Finished, Logged, Started, StepDone
from atoll.observe.journal import Journal
from atoll.observe.rundir import RunDirectory
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
journal = Journal(RunDirectory.from_environment().journal(RANK))
def say(kind, **fields):
    journal(kind(time=time.time(), worker=RANK, **fields))
    journal.flush()
def step(i):
    say(StepDone, iteration=i, samples=4, seconds=0.01, waiting=0.001, bytes_sent=100)
    say(Logged, iteration=i, weight=4.0, values={"loss": RANK + 1 / i})
say(Started, workers=WORLD, strategy="ring", device="cpu", pid=os.getpid())
"""
FOREVER = """
i = 0
while True:
    i += 1
    step(i)
    time.sleep(0.05)
"""
DEADLINE = 60.0  # seconds; a launch takes about five on a busy machine


class Command:
    """Starts `atoll run` on scripts, and finds whatever it left behind by a mark in the environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._mark = uuid.uuid4().hex
        self.started: list[subprocess.Popen[str]] = []

    def start(self, script: str, *arguments: str, workers: int = 2) -> subprocess.Popen[str]:
        path = self.directory / "train.py"
        path.write_text(PREAMBLE + script)
        options = ["--workers", str(workers), "--set", "run.directory=run"]
        code = "from atoll.cli.app import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "run", *options, "train.py", *arguments],
            cwd=self.directory,
            env={**os.environ, "ATOLL_TEST_MARK": self._mark, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, script: str, *arguments: str, workers: int = 2) -> tuple[int, str, str]:
        """The exit status, stdout and stderr of a run that ends by itself."""
        process = self.start(script, *arguments, workers=workers)
        out, err = process.communicate(timeout=DEADLINE)
        return process.returncode, out, err

    def summary(self) -> dict[str, object]:
        summary: dict[str, object] = json.loads((self.directory / "run" / "summary.json").read_text())
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

    def steps(self) -> int:
        journal = self.directory / "run" / "workers" / "1.jsonl"
        return journal.read_text().count("stepdone") if journal.exists() else 0


def wait_for(condition: Callable[[], object], what: str, deadline: float = DEADLINE) -> None:
    until = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < until, f"waited {deadline:g} s for {what}"
        time.sleep(0.05)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    made = Command(tmp_path)
    yield made
    left = made.alive()
    for process in left:
        process.kill()
    for launched in made.started:
        launched.communicate(timeout=DEADLINE)
    assert not left, f"left behind: {left}"


def test_a_whole_run(command: Command) -> None:
    (command.directory / "beside.py").write_text("WORD = 'found'\n")
    code, out, err = command.run(
        "import beside\n"
        "say(Expected, steps=5)\n"
        "print(RANK, __name__, sys.argv, beside.WORD, os.environ['OMP_NUM_THREADS'])\n"
        "for i in range(1, 6): step(i)\n"
        "say(Finished, iteration=5)\n"
        "print('no end of line', end='')\n",
        "--workers",
        "7",
        "--help",
    )
    assert code == 0, err
    assert out == "0 __main__ ['train.py', '--workers', '7', '--help'] found 1\nno end of line\n"
    assert "5 steps of 40 samples" in err
    run = command.directory / "run"
    assert (run / "logs" / "worker-1.log").read_text().startswith("1 __main__")
    assert "workers = 2" in (run / "config.toml").read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["values"]["loss"] for line in lines] == [pytest.approx(0.5 + 1 / i) for i in range(1, 6)]
    summary = command.summary()
    known = {"strategy": "ring", "workers": 2, "groups": 1, "steps": 5, "samples": 40.0, "bytes_sent": 1000}
    assert {key: summary[key] for key in known} == known
    assert summary["last"] == {"loss": pytest.approx(0.7)}
    assert (run / "report.png").stat().st_size > 0
    assert len(list((run / "tensorboard").iterdir())) == 1


@pytest.mark.parametrize("worker", [0, 1])
def test_the_first_traceback_whole_and_once(command: Command, worker: int) -> None:
    code, out, err = command.run(
        "step(1)\n"
        f"if RANK == {worker}:\n"
        "    print('last words', flush=True)\n"
        "    def inner(): raise ValueError('boom')\n"
        "    try:\n"
        "        inner()\n"
        "    except ValueError as error:\n"
        "        raise KeyError('outer') from error\n"
        "time.sleep(0.3)\n"
        "if RANK != 0: raise RuntimeError('Connection closed by peer')\n" + FOREVER
    )
    assert code == 1
    shown = out + err
    assert shown.count("ValueError: boom") == 1
    assert shown.count("Traceback (most recent call last)") == 2  # the error, and the one that caused it
    assert "runpy" not in shown
    assert "inner()" in shown
    assert "Connection closed" not in shown
    assert f"atoll: worker {worker} ended with KeyError; the workers' logs are in run/logs" in err
    assert ("last words" in out) == (worker == 0)
    assert "last words" in (command.directory / "run" / "logs" / f"worker-{worker}.log").read_text()
    failed = [event for event in command.summary()["events"] if event["event"] == "failed"]  # type: ignore[attr-defined]
    assert failed[0]["worker"] == worker


def test_a_users_mistake_in_the_workers_is_one_line(command: Command) -> None:
    code, out, err = command.run(
        "from atoll.core.errors import PrepareError\nraise PrepareError('weight: shapes differ')\n"
    )
    assert (code, out, err) == (2, "", "atoll: weight: shapes differ\n")


def test_the_scripts_own_exit_status_passes(command: Command) -> None:
    code, _, err = command.run("print('why', RANK)\nif RANK == 1: sys.exit(3)\n" + FOREVER)
    assert code == 3
    assert "why 1\natoll: worker 1 ended with status 3; its log is run/logs/worker-1.log" in err


def test_a_killed_worker_is_named(command: Command) -> None:
    process = command.start(FOREVER)
    wait_for(lambda: command.steps() > 3, "a few steps")
    started = (command.directory / "run" / "workers" / "1.jsonl").read_text().splitlines()[0]
    os.kill(json.loads(started)["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "atoll: worker 1 was killed by SIGKILL" in err
    steps = command.summary()["steps"]
    assert isinstance(steps, int)
    assert steps > 3


def test_ctrl_c_stops_everything_and_leaves_a_summary(command: Command) -> None:
    process = command.start(FOREVER)
    wait_for(lambda: command.steps() > 3, "a few steps")
    assert len(command.alive()) == 4  # the command, the launcher, two workers
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "atoll: stopped by Ctrl-C"
    assert command.alive() == []
    assert command.summary()["last"]


def test_what_will_not_stop_is_killed(command: Command) -> None:
    """Workers that ignore every polite signal, and a child of theirs in a session of its own."""
    process = command.start(
        "for signum in (signal.SIGINT, signal.SIGTERM): signal.signal(signum, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        + FOREVER
    )
    wait_for(lambda: command.steps() > 3 and len(command.alive()) == 6, "workers and their children")
    began = time.monotonic()
    process.terminate()
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 30
    assert command.alive() == []


def test_ctrl_c_while_the_launcher_starts(command: Command) -> None:
    process = command.start(FOREVER)
    wait_for(lambda: len(command.alive()) >= 2, "the launcher")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert command.alive() == []


def test_nothing_outlives_a_command_that_is_killed(command: Command) -> None:
    process = command.start(
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n" + FOREVER
    )
    wait_for(lambda: command.steps() > 3 and len(command.alive()) == 6, "workers and their children")
    process.kill()
    process.communicate(timeout=DEADLINE)
    wait_for(lambda: not command.alive(), "every process to end")


def test_nothing_outlives_a_launcher_that_is_killed(command: Command) -> None:
    process = command.start(FOREVER)
    wait_for(lambda: command.steps() > 3, "a few steps")
    (launcher,) = psutil.Process(process.pid).children()
    launcher.kill()
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "torchrun's launcher was killed by SIGKILL" in err
    assert command.alive() == []
