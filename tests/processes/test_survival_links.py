"""A worker under `bsp` whose connections break: with its process, or without it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from forked_script import ForkedScript
from hub_parts import DEADLINE, Forwarder, HubProcess, wait_for

from atoll.core.config import HUB_VARIABLE, RANK_VARIABLE

NOTICED = 3.0  # seconds; before connections were looked at, it was more than 3.2 from the death on

SHARD = """
import sys
from atoll.server.main import serve
from atoll.server.options import ServerOptions
serve(ServerOptions(hub=sys.argv[1], shard=0, listen=sys.argv[2], run="r", directory="shard"))
"""

# Notes the time of each step. The hub tells all the same address of the shard: who is to go through another
# door has it in its environment.
WORKER = """
import os, sys, time
import torch
import atoll
from atoll.core.config import Config, Run, Sync
from atoll.train.members.hub_client import HubClient

if door := os.environ.get("SHARD_DOOR"):
    HubClient.shards = lambda hub: [door]
    HubClient.where_shards_are = lambda hub: [door]

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 300)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
config = Config(run=Run(strategy="server"), sync=Sync(timeout="60s"))
with atoll.join(config) as session, open(f"steps-{session.rank}", "w", buffering=1) as steps:
    session.prepare(model, optimizer)
    while not os.path.exists("enough"):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        print(time.monotonic(), file=steps)
        time.sleep(0.02)
        if session.reduce(float(os.path.exists("enough")), "max"):
            break
"""


def unused_port() -> int:
    """One below those that a kernel gives to connections, which could have it before the shard does."""
    while True:
        port = random.randrange(15_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Training:
    """A hub, a shard and three workers, each a process. Worker 1 comes to hub and shard through two doors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hub = HubProcess(folder / "hub", workers=3)
        self.hub_door = Forwarder(self.hub.address)
        own = f"tcp://127.0.0.1:{unused_port()}"
        self.shard_door = Forwarder(own)
        self._shard = self._start("shard", SHARD, self.hub.address, own)
        self.workers = [self._worker(rank) for rank in range(3)]

    def _start(self, name: str, source: str, *arguments: str, **environment: str) -> ForkedScript:
        kind = name.partition("-")[0]  # all workers run one script, as calls of a session meet from one line
        script = self.folder / f"{kind}.py"
        script.write_text(source)
        log = self.folder / f"{name}.log"
        own = {**os.environ, **environment}
        return ForkedScript(script, *arguments, folder=self.folder, environment=own, log=log)

    def _worker(self, rank: int) -> ForkedScript:
        doors = {HUB_VARIABLE: self.hub_door.address, "SHARD_DOOR": self.shard_door.address}
        place = doors if rank == 1 else {HUB_VARIABLE: self.hub.address}
        return self._start(f"worker-{rank}", WORKER, **{RANK_VARIABLE: str(rank), **place})

    def times(self, rank: int) -> list[float]:
        path = self.folder / f"steps-{rank}"
        return [float(line) for line in path.read_text().splitlines()] if path.exists() else []

    def goes_on(self, *ranks: int) -> None:
        """Wait until these have made ten more steps."""
        many = {rank: len(self.times(rank)) + 10 for rank in ranks}
        what = f"steps of {ranks}"
        try:
            wait_for(lambda: all(len(self.times(rank)) >= many[rank] for rank in ranks), what)
        except AssertionError as error:
            said = [process.said for process in (self._shard, *self.workers)]
            raise AssertionError("\n".join([str(error), *said])) from None

    def deaths(self) -> list[str]:
        return [f"{each.choice}: {each.reason}" for each in self.hub.decisions("worker died")]

    def close(self) -> None:
        for process in (*self.workers, self._shard):
            process.kill()
            process.wait(DEADLINE)
        self.hub.close()
        self.hub_door.close()
        self.shard_door.close()


def test_a_door_passes_on_who_comes_after_one_that_found_nobody() -> None:
    """A worker that comes before the shard listens must not shut it for all."""
    port = unused_port()
    door = Forwarder(f"tcp://127.0.0.1:{port}")
    at = "127.0.0.1", int(door.address.rpartition(":")[2])
    with socket.create_connection(at, DEADLINE) as early:
        assert early.recv(1) == b"", "nobody is there"
    with socket.create_server(("127.0.0.1", port)) as shard:
        shard.settimeout(DEADLINE)
        with socket.create_connection(at, DEADLINE) as late:
            late.sendall(b"x")
            with shard.accept()[0] as there:
                there.settimeout(DEADLINE)
                assert there.recv(1) == b"x"
    door.close()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    yield made
    made.close()


def longest(times: list[float], since: float) -> float:
    """The longest pause between two steps of which the second was after `since`."""
    return max(later - max(earlier, since) for earlier, later in pairwise(times) if later > since)


def test_the_others_go_on_within_two_seconds_of_a_worker_s_death(training: Training) -> None:
    training.goes_on(0, 1, 2)
    at = time.monotonic()
    training.workers[1].send_signal(signal.SIGKILL)
    wait_for(training.deaths, "the death")
    training.goes_on(0, 2)
    (died,) = training.deaths()
    assert died.startswith("worker 1,")
    assert "and its connections are broken" in died
    pause = longest(training.times(0), at)
    print(f"{pause:.2f} s")
    assert pause < NOTICED


@pytest.mark.soak
def test_a_worker_that_stands_still_keeps_its_connections_and_its_patience(training: Training) -> None:
    training.goes_on(0, 1, 2)
    training.workers[1].send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    training.workers[1].send_signal(signal.SIGCONT)
    training.goes_on(0, 1, 2)
    assert not training.deaths()


def broken(seconds: float, *doors: Forwarder) -> None:
    for door in doors:
        door.shut()
    time.sleep(seconds)
    for door in doors:
        door.reopen()


def test_links_that_break_and_come_back(training: Training) -> None:
    """Within a second, all of a worker's; or one of them for longer. All for longer are a death."""
    training.goes_on(0, 1, 2)
    both = training.hub_door, training.shard_door
    for _ in range(3):
        broken(0.8, *both)
        training.goes_on(0, 1, 2)
    broken(2.3, training.hub_door)
    training.goes_on(0, 1, 2)
    broken(2.3, training.shard_door)
    training.goes_on(0, 1, 2)
    assert not training.deaths()
    for door in both:
        door.shut()
    wait_for(training.deaths, "the death")
    for door in both:
        door.reopen()
    training.goes_on(0, 2)
    (died,) = training.deaths()
    assert died.startswith("worker 1,")
    assert "and its connections are broken" in died
    assert training.workers[1].wait(DEADLINE) != 0
    assert "given up" in training.workers[1].said
