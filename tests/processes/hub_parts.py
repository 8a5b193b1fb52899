"""A hub on a thread of a test's own process, a log that is none of shard 0's, and a hub's process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from atoll.core.errors import PeerLostError
from atoll.hub.decisions import Decision, read_decisions
from atoll.hub.main import ADDRESS_FILE, serve
from atoll.hub.options import HubOptions
from atoll.launch.processes import PARENT_VARIABLE
from atoll.net.endpoint import Client, Server
from atoll.net.requests import ask
from atoll.testing import faults
from atoll.train.members.hub_client import HubClient
from atoll.wire.messages import (
    VERSION,
    Commit,
    Committed,
    Fence,
    Fenced,
    Goodbye,
    Heartbeat,
    Hello,
    Over,
    Refused,
    Used,
    Welcome,
    decode_untrusted,
    encode,
)

DEADLINE = 60.0
# Tests of deaths last as long as the patience; on a busy machine a thread may stand still for a second.
PATIENCE, HEARTBEAT = 3.0, 0.1


def wait_for(condition: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
    until = time.monotonic() + deadline
    while not (found := condition()):
        assert time.monotonic() < until, f"waited {deadline:g} s for {what}"
        time.sleep(0.01)
    return found


class Service:
    """A hub on a thread of this process."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self._stop = threading.Event()
        self._address: list[str] = []
        self.error: list[BaseException] = []
        options = {
            "workers": 1,
            "listen": "tcp://127.0.0.1:0",
            "patience": PATIENCE,
            "heartbeat": HEARTBEAT,
            **options,
        }
        self._thread = threading.Thread(target=self._serve, kwargs=options, daemon=True)
        self._thread.start()
        wait_for(lambda: self._address or self.error, "the hub's start")
        if self.error:
            raise self.error[0]
        self.address = self._address[0]

    def _serve(self, **options: Any) -> None:
        try:
            grouping = options.pop("grouping", None)
            serve(
                HubOptions(directory=str(self.folder or ""), **options),
                grouping,
                until=self._stop.is_set,
                ready=self._address.append,
            )
        except BaseException as error:
            self.error.append(error)

    def decisions(self, what: str = "") -> list[Decision]:
        return [decision for decision in read_decisions(self.folder) if what in ("", decision.what)]

    def ended(self, deadline: float = DEADLINE) -> bool:
        """Whether the hub ends by itself."""
        self._thread.join(deadline)
        return not self._thread.is_alive()

    def close(self) -> None:
        self._stop.set()
        assert self.ended()
        assert not self.error


def _fenced(key: tuple[int, int], used: list[Used], news: bool = False) -> Fenced:
    return Fenced(worker=key[0], incarnation=key[1], iteration=1, used=used, news=news)


