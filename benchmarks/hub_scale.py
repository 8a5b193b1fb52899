"""(u) The hub with thousands of workers: how long they take to join, and what their heartbeats cost.

    python benchmarks/hub_scale.py [--quick] [--workers N ...] [--machine N ...]

One hub, a process of its own on one core, with a directory on the disk; and workers that are only
connections: each has two, as a worker has (one to ask, one for heartbeats), speaks ZeroMQ's protocol
over real sockets, says Hello, forms the run's ring, and is heard as often as the hub says. Some
thousands of them share a process on the other core. With `--machine N`, N of them have a launcher, which
has a connection too and sends one message for all of them (`hub/forwarder.py`); a worker says itself that it
lives over each new connection, and while its launcher has no answer. With 1 there are no launchers. Then

- all join, and form the ring;
- all are heard for a while: the share of a core that the hub takes, and how long a stranger's
  question waits;
- half of them vanish at once, with their connections: when the last death is known, and whether a
  living worker was taken for dead;
- those that are left lose their connections, and make them anew within a second: when all are
  welcomed;
- all leave.

The hub's seconds on the processor are counted beside the clock's: other programs on the machine lengthen
only the latter. The hub needs a descriptor for each connection: where the hard limit does not allow two
for each worker, and may not be raised, each has one, and each launcher one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import resource
import secrets
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from atoll.hub.decisions import decision_reader
from atoll.hub.main import ADDRESS_FILE
from atoll.net.endpoint import Client
from atoll.net.requests import ask
from atoll.wire.messages import (
    VERSION,
    AnyMessage,
    Beat,
    Gather,
    Gathered,
    Goodbye,
    Heard,
    Heartbeat,
    Heartbeats,
    Hello,
    Refused,
    Welcome,
    decode_untrusted,
    encode,
)
from common import options, output_folder, write_results

WORKERS = (1000, 4000, 10_000)
QUICK_WORKERS = (100, 400)
MACHINES = (1, 8)  # workers that share a launcher; 1: there is none
AGE = 0.03  # seconds that a launcher waits for its other workers
IN_A_PROCESS = 5000  # workers
OPENING = 500  # connections that a process makes at a time
STEADY_SECONDS, QUICK_STEADY_SECONDS = 10.0, 3.0
DEADLINE = 120.0  # seconds for each phase
TARGETS = {"joined": 15.0, "beats": 0.25, "deaths": 2.0, "returned": 15.0, "megabytes": 600.0}
# ZeroMQ's greeting without keys and its READY command (RFC 23), as a DEALER sends them.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_READY_BODY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
_READY = b"\x04" + bytes([len(_READY_BODY)]) + _READY_BODY


def frame(message: AnyMessage) -> bytes:
    """A message as it goes over the wire."""
    raw = encode(message)
    head = bytes([0, len(raw)]) if len(raw) < 256 else b"\2" + struct.pack(">Q", len(raw))
    return head + raw


def take_frames(buffer: bytearray) -> Iterator[tuple[int, bytes]]:
    """The whole frames at the buffer's beginning, (flags, body), which are taken from it."""
    at = 0
    while len(buffer) >= at + 2:
        flags = buffer[at]
        head = 9 if flags & 2 else 2
        if len(buffer) < at + head:
            break
        size = struct.unpack_from(">Q", buffer, at + 1)[0] if flags & 2 else buffer[at + 1]
        if len(buffer) < at + head + size:
            break
        yield flags, bytes(buffer[at + head : at + head + size])
        at += head + size
    del buffer[:at]


# -- workers that are only connections ---------------------------------------------------------------------


class Link:
    """One connection of a simulated worker, or of a launcher."""

    def __init__(self, owner: Worker | Launcher, asks: bool) -> None:
        self.owner, self.asks = owner, asks
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.buffer = bytearray()
        self.greeted = self.ready = False

    def send(self, raw: bytes) -> None:
        with contextlib.suppress(OSError):  # a hub that reads nothing misses a heartbeat
            self.socket.send(raw)


class Worker:
    """A simulated worker: what it knows of itself."""

    def __init__(self, launcher: Launcher | None) -> None:
        self.launcher = launcher
        self.token = secrets.token_hex(8)
        self.welcome: Welcome | None = None
        self.links: list[Link] = []
        self.beat = b""
        self.heard = 0.0  # when the last heartbeat went out; monotonic


