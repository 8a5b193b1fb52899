"""Training over the loss-tolerant transport while its link is bad: losses, outages, changes, a rival flow."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections import defaultdict
from typing import Any

import psutil
import pytest
from lab_command import Labs

LINK = """
seed = 3
[[site]]
name = "paris"
[[site]]
name = "berlin"
[[link]]
between = ["paris", "berlin"]
rate = "50Mbit/s"
delay = "20ms"
queue = "40ms"
loss = 0.03
burst = 8
"""
HUB = """
[hub]
site = "paris"
shards = 1
patience = "60s"
"""
CONFIG = """
[run]
strategy = "server"
[sync]
timeout = "60s"
[link]
transport = "ltp"
"""
TRAIN = """
import json, os, socket, sys, threading, time
import torch, atoll
from torch import nn

folder, first = sys.argv[1:3]
seconds, steps, rival = map(float, sys.argv[3:])
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 400), nn.Tanh(), nn.Linear(400, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
wanted = nn.Sequential(nn.Linear(64, 400), nn.Tanh(), nn.Linear(400, 64)).requires_grad_(False)
over = threading.Event()

def flows(rank):  # TCP beside it, the same way as the gradients
    if rank == 0:
        with socket.create_server((first, 7100)) as server:
            server.settimeout(rival + 120)
            stream, _ = server.accept()
            with stream:
                stream.settimeout(120)
                while stream.recv(65536): pass
        return
    over.wait(rival)
    with socket.create_connection((first, 7100), timeout=60) as stream:
        stream.settimeout(60)
        until = time.monotonic() + rival / 2
        while time.monotonic() < until and not over.is_set():
            stream.sendall(bytes(65536))

with atoll.join() as session:
    session.prepare(model, optimizer)
    if rival:
        flow = threading.Thread(target=flows, args=(session.rank,), daemon=True)
        flow.start()
    torch.manual_seed(session.rank)
    began, losses, longest, last = time.monotonic(), [], 0.0, time.monotonic()
    while True:
        inputs = torch.randn(32, 64)
        loss = nn.functional.mse_loss(model(inputs), wanted(inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        losses.append(float(loss.detach()))
        if session.iteration == steps:
            break
        if seconds and session.iteration % 20 == 0 and session.reduce(now - began, "max") > seconds:
            break
    over.set()
    if rival:
        flow.join(60)
    digest = sum(float(p.detach().double().sum()) for p in model.parameters())
    with open(f"{folder}/{session.rank}.json", "w") as out:
        json.dump({"steps": session.iteration, "longest": longest, "losses": losses, "digest": digest}, out)
"""


def train(
    labs: Labs, link: str, *, seconds: float = 0.0, steps: int = 0, rival: float = 0.0
) -> tuple[list[dict[str, Any]], str]:
    """What the two workers wrote at their end, after so many seconds or steps, and what the lab said; `rival`
    seconds after the start a TCP flow begins, for half as long."""
    (labs.directory / "atoll.toml").write_text(CONFIG)
    ends = [str(seconds), str(steps), str(rival)]
    command = labs.python(TRAIN, str(labs.directory), "{first}", *ends, name="endure")
    process = labs.start(command, link + HUB, ATOLL_CONFIG=str(labs.directory / "atoll.toml"))
    watch = Watch()
    while process.poll() is None:
        watch.look(labs)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2.0)
    status, out, err = labs.end(process)
    assert status == 0, out + err
    assert labs.left() == []
    watch.check()
    found = [json.loads((labs.directory / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0]["steps"] == found[1]["steps"]
    assert found[0]["digest"] == found[1]["digest"], "both workers have the same parameters, to the bit"
    return found, out


class Watch:
    """What the run's processes hold, over time."""

    def __init__(self) -> None:
        self.held: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.names: dict[int, str] = {}

    def look(self, labs: Labs) -> None:
        for process in labs.alive():
            try:
                line = " ".join(process.cmdline())
                if re.search(r"endure|server --|hub --", line):
                    self.names[process.pid] = line[-60:]
                    told = process.num_fds(), process.num_threads(), process.memory_info().rss
                    self.held[process.pid].append(told)
            except psutil.NoSuchProcess:
                continue

    def check(self) -> None:
        """From the middle of the run to its end nobody has come to hold more."""
        for pid, held in self.held.items():
            if len(held) < 20:
                continue  # too short a life to tell
            middle, end = held[len(held) // 2 : -5], held[-5:]
            files, threads, memory = (max(each) for each in zip(*middle, strict=True))
            late = [min(each) for each in zip(*end, strict=True)]
            assert late[0] <= files, (self.names[pid], held)
            assert late[1] <= threads, (self.names[pid], held)
            assert late[2] <= 1.1 * memory, (self.names[pid], held)


@pytest.mark.soak
def test_training_over_a_link_that_loses_in_bursts(labs: Labs) -> None:
    """Keys, hub, shard, and datagrams of which 3 % are lost, in bursts of 8."""
    (found, _), out = train(labs, LINK, steps=40)
    assert sum(found["losses"][-5:]) < 0.9 * sum(found["losses"][:5])
    assert re.search(r"lost \d{2,} of \d+ packets \([1-9]", out), out


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_minutes_on_a_bad_link(labs: Labs) -> None:
    """An outage of 20 s, rates from 10 to 100 Mbit/s, other delays, more loss, and TCP beside it."""
    changes = "".join(
        f'[[link.change]]\nat = "{at}s"\n{what}\n'
        for at, what in [
            (60, 'rate = "10Mbit/s"'),
            (120, 'rate = "100Mbit/s"'),
            (180, 'delay = "75ms"'),
            (240, "loss = 0.1"),
            (300, 'loss = 0.0\nburst = 1\ndelay = "20ms"'),
            (420, 'rate = "50Mbit/s"\nloss = 0.03\nburst = 8'),
        ]
    )
    outage = '[[link.outage]]\nat = "500s"\nfor = "20s"\n'
    (found, _), out = train(labs, LINK + changes + outage, seconds=600.0, rival=330.0)
    assert 20.0 < found["longest"] < 30.0, found["longest"]
    print(f"{out}\n{found['steps']} iterations, the longest {found['longest']:.1f} s")