class FakeLog:
    """Shard 0 on a thread: it keeps what commits use, and answers to fences."""

    def __init__(self, hub: str, run: str = "") -> None:
        self._stop = threading.Event()
        self.hellos: list[Hello] = []
        self.used: dict[tuple[int, int], list[Used]] = {}  # (worker, incarnation)
        self.fenced: set[tuple[int, int]] = set()
        self.told_over: list[
            set[tuple[int, int]]
        ] = []  # who was fenced when the hub said that the run is over
        self.silent = False  # whether fences are left without an answer
        self.refused: list[str] = []  # what the hub has said to its heartbeats
        self._server = Server("tcp://127.0.0.1:0", None, limit=2**20, name="shard 0")
        self.address = self._server.address
        self._to_hub = Client(hub, None, limit=2**20, name="hub")
        hello = Hello(version=VERSION, run=run, role="shard", shard=0, address=self.address)
        try:
            self.welcome = wait_for(lambda: self._join(hello), "a welcome")
        except BaseException:
            self._server.close()
            self._to_hub.close()
            raise
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _join(self, hello: Hello) -> Welcome | None:
        with contextlib.suppress(PeerLostError):  # the hub may be killed in between
            return ask(self._to_hub, hello, Welcome, DEADLINE, "a welcome")[0]
        return None

    def _run(self) -> None:
        peers: dict[bytes, Hello] = {}
        beaten = 0.0
        while not self._stop.is_set():
            if time.monotonic() - beaten > HEARTBEAT:
                beaten = time.monotonic()
                beat = Heartbeat(run=self.welcome.run, incarnation=self.welcome.incarnation)
                self._to_hub.send(encode(beat))
            received = self._server.receive(0.02)
            if received is not None:
                self._handle(received.peer, decode_untrusted(received.header), peers)
            told = self._to_hub.receive(0)
            if told is not None:
                self._note(decode_untrusted(told[0]))

    def _note(self, word: Any) -> None:
        """What the hub says to a heartbeat."""
        if isinstance(word, Refused):
            self.refused.append(word.reason)
        elif isinstance(word, Over):
            self.told_over.append(set(self.fenced))
            self._to_hub.send(encode(Goodbye(incarnation=self.welcome.incarnation)))

    def _handle(self, peer: bytes, message: Any, peers: dict[bytes, Hello]) -> None:
        if isinstance(message, Hello):
            self.hellos.append(message)
            peers[peer] = message
            self._server.send(peer, encode(Welcome(run=message.run)))
            if message.role == "hub":
                for key in self.used.keys() - self.fenced:
                    self._server.send(peer, encode(_fenced(key, self.used[key], news=True)))
        elif isinstance(message, Fence) and not self.silent:
            key = (message.worker, message.incarnation)
            self.fenced.add(key)
            self._server.send(peer, encode(_fenced(key, self.used.get(key, []))))
        elif isinstance(message, Commit):
            self._commit(peer, peers[peer].worker, message, peers)

    def _commit(self, peer: bytes, worker: int, commit: Commit, peers: dict[bytes, Hello]) -> None:
        key = (worker, commit.incarnation)
        if key in self.fenced:
            self._server.send(peer, encode(Refused(reason="fenced")))
            return
        self.used.setdefault(key, []).extend(commit.used)
        self._server.send(peer, encode(Committed(iteration=commit.iteration)))
        for each, hello in peers.items():
            if hello.role == "hub":
                self._server.send(each, encode(_fenced(key, commit.used, news=True)))

    def counts(self, epoch: int) -> Counter[int]:
        """How often each position of an epoch was used."""
        found: Counter[int] = Counter()
        for parts in list(self.used.values()):
            for part in parts:
                if part.epoch == epoch:
                    found.update(range(part.start, part.stop))
        return found

    def by(self, worker: int) -> Counter[int]:
        """How many samples of each epoch a rank has used."""
        found: Counter[int] = Counter()
        for (rank, _), parts in list(self.used.items()):
            for part in parts if rank == worker else ():
                found[part.epoch] += part.stop - part.start
        return found

    def close(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE)
        self._server.close()
        self._to_hub.close()


@contextlib.contextmanager
def hub_of(folder: Path, **options: Any) -> Iterator[Service]:
    service = Service(folder, **options)
    try:
        yield service
    finally:
        service.close()


def client(service: Service, **options: Any) -> HubClient:
    options = {"address": service.address, "keys": None, "timeout": DEADLINE, **options}
    return HubClient(**options)


def asked(link: Client, message: Any, expected: Any) -> Any:
    return ask(link, message, expected, DEADLINE, "an answer")[0]


def raw(service: Service) -> Client:
    return Client(service.address, None, limit=2**21, name="hub")


