"""`atoll run` with a strategy of another package, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from run_command import DEADLINE, Command, wait_for

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT / "tests" / "packages"), str(ROOT / "examples")])

# Workers wait in the middle for one more life to join, and make 20 steps with it; they could be done before.
TRAINS = """
import pathlib, os, time
import torch
import atoll
from gpt import GPT, loss_of

torch.manual_seed(0)
model = GPT(layers=1, heads=2, width=16, context=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
decisions, last = pathlib.Path("run/service/decisions.jsonl"), pathlib.Path("last")
with atoll.join() as session:
    session.prepare(model, optimizer)
    first = session.resume()
    while not last.exists() or session.iteration < int(last.read_text()):
        start = torch.randint(0, 24, (2, 1), generator=torch.Generator().manual_seed(session.iteration))
        loss = loss_of(model, (start + session.rank + torch.arange(9)) % 24)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
        while session.iteration == 40 and decisions.read_text().count('"worker joined"') <= WORKERS:
            time.sleep(0.02)
        if session.rank == 0 and session.iteration > 40 and session.world == WORKERS and not last.exists():
            pathlib.Path("next").write_text(str(session.iteration + 20))
            os.replace("next", last)
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = session.gather(values)
    firsts = session.gather(first)
    if session.is_main:
        print("apart by", max(float((each - everyone[0]).abs().max()) for each in everyone), "firsts", firsts)
"""


@pytest.mark.parametrize("groups", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_worker_that_is_killed_comes_back_with_a_living_ones_values(command: Command, groups: int) -> None:
    """With two replicas and an exchange after each step, all are equal in the end."""
    (command.directory / "atoll.toml").write_text(
        f"[run]\nstrategy = 'pairs'\nelastic = true\nrestarts = 1\n[hub]\npatience = '5s'\n"
        f"[groups]\ncount = {groups}\n[chunks]\nsize = '16KiB'\n"
    )
    workers = 4 if groups else 2
    script = TRAINS.replace("WORKERS", str(workers))
    process = command.start(script, workers=workers, environment={"PYTHONPATH": PATH})
    wait_for(lambda: command.steps() > 3, "a few steps")
    os.kill(command.worker_pid(1), signal.SIGKILL)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "worker 1 was killed by SIGKILL, and is started again (1 of 1)" in err
    assert "contributors: 2 train replicas: " in err
    (said,) = [line for line in out.splitlines() if line.startswith("apart by")]
    assert said.startswith("apart by 0.0 firsts [0, "), said
    # The newcomer went on where the others were.
    assert max(json.loads(said.partition("firsts ")[2])) > 3, said
    assert command.summary()["steps"] == int((command.directory / "last").read_text())


def test_a_strategy_that_no_package_has_is_refused_in_one_line(command: Command) -> None:
    code, _, err = command.run("", options=["--strategy", "pars"], environment={"PYTHONPATH": PATH})
    assert code == 2
    assert err == (
        "atoll: --strategy pars: no such choice 'pars'; did you mean 'pairs'? (one of: ring, server, "
        "hierarchical, ps-hra, peers, own, pairs, pairs-of-8)\n"
    )
