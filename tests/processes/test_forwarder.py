"""Heartbeats that a launcher passes on, with real processes: it and workers are stopped and killed, and
others with the key lie."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from hub_parts import DEADLINE, HEARTBEAT, asked, hub_of, raw, wait_for
from run_command import Command

from atoll.hub.decisions import read_decisions
from atoll.hub.forwarder import Forwarder
from atoll.hub.lifesigns import LifeSigns
from atoll.net.endpoint import Client
from atoll.net.heartbeats import SOCKET, Launcher
from atoll.train.members.hub_client import HubClient
from atoll.wire.messages import VERSION, Beat, Heard, Heartbeat, Heartbeats, Hello, Welcome, encode

PATIENCE = 5.0  # seconds; a thread of a busy machine may stand still for one

LAUNCHER = """
import sys
from pathlib import Path
from atoll.hub.decisions import read_decisions
from atoll.hub.forwarder import Forwarder
forwarder = Forwarder(Path(sys.argv[1]), sys.argv[2], None, sys.argv[3])
print(forwarder.launcher.name, flush=True)
sys.stdin.read()
"""

# A worker that lives until its standard input ends, and then says what the hub thinks of it.
WORKER = """
import sys, time
from atoll.core.errors import RunError
from atoll.net.heartbeats import Launcher
from atoll.train.members.hub_client import HubClient
hub = HubClient(sys.argv[1], None, timeout=60, launcher=Launcher(sys.argv[2], sys.argv[3]))
print(hub.join().incarnation, flush=True)
sys.stdin.readline()
until = time.monotonic() + 60
try:
    while time.monotonic() < until:
        hub.check()
        time.sleep(0.01)
except RunError as error:
    print(error, flush=True)
"""


class Heartbeating:
    """What the hub hears, in turn: an incarnation of a worker that spoke itself, or a launcher's message."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[int | Heartbeats] = []
        direct, together = LifeSigns.handle, LifeSigns.handle_many

        def hear(signs: LifeSigns, peer: bytes, beat: Heartbeat) -> None:
            self.heard.append(beat.incarnation)
            direct(signs, peer, beat)

        def hear_all(signs: LifeSigns, peer: bytes, message: Heartbeats) -> None:
            self.heard.append(message)
            together(signs, peer, message)

        monkeypatch.setattr(LifeSigns, "handle", hear)
        monkeypatch.setattr(LifeSigns, "handle_many", hear_all)

    def is_forwarded(self, incarnations: set[int], since: int = 0) -> bool:
        """Whether a launcher has spoken for all of these five times on end, and none of them itself."""
        times = 0
        for each in self.heard[since:]:
            if isinstance(each, int):
                times = 0 if each in incarnations else times
            elif incarnations <= {beat.incarnation for beat in each.beats}:
                times += 1
            if times == 5:
                return True
        return False

    def spoke_itself(self, incarnation: int, since: int) -> bool:
        """Whether a worker has, several times."""
        return self.heard[since:].count(incarnation) > 4