class Forwarder:
    """A port that passes bytes on, and can cut what it passes, stand still, or be closed for a while."""

    def __init__(self, address: str = "", port: int = 0) -> None:
        self._target = address
        self._listener = socket.create_server(("127.0.0.1", port))
        self._port = self._listener.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self._port}"
        self._links: list[socket.socket] = []
        self._open = threading.Event()
        self._open.set()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def to(self, address: str) -> None:
        """Pass bytes on to there from now on."""
        self._target = address

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                self._open.wait()
                try:
                    far = socket.create_connection(("127.0.0.1", int(self._target.rsplit(":", 1)[1])))
                except ConnectionRefusedError:  # nobody listens there yet, or any more
                    near.close()
                    continue
                self._links += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)  # who ends here ends there

    def stand_still(self) -> None:
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    def hang_up(self) -> None:
        links, self._links = self._links, []
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def shut(self) -> None:
        """Hang up, and let nobody in until `reopen`."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # frees who waits in accept
        self._listener.close()
        self.hang_up()

    def reopen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self._port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    close = shut  # for good


class HubProcess:
    """A hub in a process of its own, started again each time it is killed, `pause` seconds later; `faults` is
    a plan for it."""

    def __init__(
        self, folder: Path, *, plan: Sequence[faults.Fault] = (), pause: float = 0.0, **options: Any
    ) -> None:
        self.folder, self._pause = folder, pause
        at = "tcp://127.0.0.1:0"
        self._options = HubOptions(run="r", listen=at, directory=str(folder), group_links=0.0, **options)
        folder.mkdir(parents=True, exist_ok=True)
        self.plan = faults.write(folder.parent / "plan.json", plan)
        self.starts = 0
        self._ending = threading.Event()
        self._lock = threading.Lock()  # nobody is killed between being started and being known
        self._process = self._start()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()
        self.address = wait_for(self._address, "the hub")

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        command = ["-m", "atoll.testing.faults", str(self.plan), "--", "-m", "atoll.launch.service", "hub"]
        place = {PARENT_VARIABLE: str(os.getpid()), faults.WHO_VARIABLE: "hub", "OMP_NUM_THREADS": "1"}
        with (self.folder.parent / "hub.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *command, msgspec.json.encode(self._options).decode()],
                env={**os.environ, **place},
                stdout=log,
                stderr=log,
            )

    def _address(self) -> str:
        where = self.folder / ADDRESS_FILE
        return where.read_text().strip() if where.exists() else ""

    def _keep(self) -> None:
        while not self._ending.is_set():
            with self._lock:
                if self._process.poll() == -signal.SIGKILL and not self._ending.wait(self._pause):
                    self._process = self._start()
            self._ending.wait(0.01)

    def kill(self) -> None:
        """End it as kill -9 does; it is started again."""
        with self._lock:
            self._process.kill()
            self._process.wait()

    def send_signal(self, signum: int) -> None:
        with self._lock:
            self._process.send_signal(signum)

    def decisions(self, what: str = "") -> list[Decision]:
        return [decision for decision in read_decisions(self.folder) if what in ("", decision.what)]

    def log(self) -> str:
        return (self.folder.parent / "hub.log").read_text()

    def close(self) -> None:
        self._ending.set()
        self._keeper.join(DEADLINE)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> HubProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# A worker that leases samples from the hub, and commits them to a log.
# With "dies": it stops after an epoch, with a batch in hand, and lives on until it is killed.
WORKER = """
import itertools, sys, time
from atoll.net.endpoint import Client
from atoll.net.requests import ask
from atoll.train.members.hub_client import HubClient
from atoll.train.data.leased_sampler import LeasedSampler
from atoll.wire.messages import VERSION, Commit, Committed, Hello, Welcome

address, seconds, epochs, length = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
dies = "dies" in sys.argv
with HubClient(address, None, timeout=60) as hub:
    me = hub.join()
    (shard,) = hub.shards()
    log = Client(shard, None, limit=2**20, name="shard 0")
    hello = Hello(version=VERSION, run=me.run, role="worker", worker=me.worker, incarnation=me.incarnation)
    ask(log, hello, Welcome, 60, "a welcome")
    sampler = LeasedSampler(length, lease=hub.lease, wait=4 * me.patience)
    iteration = 0
    for epoch in range(epochs):
        indices = iter(sampler)
        while batch := list(itertools.islice(indices, 4)):
            time.sleep(seconds)
            if dies and epoch:
                print(me.worker, len(batch), flush=True)
                sys.stdin.read()
            sampler.count(len(batch))
            commit = Commit(
                incarnation=me.incarnation, iteration=iteration, weight=len(batch), used=sampler.used()
            )
            ask(log, commit, Committed, 60, "a commit")
            iteration += 1
            hub.iteration = iteration
    log.close()
"""