class Launcher:
    """A simulated launcher: it sends one message for all its workers."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        self.workers: list[Worker] = []
        self.links: list[Link] = []
        self.sent = self.answered = 0  # the numbers of messages

    def message(self) -> bytes:
        """What its workers say."""
        there = [worker.welcome for worker in self.workers if worker.welcome is not None]
        self.sent += 1
        beats = [Beat(welcome.incarnation, age=AGE) for welcome in there]
        return frame(Heartbeats(run=there[0].run, launcher=self.name, number=self.sent, beats=beats))


class Swarm:
    """Some thousands of workers in one process, driven by one epoll."""

    def __init__(self, port: int, count: int, connections: int, machine: int) -> None:
        self._port, self._kinds = port, (True, False)[:connections]
        self._launchers = [Launcher() for _ in range(-(-count // machine))] if machine > 1 else []
        self._workers: list[Worker] = []
        for each in range(count):
            launcher = self._launchers[each // machine] if self._launchers else None
            self._workers.append(Worker(launcher))
            if launcher is not None:
                launcher.workers.append(self._workers[-1])
        self._poll = select.epoll()
        self._links: dict[int, Link] = {}  # by descriptor
        self._closed: deque[Worker | Launcher] = deque()  # who is to connect
        self._opening = 0  # connections whose handshake is under way
        self._beating: list[Worker | Launcher] = []  # in the order in which they are heard
        self._heartbeat = 0.0  # seconds
        self._next = 0
        self._turn_began = 0.0
        self.slowest = 0.0  # seconds between two heartbeats of one worker, at the most
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def connect(self) -> None:
        """All that live connect, and say who they are."""
        self._closed.extend([*self._launchers, *self._workers])

    def _open(self) -> None:
        while self._closed and self._opening < OPENING:
            owner = self._closed.popleft()
            kinds = self._kinds if isinstance(owner, Worker) else (False,)
            owner.links = [Link(owner, asks) for asks in kinds]
            for link in owner.links:
                link.socket.connect_ex(("127.0.0.1", self._port))
                self._links[link.socket.fileno()] = link
                self._poll.register(link.socket.fileno(), select.EPOLLOUT | select.EPOLLIN)
                self._opening += 1

    def run(self, seconds: float) -> None:
        """Live for so long."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            self._open()
            for descriptor, events in self._poll.poll(0.005):
                link = self._links.get(descriptor)
                if link is not None:
                    self._serve(link, events)
            self._beat(now)

    def _serve(self, link: Link, events: int) -> None:
        if not link.greeted and events & select.EPOLLOUT:
            link.greeted = True
            link.send(_GREETING + _READY)
            self._poll.modify(link.socket.fileno(), select.EPOLLIN)
        if not events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            raw = link.socket.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        if not raw:
            self.counts["lost"] += 1
            self._opening -= not link.ready
            self._drop(link)
            return
        link.buffer += raw
        if not link.ready:
            if len(link.buffer) < 64 + 2 or len(link.buffer) < 66 + link.buffer[65]:
                return
            del link.buffer[: 66 + link.buffer[65]]
            link.ready = True
            self._opening -= 1
            owner = link.owner
            if isinstance(owner, Worker) and link.asks:
                link.send(frame(self._hello(owner)))
            elif isinstance(owner, Worker) and owner.launcher is not None and owner.beat:
                self._speak(owner)  # the hub learns which connection is whose
        for flags, body in take_frames(link.buffer):
            if not flags & 4:
                self._take(link.owner, decode_untrusted(body))

    def _hello(self, worker: Worker) -> Hello:
        there = worker.welcome
        if there is None:
            launcher = worker.launcher.name if worker.launcher is not None else ""
            token, pid = worker.token, os.getpid()
            return Hello(version=VERSION, run="", role="worker", token=token, pid=pid, launcher=launcher)
        rank, known = there.worker, there.incarnation
        return Hello(version=VERSION, run=there.run, role="worker", worker=rank, incarnation=known)

    def _take(self, owner: Worker | Launcher, message: AnyMessage) -> None:
        self.counts[type(message).__name__] += 1
        if isinstance(owner, Launcher):
            if isinstance(message, Heard):
                owner.answered = max(owner.answered, message.number)
        elif isinstance(message, Welcome):
            if owner.welcome is None:
                self._begin(owner, message)
        elif isinstance(message, Refused):
            self.refused[re.sub(r"\d+", "N", message.reason)] += 1
        elif isinstance(message, Gathered) and not message.group:
            self.counts["ring without"] += 1

    def _begin(self, worker: Worker, welcome: Welcome) -> None:
        """The worker has joined: it wants the ring, and is heard from now on."""
        worker.welcome, self._heartbeat = welcome, welcome.heartbeat
        worker.beat = frame(Heartbeat(run=welcome.run, incarnation=welcome.incarnation))
        worker.links[0].send(frame(Gather(incarnation=welcome.incarnation, number=1, seconds=600.0)))
        launcher = worker.launcher
        if launcher is None:
            self._beating.append(worker)
            return
        if worker.links[-1].ready:
            self._speak(worker)
        if sum(each.welcome is not None for each in launcher.workers) == 1:
            self._beating.append(launcher)

    def _beat(self, now: float) -> None:
        """Each is heard once in a period, one after another."""
        if not self._beating:
            return
        share = min(1.0, (now - self._turn_began) / self._heartbeat)
        until = int(share * len(self._beating))
        for each in self._beating[self._next : until]:
            if isinstance(each, Worker):
                self._speak(each)
            else:
                self._speak_for_all(each)
        self._next = max(self._next, until)
        if share == 1.0:
            self._next = 0
            self._turn_began = max(self._turn_began + self._heartbeat, now - self._heartbeat)

    def _speak(self, worker: Worker) -> None:
        """A worker says itself that it lives."""
        if worker.links[-1].ready:
            worker.links[-1].send(worker.beat)
            self.counts["spoken"] += 1
            self._note(worker)

    def _speak_for_all(self, launcher: Launcher) -> None:
        """A launcher says so of its workers; they do themselves while it is not answered."""
        if launcher.answered < launcher.sent:
            for worker in launcher.workers:
                self._speak(worker)
        if launcher.links and launcher.links[-1].ready:
            launcher.links[-1].send(launcher.message())
            self.counts["spoken"] += 1
            for worker in launcher.workers:
                self._note(worker)

    def _note(self, worker: Worker) -> None:
        """A worker's sign of life has gone out."""
        now = time.monotonic()
        self.counts["beats"] += 1
        if worker.heard:
            self.slowest = max(self.slowest, now - worker.heard)
        worker.heard = now

    def _drop(self, link: Link) -> None:
        self._links.pop(link.socket.fileno(), None)
        link.socket.close()

    def vanish(self, count: int) -> list[int]:
        """So many of them are no more, with their connections; their incarnations."""
        gone, self._workers = self._workers[:count], self._workers[count:]
        kept = set(map(id, self._workers))
        empty: list[Launcher] = []
        for launcher in self._launchers:
            launcher.workers = [worker for worker in launcher.workers if id(worker) in kept]
            if not launcher.workers:
                empty.append(launcher)
        self._launchers = [launcher for launcher in self._launchers if launcher.workers]
        kept |= set(map(id, self._launchers))
        self._beating = [each for each in self._beating if id(each) in kept]
        self._next = min(self._next, len(self._beating))
        for each in (*gone, *empty):
            for link in each.links:
                self._drop(link)
        return [worker.welcome.incarnation for worker in gone if worker.welcome is not None]

    def reconnect(self) -> None:
        """All lose their connections, and make them anew."""
        for each in (*self._launchers, *self._workers):
            for link in each.links:
                self._drop(link)
        self.counts["Welcome"] = 0
        self.connect()

    def leave(self) -> None:
        """All say goodbye."""
        for worker in self._workers:
            assert worker.welcome is not None
            worker.links[0].send(frame(Goodbye(incarnation=worker.welcome.incarnation, finished=True)))
        self._beating = []


