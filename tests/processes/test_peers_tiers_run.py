"""Nodes under budgets from `atoll run`: one is killed and comes back, and what is saved is plain."""

from __future__ import annotations

import json

import pytest
import torch
from run_command import Command, wait_for
from safetensors.torch import load_file
from test_peers_devices_run import worker_of
from test_peers_run import SCRIPT, is_back, nodes_of, steps
from torch import nn

import atoll
from atoll.core.config import Config
from atoll.train.api.place import Place

LAYERS = "torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)"
WIDE = "torch.nn.Linear(8, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64), torch.nn.Linear(64, 1)"
TOML = """
[run]
strategy = "peers"
restarts = 1
[sync]
timeout = "100s"
[memory]
device = "36KiB"
chunk = "4KiB"
"""


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 64), nn.Linear(64, 1))


@pytest.mark.soak
@pytest.mark.parametrize("devices", [1, 2])
def test_a_node_under_a_budget_is_killed_and_comes_back(command: Command, devices: int) -> None:
    path = command.directory / "peers.toml"
    path.write_text(TOML + ("[groups]\ncount = 3\n" if devices > 1 else ""))
    assert LAYERS in SCRIPT
    script = SCRIPT.replace(LAYERS, WIDE)
    workers = 3 * devices
    environment = {"ATOLL_CONFIG": str(path), "ATOLL_POISON": "1"}
    launched = command.start(script, workers=workers, environment=environment)
    wait_for(lambda: min(steps(command, worker) for worker in range(workers)) > 8, "the first iterations")
    first = nodes_of(command)[1] if devices == 1 else worker_of(command, devices)
    first.kill()  # node 1's first worker
    wait_for(lambda: is_back(command, devices), "node 1 to come back")
    so_far = steps(command, devices)
    wait_for(lambda: steps(command, devices) > so_far + 8, "node 1 to train on")
    (command.directory / "stop").touch()
    out, err = launched.communicate(timeout=100)
    assert launched.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("HELD ")]
    everyone = json.loads(line.removeprefix("HELD "))
    assert [worker for worker, *_ in everyone] == list(range(workers))
    assert [begun > 8 for _, begun, *_ in everyone] == [worker // devices == 1 for worker in range(workers)]
    assert len({(iteration, epoch, held) for _, _, iteration, epoch, held in everyone}) == 1
    figures = command.summary()["memory"]
    assert len(figures) == workers
    for each in figures:
        assert 0 < each["device_peak"] <= each["device_budget"] == 36 * 1024
        assert each["steps"] > 16
    saved = command.directory / "saved"
    build().load_state_dict(load_file(saved / "model.safetensors"))
    with atoll.join(Config(), place=Place()) as session:  # without budgets, alone
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step)
        session.prepare(model, optimizer)
        session.load(saved)
        assert scheduler.last_epoch == session.iteration == everyone[0][2]
        model(torch.ones(2, 8)).mean().backward()
        optimizer.step()