@pytest.fixture
def heartbeating(monkeypatch: pytest.MonkeyPatch) -> Heartbeating:
    return Heartbeating(monkeypatch)


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
        yield Path(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    return folder


@contextlib.contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def line_of(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    line = started.stdout.readline().strip()
    assert line, "it ended"
    return line


def run_of(address: str) -> str:
    """The name of the hub's run."""
    with Client(address, None, limit=2**21, name="hub") as link:
        run: str = asked(link, Hello(version=VERSION, run="", role="guest"), Welcome).run
        return run


@contextlib.contextmanager
def workers_of(address: str, launcher: Launcher, count: int) -> Iterator[list[HubClient]]:
    clients = [HubClient(address, None, timeout=DEADLINE, launcher=launcher) for _ in range(count)]
    try:
        for each in clients:
            each.join()
        yield clients
    finally:
        for each in clients:
            each.goodbye()
            each.close()


def incarnations_of(clients: list[HubClient]) -> set[int]:
    return {each.welcome.incarnation for each in clients if each.welcome is not None}


def test_one_message_speaks_for_all_workers_of_a_launcher(
    folder: Path, sockets: Path, heartbeating: Heartbeating
) -> None:
    with hub_of(folder, workers=3, patience=60.0, heartbeat=0.25) as hub:
        forwarder = Forwarder(sockets, hub.address, None, run_of(hub.address))
        with workers_of(hub.address, forwarder.launcher, 3) as clients:
            clients[1].iteration = 7
            incarnations = incarnations_of(clients)
            wait_for(lambda: heartbeating.is_forwarded(incarnations), "messages for all three")
            last = next(each for each in reversed(heartbeating.heard) if isinstance(each, Heartbeats))
            assert {beat.iteration for beat in last.beats} == {0, 7}
            assert all(beat.age < 10.0 for beat in last.beats)
        assert forwarder.trouble == ""
        forwarder.close()
        assert not (sockets / SOCKET).exists()
        wait_for(lambda: len(hub.decisions("worker left")) == 3, "the goodbyes")
        assert hub.decisions("worker died") == []
        assert hub.decisions("heartbeat") == []


def test_workers_outlive_their_launcher(folder: Path, sockets: Path, heartbeating: Heartbeating) -> None:
    """It stands still for longer than the hub's patience, goes on, and is killed."""
    with (
        hub_of(folder, workers=2, patience=PATIENCE, heartbeat=0.25) as hub,
        process(LAUNCHER, sockets, hub.address, run_of(hub.address)) as launcher,
        workers_of(hub.address, Launcher(line_of(launcher), str(sockets / SOCKET)), 2) as clients,
    ):
        incarnations = incarnations_of(clients)
        one = min(incarnations)
        wait_for(lambda: heartbeating.is_forwarded(incarnations), "the launcher's messages")

        for signum in (signal.SIGSTOP, signal.SIGKILL):
            launcher.send_signal(signum)
            since = len(heartbeating.heard)
            time.sleep(PATIENCE + 1.0)
            wait_for(partial(heartbeating.spoke_itself, one, since), "its own word")
            assert hub.decisions("worker died") == []
            if signum == signal.SIGSTOP:
                since = len(heartbeating.heard)
                launcher.send_signal(signal.SIGCONT)
                again = partial(heartbeating.is_forwarded, incarnations, since)
                wait_for(again, "the launcher's messages again")
        for each in clients:
            each.check()


def test_workers_are_missed_though_their_launcher_lives(
    folder: Path, sockets: Path, heartbeating: Heartbeating
) -> None:
    """One is killed, one stands still, and hears that it was given up when it goes on."""
    with hub_of(folder, workers=3, patience=PATIENCE, heartbeat=0.25) as hub:
        forwarder = Forwarder(sockets, hub.address, None, run_of(hub.address))
        arguments = (hub.address, *forwarder.launcher)
        with (
            workers_of(hub.address, forwarder.launcher, 1) as living,
            process(WORKER, *arguments) as killed,
            process(WORKER, *arguments) as stopped,
        ):
            incarnations = {int(line_of(killed)), int(line_of(stopped)), *incarnations_of(living)}
            wait_for(lambda: heartbeating.is_forwarded(incarnations), "messages for all three")
            killed.kill()
            stopped.send_signal(signal.SIGSTOP)
            since = len(heartbeating.heard)
            wait_for(lambda: len(hub.decisions("worker died")) == 2, "both deaths")
            assert all("was silent for" in each.reason for each in hub.decisions("worker died"))
            # The launcher went on, and spoke for the one that it heard.
            wait_for(lambda: heartbeating.is_forwarded(incarnations_of(living), since), "the launcher")
            stopped.send_signal(signal.SIGCONT)
            assert stopped.stdin is not None
            stopped.stdin.write("\n")
            stopped.stdin.flush()
            assert "it was silent for too long" in line_of(stopped)
            living[0].check()
        forwarder.close()


@pytest.mark.parametrize("liar", ["invents a launcher", "is a launcher itself", "names none"])
def test_nobody_speaks_for_the_workers_of_others(folder: Path, sockets: Path, liar: str) -> None:
    """With the run's key, one may still not keep another's dead worker alive by a launcher's message."""
    with (
        hub_of(folder, workers=2, patience=1.0, heartbeat=HEARTBEAT) as hub,
        contextlib.closing(raw(hub)) as victim,
        contextlib.closing(raw(hub)) as link,
    ):
        own = Hello(version=VERSION, run="", role="worker", token="v", launcher="the victim's")
        welcome = asked(victim, own, Welcome)
        mine = Hello(version=VERSION, run="", role="worker", token="m", launcher="the liar's")
        other = asked(link, mine, Welcome)
        name = {"invents a launcher": "x", "is a launcher itself": "the liar's"}.get(liar, "")
        number = 0

        def lie() -> bool:
            nonlocal number
            number += 1
            beats = [Beat(welcome.incarnation), Beat(other.incarnation), Beat(10**9)]
            message = Heartbeats(run=welcome.run, launcher=name, number=number, beats=beats)
            heard = asked(link, message, Heard)
            assert heard.number == number
            told = [10**9, welcome.incarnation]
            if name != "the liar's" or hub.decisions("worker died")[1:]:
                told.append(other.incarnation)
            assert set(told) <= set(heard.unknown)
            time.sleep(0.02)
            return any("worker 0" in each.choice for each in hub.decisions("worker died"))

        wait_for(lie, "the death of who says nothing")
        refused = hub.decisions("heartbeat")
        assert len(refused) == 1
        assert "which it has not started" in refused[0].reason


def test_a_launcher_of_another_run_is_not_heard(folder: Path) -> None:
    with hub_of(folder, workers=1, patience=60.0) as hub, contextlib.closing(raw(hub)) as link:
        link.send(encode(Heartbeats(run="another", launcher="l", number=1, beats=[Beat(1)])))
        received = wait_for(lambda: link.receive(0.05), "an answer")
        assert b"another" in received[0]


def test_a_hub_that_is_started_again_knows_whose_launcher_is_whose(folder: Path) -> None:
    hello = Hello(version=VERSION, run="", role="worker", token="v", launcher="mine")
    with hub_of(folder, workers=1, patience=60.0) as hub, contextlib.closing(raw(hub)) as link:
        welcome = asked(link, hello, Welcome)
    for _ in range(2):  # from its records, and from what it knew all in all
        with hub_of(folder, workers=1, patience=60.0) as hub, contextlib.closing(raw(hub)) as link:
            for name, unknown in (("mine", []), ("another's", [welcome.incarnation])):
                beats = [Beat(welcome.incarnation)]
                message = Heartbeats(run=welcome.run, launcher=name, number=1, beats=beats)
                assert asked(link, message, Heard).unknown == unknown


def test_what_a_launcher_cannot_do_its_workers_do(folder: Path, sockets: Path) -> None:
    """It cannot reach the hub: `trouble` says why, and the workers' words arrive."""
    with hub_of(folder, workers=1, patience=PATIENCE) as hub:
        forwarder = Forwarder(sockets, "tcp://10.0.0.1:9", None, run_of(hub.address))  # without a key
        wait_for(lambda: forwarder.trouble, "what is wrong")
        assert "key file is needed" in forwarder.trouble
        with workers_of(hub.address, forwarder.launcher, 1) as clients:
            time.sleep(PATIENCE + 1.0)
            clients[0].check()
            assert hub.decisions("worker died") == []
        forwarder.close()
        assert list(sockets.iterdir()) == []


# -- with `atoll run` --------------------------------------------------------------------------------------

SCRIPT = """
import os, time, torch, atoll
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with atoll.join() as session:
    session.prepare(model, optimizer)
    until = time.monotonic() + 200
    while not os.path.exists("go") and time.monotonic() < until:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.05)
"""


def test_a_launcher_that_stands_still_costs_the_training_nothing(tmp_path: Path) -> None:
    command = Command(tmp_path)
    options = ["--strategy", "server", "--set", "sync.consistency=asp", "--set", "hub.patience=4 s"]
    process = command.start(SCRIPT, options=options)
    try:
        wait_for(lambda: command.steps() > 3 or process.poll() is not None, "three steps", 120.0)
        assert process.poll() is None, process.communicate()
        launcher = psutil.Process(process.pid)
        lines = [each for each in launcher.net_connections("unix") if str(each.laddr).endswith(f"/{SOCKET}")]
        assert len(lines) == 3  # it listens, and both workers have connected
        process.send_signal(signal.SIGSTOP)
        time.sleep(6.0)
        steps = command.steps()
        wait_for(lambda: command.steps() > steps + 10, "steps while the launcher stands still")
        process.send_signal(signal.SIGCONT)
        (tmp_path / "go").touch()
        _, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, err
        decisions = read_decisions(tmp_path / "run" / "service")
        assert [each for each in decisions if each.what in ("worker died", "heartbeat")] == []
        assert len([each for each in decisions if each.what == "worker left"]) == 2
    finally:
        process.kill()
        process.wait()
