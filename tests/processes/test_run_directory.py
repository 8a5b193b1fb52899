"""`atoll run` in a run directory: one run at a time, and durations that no wall clock changes."""

from __future__ import annotations

import json

from run_command import DEADLINE, Command, wait_for

AHEAD = """
import os, pathlib, time
if os.environ["RANK"] == "1":
    now = time.time
    time.time = lambda: now() + 3600.0
import torch
import atoll

model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.join() as session:
    session.prepare(model, optimizer)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        session.log(loss=1.0)
        pathlib.Path("going").touch()
        while step == 3 and not pathlib.Path("enough").exists():
            time.sleep(0.02)
"""


def test_a_second_run_is_refused_and_a_worker_an_hour_ahead_changes_no_duration(command: Command) -> None:
    first = command.start(AHEAD)
    wait_for(lambda: (command.directory / "going").exists(), "the first steps")
    status, out, err = command.run(AHEAD)
    assert (status, out) == (2, "")
    assert err == (
        f"atoll: run: a run is at work there (process {first.pid}); wait for its end, or give another "
        "run.directory\n"
    )
    (command.directory / "enough").touch()
    out, err = first.communicate(timeout=DEADLINE)
    assert first.returncode == 0, err
    summary = command.summary()
    assert summary["steps"] == 8
    assert summary["seconds"] < DEADLINE
    assert "8 steps of 48 samples in" in err
    assert " h " not in err.partition("8 steps")[2].splitlines()[0]
    lines = [
        json.loads(line) for line in (command.directory / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["iteration"] for line in lines] == list(range(1, 9))
    assert max(line["time"] for line in lines) - min(line["time"] for line in lines) < DEADLINE