def be_a_swarm(orders: Connection, port: int, count: int, connections: int, machine: int, core: int) -> None:
    """A process of simulated workers: does what it is told, and says how things stand."""
    os.sched_setaffinity(0, {core})
    random.seed(port)
    swarm = Swarm(port, count, connections, machine)
    while True:
        if orders.poll():
            order, argument = orders.recv()
            if order == "end":
                return
            found = getattr(swarm, order)(*argument) if order != "look" else None
            orders.send((found, dict(swarm.counts), dict(swarm.refused), swarm.slowest))
        swarm.run(0.02)


class Workers:
    """All simulated workers, in as many processes as are needed."""

    def __init__(self, port: int, count: int, connections: int, machine: int, core: int) -> None:
        context = multiprocessing.get_context("spawn")
        parts = -(-count // IN_A_PROCESS)
        self._sizes = [count // parts + (each < count % parts) for each in range(parts)]
        self.slowest = 0.0  # seconds between two heartbeats of one of them, at the most
        self._ends: list[Connection] = []
        self._processes = []
        for size in self._sizes:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=be_a_swarm, args=(theirs, port, size, connections, machine, core), daemon=True
            )
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def tell(self, order: str, *arguments: Any) -> list[Any]:
        """What each process has to say to that."""
        for end in self._ends:
            end.send((order, arguments))
        return [end.recv()[0] for end in self._ends]

    def vanish(self) -> set[int]:
        """Half of them; their incarnations."""
        for end, size in zip(self._ends, self._sizes, strict=True):
            end.send(("vanish", (size // 2,)))
        return {incarnation for end in self._ends for incarnation in end.recv()[0]}

    def look(self) -> tuple[Counter[str], Counter[str]]:
        """What was heard so far, by the messages' names, and why some were refused. Sets `slowest`."""
        counts, refused = Counter[str](), Counter[str]()
        for end in self._ends:
            end.send(("look", ()))
        for end in self._ends:
            _, more, why, slowest = end.recv()
            self.slowest = max(self.slowest, slowest)
            counts.update(more)
            refused.update(why)
        return counts, refused

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.send(("end", ()))
        for process in self._processes:
            process.join(10)
            process.kill()


# -- the hub -----------------------------------------------------------------------------------------------


class HubProcess:
    """A hub of a run of `count` workers, on one core."""

    def __init__(self, count: int, folder: Path, core: int) -> None:
        self.folder = folder
        atoll = str(Path(sys.executable).with_name("atoll"))
        command = [atoll, "hub", "--workers", str(count), "--shards", "0"]
        command += ["--listen", "tcp://127.0.0.1:0", "--directory", str(folder)]
        self._log = (folder.parent / "hub.log").open("wb")
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        until = time.monotonic() + DEADLINE
        while not (folder / ADDRESS_FILE).exists():
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit((folder.parent / "hub.log").read_text())
            time.sleep(0.05)
        self.address = (folder / ADDRESS_FILE).read_text().strip()
        self.port = int(self.address.rpartition(":")[2])

    def cpu(self) -> float:
        """Its seconds on the processor so far, of all its threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def megabytes(self, which: str = "VmRSS") -> float:
        """Its memory now, or (VmHWM) at the most."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith(which + ":"):
                return int(line.split()[1]) / 1e3
        raise ValueError(which)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


class Stranger:
    """Asks the hub which run it is of, and takes the time."""

    def __init__(self, address: str) -> None:
        self._client = Client(address, None, limit=2**20, name="hub")
        self.ask()

    def ask(self) -> float:
        start = time.perf_counter()
        ask(self._client, Hello(version=VERSION, run="", role="guest"), Welcome, DEADLINE, "a welcome")
        return time.perf_counter() - start

    def close(self) -> None:
        self._client.close()


# -- measuring ---------------------------------------------------------------------------------------------


@dataclass
class Found:
    """One run's figures. `*_cpu` are the hub's seconds on the processor in that phase."""

    workers: int
    connections: int  # of each
    machine: int  # workers that share a launcher; 1: there is none
    heartbeat: float
    silence: float  # seconds that are borne at least
    joined: float
    grouped: float
    join_cpu: float
    beats: float  # share of a core
    beats_per_second: float
    messages_per_second: float  # that they took
    answered: float  # seconds that a stranger waits: median
    answered_most: float
    deaths: float
    deaths_cpu: float
    buried_alive: int
    workers_late: float  # seconds between two heartbeats of one worker at the most: this machine's doing
    news: float  # messages to each survivor for all the deaths together
    returned: float
    return_cpu: float
    refused: dict[str, int]
    megabytes: float
    megabytes_most: float
    megabytes_after: float
    load: float  # of the machine, as it began

    def verdicts(self) -> dict[str, bool]:
        """Which targets are met."""
        return {
            "joined": self.grouped <= TARGETS["joined"],
            "beats": self.beats <= TARGETS["beats"],
            "deaths": self.deaths <= TARGETS["deaths"] * self.silence and not self.buried_alive,
            "returned": self.returned <= TARGETS["returned"],
            "megabytes": self.megabytes_most <= TARGETS["megabytes"],
        }

    def line(self) -> str:
        met = ", ".join(f"{what} {'met' if is_met else 'MISSED'}" for what, is_met in self.verdicts().items())
        return (
            f"{self.workers} workers, {self.connections} connections each, {self.machine} to a machine: "
            f"joined after "
            f"{self.joined:.1f} s, grouped after {self.grouped:.1f} s "
            f"(hub {self.join_cpu:.1f} s); heartbeats each {self.heartbeat:g} s take {self.beats:.2f} of a "
            f"core ({self.beats_per_second:.0f}/s in {self.messages_per_second:.0f} messages), "
            f"a stranger waits {1e3 * self.answered:.1f} ms, at most "
            f"{1e3 * self.answered_most:.0f} ms; half dead known after {self.deaths:.1f} s (hub "
            f"{self.deaths_cpu:.1f} s, {self.silence:g} s are borne, {self.buried_alive} buried alive, "
            f"a worker itself was silent for {self.workers_late:.1f} s); "
            f"returned after {self.returned:.1f} s (hub {self.return_cpu:.1f} s); "
            f"{self.megabytes:.0f} MB, at most {self.megabytes_most:.0f}, after all left "
            f"{self.megabytes_after:.0f}; refused {self.refused}; {met}"
        )


def wait_for(condition: Callable[[], bool], deadline: float = DEADLINE) -> float:
    """The seconds until then; infinity when it takes too long."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > deadline:
            return float("inf")
        time.sleep(0.05)
    return time.monotonic() - start


def measure(count: int, connections: int, machine: int, steady: float, cores: Sequence[int]) -> Found:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place) / "hub"
        hub = HubProcess(count, folder, cores[0])
        stack.callback(hub.close)
        workers = Workers(hub.port, count, connections, machine, cores[1])
        stack.callback(workers.close)
        stranger = Stranger(hub.address)
        stack.callback(stranger.close)
        decisions = decision_reader(folder)

        spent = hub.cpu()
        workers.tell("connect")
        joined = wait_for(lambda: workers.look()[0]["Welcome"] >= count)
        grouped = joined + wait_for(lambda: workers.look()[0]["Gathered"] >= count)
        join_cpu = hub.cpu() - spent

        time.sleep(1.0)
        before, spent, start = workers.look()[0], hub.cpu(), time.monotonic()
        waits = []
        while time.monotonic() < start + steady:
            waits.append(stranger.ask())
            time.sleep(0.1)
        took = time.monotonic() - start
        beats, after = (hub.cpu() - spent) / took, workers.look()[0]
        rate, messages = ((after[each] - before[each]) / took for each in ("beats", "spoken"))
        megabytes = hub.megabytes()
        heartbeat = heartbeat_of(hub.address)

        dead: set[int] = set()
        odd: list[Any] = []

        def known(vanished: set[int]) -> bool:
            for each in decisions.read():
                if each.what == "worker died":
                    incarnation = int(each.choice.rpartition(" ")[2])
                    dead.add(incarnation)
                    if incarnation not in vanished and len(odd) < 3:
                        odd.append(each)
                        print(f"  {time.time() - each.time:.1f} s ago: {each.reason}", flush=True)
            return vanished <= dead

        known(set())
        early = len(dead)
        told, spent = workers.look()[0]["RingNews"], hub.cpu()
        vanished = workers.vanish()
        deaths = wait_for(lambda: known(vanished))
        deaths_cpu = hub.cpu() - spent
        alive = early + len(dead - vanished)
        news = (workers.look()[0]["RingNews"] - told) / max(1, count - len(vanished))

        spent = hub.cpu()
        workers.tell("reconnect")
        left = count - len(vanished) - alive
        returned = wait_for(lambda: workers.look()[0]["Welcome"] >= left)
        return_cpu = hub.cpu() - spent
        known(set())
        alive = early + len(dead - vanished)
        refused = workers.look()[1]
        workers.tell("leave")
        time.sleep(2.0)
        workers.close()
        time.sleep(12.0)
        return Found(
            workers_late=workers.slowest,
            workers=count,
            connections=connections,
            machine=machine,
            heartbeat=heartbeat,
            silence=max(3.25 + heartbeat, 3 * heartbeat),
            joined=joined,
            grouped=grouped,
            join_cpu=join_cpu,
            beats=beats,
            beats_per_second=rate,
            messages_per_second=messages,
            answered=statistics.median(waits),
            answered_most=max(waits),
            deaths=deaths,
            deaths_cpu=deaths_cpu,
            buried_alive=alive,
            news=news,
            returned=returned,
            return_cpu=return_cpu,
            refused=dict(refused),
            megabytes=megabytes,
            megabytes_most=hub.megabytes("VmHWM"),
            megabytes_after=hub.megabytes(),
            load=load,
        )


def heartbeat_of(address: str) -> float:
    """How often the hub wants to hear each."""
    with Client(address, None, limit=2**20, name="hub") as client:
        hello = Hello(version=VERSION, run="", role="guest")
        return ask(client, hello, Welcome, DEADLINE, "a welcome")[0].heartbeat


def draw(found: Sequence[Found], path: Path) -> None:
    """Times by the number of workers, the share of a core, and the memory, with the targets."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    every, found = found, [each for each in found if each.machine == max(each.machine for each in found)]
    counts = [each.workers for each in found]
    figure, (times, core, memory) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for name, colour, values in (
        ("all grouped", "#2b6ca3", [each.grouped for each in found]),
        ("half dead, all known", "#c23b22", [each.deaths for each in found]),
        ("all returned", "#2a9d8f", [each.returned for each in found]),
    ):
        times.plot(counts, values, "o-", color=colour, label=name)
    times.axhline(TARGETS["joined"], color="#888888", linewidth=1, linestyle=":")
    times.set_ylabel("seconds (dotted: target)")
    times.legend(frameon=False, fontsize=8)
    for machine, colour in zip(
        sorted({each.machine for each in every}), ("#e9a23b", "#2b6ca3"), strict=False
    ):
        of_it = [each for each in every if each.machine == machine]
        label = "each for itself" if machine == 1 else f"a launcher for {machine}"
        core.plot([e.workers for e in of_it], [e.beats for e in of_it], "o-", color=colour, label=label)
    core.legend(frameon=False, fontsize=8)
    core.axhline(TARGETS["beats"], color="#888888", linewidth=1, linestyle=":")
    core.set_ylabel("of a core, for heartbeats")
    memory.plot(counts, [each.megabytes_most for each in found], "o-", color="#2b6ca3", label="at most")
    memory.plot(
        counts, [each.megabytes_after for each in found], "o-", color="#e9a23b", label="after all left"
    )
    memory.axhline(TARGETS["megabytes"], color="#888888", linewidth=1, linestyle=":")
    memory.set_ylabel("MB of the hub's process")
    memory.legend(frameon=False, fontsize=8)
    for axes in (times, core, memory):
        axes.set_xlabel("workers")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def raise_hard_limit(needed: int) -> int:
    """How many descriptors a process may have from now on: `needed`, if this user may raise the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (max(hard, needed), hard):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            return limit
    return soft


def record(found: Found) -> Mapping[str, Any]:
    return {**asdict(found), "targets": TARGETS, "met": found.verdicts()}


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", help=f"how many (default: {WORKERS})")
    parser.add_argument(
        "--machine", type=int, nargs="+", default=MACHINES, help=f"workers to a launcher ({MACHINES})"
    )
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this needs two cores: one for the hub, one for the workers")
    counts = args.workers or (QUICK_WORKERS if args.quick else WORKERS)
    limit = raise_hard_limit(3 * max(counts) + 1000)
    if limit < 1.5 * max(counts) + 100:
        raise SystemExit(f"{max(counts)} workers take a descriptor each, and {limit} is the most here")
    steady, start = QUICK_STEADY_SECONDS if args.quick else STEADY_SECONDS, time.monotonic()
    found = []
    for count in counts:
        for machine in args.machine:
            launchers = -(-count // machine) if machine > 1 else 0
            each = 2 if limit >= 2 * count + launchers + 100 else 1
            found.append(measure(count, each, machine, steady, cores))
            print(found[-1].line(), flush=True)
    path = write_results("hub_scale", output_folder(args), [record(each) for each in found], args.quick)
    draw(found, path.with_suffix(".png"))
    print(f"in {time.monotonic() - start:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
