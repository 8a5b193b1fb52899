"""`atoll run` on a script whose model the workers hold between them, by the `[memory]` of its atoll.toml."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from run_command import DEADLINE, Command, wait_for
from safetensors.torch import load_file

TRAIN = """
import sys
import torch
import atoll
torch.manual_seed(0)
torch.set_num_threads(1)
with atoll.join() as session:
    model = torch.nn.Sequential(*(p for _ in range(6) for p in (torch.nn.Linear(64, 64), torch.nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)
    steps = 1_000_000 if "forever" in sys.argv else 20
    x = torch.randn(8, 64)
    for i in range(steps):
        loss = (model(x) - x.tanh()).square().mean()
        loss.backward()
        session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
    session.save("checkpoint")
    if session.is_main:
        print("weights", sum(p.double().sum().item() for p in model.parameters()))
"""
MEMORY = '[memory]\ndevice = "48KiB"\nchunk = "17KiB"\nstep = "host"\n'  # of 98 KiB of parameters


@pytest.mark.parametrize(
    ("workers", "options"),
    [(2, ()), pytest.param(4, ("--strategy", "hierarchical", "--groups", "2"), marks=pytest.mark.soak)],
)
def test_a_new_user_s_script_trains_sharded_over_its_workers(
    command: Command, workers: int, options: tuple[str, ...]
) -> None:
    (command.directory / "atoll.toml").write_text(MEMORY)
    code, out, err = command.run(TRAIN, workers=workers, options=options)
    assert code == 0, err
    lines = (command.directory / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["values"]["loss"] for line in lines]
    assert losses[-1] < 0.7 * losses[0]
    summary = command.summary()
    assert [each["worker"] for each in summary["memory"]] == list(range(workers))
    for each in summary["memory"]:
        assert 0 < each["device_peak"] <= each["device_budget"] == 48 * 2**10
        assert each["moves"]["from_members"] > 0
        assert 0 < each["host_peak"] < 4 * 98 * 2**10  # alone: 4 times the parameters, with AdamW
    (decided,) = [event for event in summary["events"] if event.get("what") == "memory"]
    assert "device 48.0 KiB" in decided["choice"]
    assert ("over the members of each of 2 groups" in decided["reason"]) == bool(options)
    saved = load_file(command.directory / "checkpoint" / "model.safetensors")
    expected = sum(value.double().sum().item() for value in saved.values())
    assert float(out.split()[1]) == pytest.approx(expected, abs=1e-12)
    assert all(bool(torch.isfinite(value).all()) for value in saved.values())


@pytest.mark.soak
def test_budgets_and_a_run_that_goes_on_without_a_worker_are_refused_in_a_line(command: Command) -> None:
    (command.directory / "atoll.toml").write_text("[run]\nelastic = true\n" + MEMORY)
    code, _, err = command.run(TRAIN)
    assert code != 0
    assert "leave out run.elastic, or the budgets" in err
    assert "Traceback" not in err


@pytest.mark.soak
def test_a_worker_that_is_killed_ends_the_run_in_a_line(command: Command) -> None:
    """What it held is in nobody's memory else."""
    (command.directory / "atoll.toml").write_text(MEMORY + '[sync]\ntimeout = "30s"\n')
    process = command.start(TRAIN, "forever", workers=3)
    wait_for(lambda: command.steps() > 3, "worker 1 to train")
    os.kill(command.worker_pid(1), signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "worker 1" in err
    assert "SIGKILL" in err
    assert "Traceback" not in err
