"""A script that never closes its session: its records are whole, and a line says how to close it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_command import DEADLINE, Command

SCRIPT = """
import os, sys
import torch
import atoll
session = atoll.join()
model = torch.nn.Linear(4, 1)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(20):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
if "no threads" in sys.argv:  # as Python 3.12 and later have it at a process's end
    import atexit, threading
    def refuse(_thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    atexit.register(setattr, threading.Thread, "start", refuse)
if "raise" in sys.argv:
    raise KeyError("a mistake")
if "exit" in sys.argv:
    sys.exit(3)
"""
LINE = "has not closed its session"


@pytest.mark.parametrize(
    ("strategy", "how"), [("ring", ""), ("server", ""), ("peers", ""), ("ring", "no threads")]
)
def test_its_records_are_whole(command: Command, strategy: str, how: str) -> None:
    status, _, err = command.run(SCRIPT, how, options=["--set", f"run.strategy={strategy}"])
    assert status == 0, err
    assert "Traceback" not in err
    for log in (command.directory / "run" / "logs").glob("worker-*.log"):
        assert "Traceback" not in log.read_text()
    assert err.count(LINE) == 1
    assert (command.summary()["steps"], command.summary()["samples"]) == (20, 120.0)


@pytest.mark.parametrize("strategy", ["ring", "server"])
def test_an_error_is_told_alone(command: Command, strategy: str) -> None:
    status, _, err = command.run(SCRIPT, "raise", options=["--set", f"run.strategy={strategy}"])
    assert status == 1
    assert LINE not in err
    assert "ended with KeyError at train.py:" in err
    assert command.summary()["steps"] == 20


def test_a_status_of_its_own_is_told_last(command: Command) -> None:
    status, _, err = command.run(SCRIPT, "exit")
    assert status == 3
    assert err.count(LINE) == 1
    assert err.index(LINE) < err.index("ended with status 3 (sys.exit at train.py:")


def test_a_worker_alone_has_nobody_to_wait_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert done.stderr == ""
