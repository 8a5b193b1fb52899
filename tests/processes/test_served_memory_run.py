"""`atoll run --strategy server` on a script whose model lies in tiers on each worker, by `[memory]`."""

from __future__ import annotations

import contextlib
import json
import os
import signal

import psutil
import pytest
import torch
from run_command import DEADLINE, Command, wait_for
from safetensors.torch import load_file

TRAIN = """
import sys, time
import torch
import atoll
torch.manual_seed(0)
torch.set_num_threads(1)
with atoll.join() as session:
    model = torch.nn.Sequential(*(p for _ in range(6) for p in (torch.nn.Linear(64, 64), torch.nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)
    session.resume()
    x = torch.randn(8, 64)
    while session.iteration < 20:
        for micro in range(2):
            if micro:
                loss = (model(x) - x.tanh()).square().mean()
                loss.backward()
            else:
                with session.no_sync():
                    (model(x) * 0.0).sum().backward()
        session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        session.log(loss=loss)
        if "slowly" in sys.argv:
            time.sleep(0.1)
    session.save("checkpoint")
    if session.is_main:
        print("weights", sum(p.double().sum().item() for p in model.parameters()))
"""
# Of 98 KiB of parameters, and as much of gradients.
MEMORY = '[memory]\ndevice = "48KiB"\nchunk = "17KiB"\nstep = "host"\nhost = "340KiB"\ndisk = "disk:4MiB"\n'
SERVED = '[run]\nstrategy = "server"\nshards = 2\nrestarts = 2\n[chunks]\nsize = "20KiB"\n'


def configure(command: Command, consistency: str, strategy: str = "server") -> None:
    (command.directory / "disk").mkdir()
    served = SERVED.replace("server", strategy)
    if strategy == "ps-hra":
        served += "[groups]\ncount = 1\nprobe = 3\n"
    sync = f'[sync]\nconsistency = "{consistency}"\ntimeout = "60s"\n'
    (command.directory / "atoll.toml").write_text(served + sync + MEMORY)


def check(command: Command, out: str) -> None:
    """What a run leaves behind that went to its end."""
    lines = (command.directory / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["values"]["loss"] for line in lines]
    assert losses[-1] < 0.7 * losses[0]
    summary = command.summary()
    for each in summary["memory"]:
        assert 0 < each["device_peak"] <= each["device_budget"] == 48 * 2**10
        assert 0 < each["host_peak"] <= each["host_budget"] == 340 * 2**10
        assert each["moves"]["to_device"] > 0
    decided = [event for event in summary["events"] if event.get("what") == "memory"]
    assert decided
    assert "device 48.0 KiB, host 340.0 KiB" in decided[0]["choice"]
    saved = load_file(command.directory / "checkpoint" / "model.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in saved.values())
    expected = sum(value.double().sum().item() for value in saved.values())
    assert float(out.split()[1]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.soak
def test_a_script_trains_in_tiers_on_each_worker(command: Command) -> None:
    configure(command, "bsp")
    code, out, err = command.run(TRAIN)
    assert code == 0, err
    check(command, out)
    assert [each["worker"] for each in command.summary()["memory"]] == [0, 1]


@pytest.mark.soak
@pytest.mark.parametrize("consistency", ["asp", "bsp"])
def test_a_script_trains_in_tiers_in_a_group(command: Command, consistency: str) -> None:
    configure(command, consistency, "ps-hra")
    code, out, err = command.run(TRAIN, "slowly")
    assert code == 0, err
    check(command, out)
    assert [grouping["groups"] for grouping in command.summary()["groupings"]][-1] == [[0, 1]]


@pytest.mark.soak
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_worker_that_is_killed_comes_back_to_its_tiers(command: Command, consistency: str) -> None:
    configure(command, consistency)
    process = command.start(TRAIN, "slowly", workers=2)
    wait_for(lambda: command.steps() > 3, "worker 1 to train")
    with contextlib.suppress(psutil.NoSuchProcess):
        os.kill(command.worker_pid(1), signal.SIGKILL)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    check(command, out)
