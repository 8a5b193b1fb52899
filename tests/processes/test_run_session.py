"""`atoll run` over real sessions: two workers that train a small model together."""

from __future__ import annotations

import json
import signal

import pytest
from run_command import DEADLINE, Command, wait_for

TRAIN = """
import sys, time
import torch
import atoll
torch.manual_seed(0)
torch.set_num_threads(1)
with atoll.join() as session:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    steps = 1_000_000 if "forever" in sys.argv else 20
    session.expect(steps)
    x = torch.randn(8, 4)
    for i in range(1, steps + 1):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if i == 5 and session.rank == 1 and "fail" in sys.argv:
            raise ValueError("boom")
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
        if "forever" in sys.argv:
            time.sleep(0.01)
    print("weights", model.weight.sum().item())
"""


def test_a_run_trains_and_leaves_its_records(command: Command) -> None:
    code, out, err = command.run(TRAIN)
    assert code == 0, err
    assert out.startswith("weights ")
    lines = [
        json.loads(line) for line in (command.directory / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["iteration"] for line in lines] == list(range(1, 21))
    assert all(line["samples"] == 16 and line["bytes_sent"] > 0 for line in lines)
    losses = [line["values"]["loss"] for line in lines]
    assert losses[-1] < 0.5 * losses[0]
    summary = command.summary()
    assert (summary["steps"], summary["samples"], summary["workers"]) == (20, 320.0, 2)
    assert summary["last"] == {"loss": losses[-1]}
    assert 0 < summary["seconds_waiting"] < summary["seconds"]
    assert {event["what"] for event in summary["events"] if event["event"] == "decided"} >= {"chunks", "ring"}


@pytest.mark.soak
def test_a_failing_worker_is_shown_once_and_the_other_ends_too(command: Command) -> None:
    code, out, err = command.run(TRAIN, "fail")
    assert code == 1
    assert (out + err).count("Traceback (most recent call last)") == 1
    assert "ValueError: boom\natoll: worker 1 ended with ValueError" in err
    assert command.summary()["steps"] in (4, 5)  # worker 0 may have its mean already
    assert command.alive() == []


@pytest.mark.parametrize("served", [pytest.param(False, marks=pytest.mark.soak), True])
def test_ctrl_c_in_the_middle_of_training(command: Command, served: bool) -> None:
    if served:  # hub, and a shard and its standby, too
        (command.directory / "atoll.toml").write_text("[run]\nstrategy = 'server'\n[server]\nreplicas = 2\n")
    process = command.start(TRAIN, "forever")
    wait_for(lambda: command.steps() > 20, "some steps")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "atoll: stopped by Ctrl-C"
    assert not [word for word in ("Traceback", "atoll: hub:", "lost", "output:") if word in err]
    assert command.alive() == []
    assert command.summary()["steps"] > 10
