"""Runs of `atoll run` whose processes a test kills."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Mapping
from typing import Any

import psutil
from run_command import Command, wait_for
from transports import LINK_TABLE

STEADY = """
import time
import torch
import atoll

torch.manual_seed(0)
model = torch.nn.Linear(4, 300)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.join() as session:
    session.prepare(model, optimizer)
    while session.iteration < STEPS:
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
"""


def start(
    command: Command,
    script: str,
    *options: str,
    run: str = "strategy = 'server'",
    workers: int = 2,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    link = LINK_TABLE if "server" in run else ""  # a ring has its own connections
    (command.directory / "atoll.toml").write_text("\n".join(["[run]", run, *options, link]))
    return command.start(script, workers=workers, environment=environment)


def services(command: Command, *words: str) -> list[psutil.Process]:
    """The processes whose command line has all of these words."""
    found = []
    for process in command.alive():
        with contextlib.suppress(psutil.NoSuchProcess):
            if set(words) <= set(process.cmdline()):
                found.append(process)
    return found


def kill(command: Command, *words: str) -> None:
    """kill -9 the one that is there, once it is."""
    wait_for(lambda: services(command, *words), " ".join(words))
    services(command, *words)[0].kill()


def hub_decisions(command: Command) -> list[dict[str, Any]]:
    path = command.directory / "run" / "service" / "decisions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


HUB = ("atoll.cli.hub",)
