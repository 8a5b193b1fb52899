"""The wall clock is set forward and back by an hour while a run trains: nothing changes, under any strategy.

Each process of the run reads it through Python. What C++ reads is the kernel's, which is everybody's.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from endings import STRATEGIES, TOGETHER
from forked_runs import forked_run

from atoll.core.events import StepDone
from atoll.observe.journal import JournalReader

DEADLINE = 240.0
STEPS = 40
HOUR = 3600
TIERS = ("memory.device=24KiB", "memory.chunk=4096", "memory.step=host")
KINDS = {
    **STRATEGIES,
    "replicas": ("run.strategy=server", "sync.consistency=bsp", "server.replicas=2"),
    "tiers": ("run.strategy=ring", *TIERS),
    "peers tiers": ("run.strategy=peers", *TIERS),
}
ALIVE = (*TOGETHER, "tiers")  # no worker of these may die alone
SCRIPT = f"""
import os, signal, sys, time
import torch, atoll
from torch import nn
rank = int(os.environ.get("ATOLL_RANK") or os.environ["RANK"])
model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first, hours = time.time(), set()
with atoll.join() as session:
    session.prepare(model, optimizer)
    while session.iteration < {STEPS}:
        if "dies" in sys.argv and rank == 1 and session.iteration == 10: os.kill(os.getpid(), signal.SIGKILL)
        hours.add(round((time.time() - first) / {HOUR}))
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.03)
print("hours", len(hours) > 1, flush=True)
"""


def set_clocks() -> None:
    """Make the wall clock an hour late and an hour early in turn, each for a quarter of a second."""
    seconds, nanoseconds = time.time, time.time_ns

    def off() -> int:
        return HOUR if int(4 * time.monotonic()) % 2 else -HOUR

    vars(time).update(time=lambda: seconds() + off(), time_ns=lambda: nanoseconds() + off() * 10**9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path, kind: str) -> None:
    """Where a worker may die alone one does: a death is found as ever, and nobody else is given up."""
    (tmp_path / "train.py").write_text(SCRIPT)
    given = (*KINDS[kind], "run.workers=2", "run.directory=run", "sync.timeout=60s")
    options = [part for each in given for part in ("--set", each)]
    dies = [] if kind in ALIVE else ["dies"]
    code, out, err = forked_run(tmp_path, [*options, "train.py", *dies], DEADLINE, set_clocks)
    assert code == 0, err
    assert "hours True" in out
    lost = "worker 1 was killed by SIGKILL; the others go on without it"
    assert err.count("the others go on without it") == len(dies), err
    assert (lost in err) == bool(dies), err
    assert "Traceback" not in err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    events = JournalReader(tmp_path / "run" / "workers" / "0.jsonl").read()
    made = [event.iteration for event in events if isinstance(event, StepDone)]
    assert made[-1] == STEPS
    assert summary["steps"] == len(made)
    # Who is in a group with one that is further goes on from there.
    assert len(made) == STEPS or kind == "ps-hra"
    assert summary["seconds"] < DEADLINE
