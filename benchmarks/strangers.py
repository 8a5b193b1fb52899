"""(v) Training beside strangers: connections and datagrams without the run's key, as fast as they come.

    python benchmarks/strangers.py [--quick] [--rounds N] [--case strangers|flood|datagrams ...]

Two trainings run side by side, each a hub, a shard and a worker: processes of their own at TCP ports with
keys, with the usual soft limit of 1,024 descriptors and a snapshot every two seconds. The worker trains a
small MLP under bsp. In each round strangers attack one of the two for a minute, in the next round the other
one. Both share the processor with each other and with the strangers, so the ratio of their rates shows what
an attack costs beyond the processor that the attackers take themselves, whatever else the machine does.

- strangers: 5,000 silent connections to the shard, kept up, and 400 others a second (`KINDS`: noise, half
  handshakes, greetings, giant frames), half of them to the hub;
- flood: the silent ones, and two processes that open the others as fast as they can;
- datagrams: training over datagrams (link.transport = "ltp"), and 20,000 datagrams a second of all kinds, to
  the ports of the shard and the worker; a sixth of them name the open session, whose number the sender has
  read from the network. To read it takes root.

With connections, a client with the key asks the attacked hub five times a round, and the benchmark checks
that the shard goes on writing snapshots.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import resource
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.net.endpoint import Client
from atoll.net.keys import read_keys
from atoll.net.requests import ask
from atoll.wire.messages import VERSION, Hello, Welcome
from common import options, output_folder, write_results

SECONDS, QUICK_SECONDS = 60.0, 4.0
ROUNDS, QUICK_ROUNDS = 6, 2
SILENT = 5000  # connections that are kept up
PACE = 400  # connections a second
DATAGRAMS = 20_000  # a second
SOFT_LIMIT = 1024  # descriptors of hub, shard and worker
DEADLINE = 60.0  # seconds for a process to start
TARGETS = {"strangers": 0.95, "flood": None, "datagrams": 0.8}
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + bytes(range(120))
_PLAIN = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
KINDS = (
    bytes(range(256)) * 16,  # noise
    _PLAIN + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
    _GREETING + bytes(range(256)) * 8,
    _GREETING + _HELLO,
    _GREETING + b"\x06" + struct.pack(">Q", 2**62) + bytes(1000),
    _GREETING[:40],
    _GREETING[:10],
)


# -- who is trained ----------------------------------------------------------------------------------------

WORKER = """
import mmap, os, sys
import torch
import atoll

torch.set_num_threads(1)
with open(sys.argv[1], "r+b") as file, atoll.join() as session:
    made = mmap.mmap(file.fileno(), 8)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session.prepare(model, optimizer)
    inputs, labels = torch.randn(64, 64), torch.randint(10, (64,))
    while not os.path.exists(sys.argv[2]):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        made[:] = session.iteration.to_bytes(8, "little")
"""


class Training:
    """A hub, a shard and a worker that trains until `close`; `stack` kills all three."""

    def __init__(self, folder: Path, transport: str, stack: contextlib.ExitStack) -> None:
        self._stop, self._made = folder / "stop", folder / "made"
        self._made.write_bytes(bytes(8))
        self._key = folder / "run.key"
        self._stack = stack
        atoll = str(Path(sys.executable).with_name("atoll"))
        subprocess.run([atoll, "keys", str(self._key)], check=True, stdout=subprocess.DEVNULL)
        (folder / "worker.py").write_text(WORKER)
        (folder / "atoll.toml").write_text(
            f'[run]\nstrategy = "server"\n[sync]\nconsistency = "bsp"\n[link]\ntransport = "{transport}"\n'
        )
        hub = [
            atoll,
            "hub",
            "--workers",
            "1",
            "--listen",
            "tcp://127.0.0.1:0",
            "--directory",
            str(folder / "hub"),
        ]
        self.hub = self._start("hub", hub, folder)
        self.address = _address(folder / "hub" / "hub.address", self.hub)
        shard = [atoll, "server", "--hub", self.address, "--shard", "0", "--listen", "tcp://127.0.0.1:0"]
        self.snapshots = folder / "shard"
        self.shard = self._start(
            "shard", [*shard, "--directory", str(self.snapshots), "--snapshot-seconds", "2"], folder
        )
        worker = [sys.executable, str(folder / "worker.py"), str(self._made), str(self._stop)]
        self.worker = self._start("worker", worker, folder, ATOLL_HUB=self.address)
        until = time.monotonic() + DEADLINE
        while not self.made():
            if time.monotonic() > until or self.worker.poll() is not None:
                raise SystemExit("\n".join(each.read_text() for each in folder.glob("*.log")))
            time.sleep(0.1)
        self.hub_port = int(self.address.rpartition(":")[2])
        self.shard_port = listening_port(self.shard.pid)

    def _start(self, name: str, command: Sequence[str], folder: Path, **more: str) -> subprocess.Popen[bytes]:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        log = self._stack.enter_context((folder / f"{name}.log").open("wb"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ATOLL_KEY_FILE": str(self._key), **more}
        environment["ATOLL_CONFIG"] = str(folder / "atoll.toml")
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, hard)),
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def made(self) -> int:
        """Iterations so far."""
        return int.from_bytes(self._made.read_bytes(), "little")

    def processor(self) -> float:
        """Seconds on the processor of all three so far."""
        return sum(_processor_seconds(each.pid) for each in (self.hub, self.shard, self.worker))

    def let_in(self) -> float:
        """Seconds until a client with the key has an answer of the hub."""
        begun = time.monotonic()
        with Client(self.address, read_keys(self._key), limit=2**20, name="hub") as client:
            ask(client, Hello(version=VERSION, run="", role="guest"), Welcome, DEADLINE, "a welcome")
        return time.monotonic() - begun

    def newest_snapshot(self) -> float:
        """When the newest of the shard's snapshots was written, in seconds since 1970."""
        return max((each.stat().st_mtime for each in self.snapshots.rglob("*snapshot*")), default=0.0)

    def living(self) -> bool:
        return all(each.poll() is None for each in (self.hub, self.shard, self.worker))

    def close(self) -> None:
        self._stop.touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.worker.wait(10)


def _address(path: Path, process: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + DEADLINE
    while not path.exists():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"no {path}")
        time.sleep(0.05)
    return path.read_text().strip()


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _inodes(pid: int) -> set[str]:
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(each.readlink()).removeprefix("socket:[").rstrip("]"))
    return found


def _ports(pid: int, table: str, state: str) -> list[int]:
    """Ports of the process's sockets in that state of a table of /proc/net."""
    ours = _inodes(pid)
    rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == state and row[9] in ours]


def listening_port(pid: int) -> int:
    """The TCP port at which the process listens."""
    return _ports(pid, "tcp", "0A")[0]


def udp_port(pid: int) -> int:
    """The port at which the process hears datagrams: a worker's takes both families of addresses."""
    (port,) = [port for table in ("udp", "udp6") for port in _ports(pid, table, "07")]
    return port


def seen_session(port: int) -> int:
    """The number of the session at that port, read from a datagram on its way, which takes root."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800)) as ear:  # IPv4
        ear.bind(("lo", 0))
        ear.settimeout(DEADLINE)
        while True:
            raw = ear.recv(65535)  # 20 bytes of IP, 8 of UDP, then ours
            if raw[9] == socket.IPPROTO_UDP and raw[22:24] == struct.pack(">H", port) and len(raw) > 44:
                return int.from_bytes(raw[32:36], "little")


# -- strangers ---------------------------------------------------------------------------------------------


def keep_silent(port: int, want: int) -> None:
    """Keep `want` connections up that say nothing; those that are dropped are made again."""
    poll, links = select.poll(), dict[int, socket.socket]()
    while True:
        for descriptor, _ in poll.poll(0):
            poll.unregister(descriptor)
            links.pop(descriptor).close()
        for _ in range(min(500, want - len(links))):
            link = socket.socket()
            link.setblocking(False)
            with contextlib.suppress(OSError):
                link.connect(("127.0.0.1", port))
            links[link.fileno()] = link
            poll.register(link, select.POLLRDHUP | select.POLLHUP)
        time.sleep(0.1)


def knock(ports: Sequence[int], pace: float) -> None:
    """Open connections of all kinds, `pace` a second, or (0) as fast as it goes; keep the latest 200."""
    links: list[socket.socket] = []
    begun, kinds = time.monotonic(), itertools.cycle(KINDS)
    for number in itertools.count():
        link = socket.socket()
        link.settimeout(2.0)
        with contextlib.suppress(OSError):
            link.connect(("127.0.0.1", ports[number % len(ports)]))
            link.sendall(next(kinds))
        links.append(link)
        if len(links) > 200:
            links.pop(0).close()
        if pace:
            time.sleep(max(0.0, begun + number / pace - time.monotonic()))


def send_datagrams(ports: Sequence[int], session: int, pace: float) -> None:
    """Send datagrams of all kinds, `pace` a second, to each port in turn."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        noise, begun = os.urandom(9000), time.monotonic()
        for number in itertools.count():
            head = bytes([1, 1, 0, number % 4]) + session.to_bytes(4, "little") + number.to_bytes(8, "little")
            strange = bytes([1, 1, 0, 0]) + (99).to_bytes(4, "little") + number.to_bytes(8, "little")
            kinds = (
                noise[:200],
                b"\x02" + noise[:1000],
                strange + noise[:1000],
                b"\x01",
                noise,
                head + noise[:1300],
            )
            out.sendto(kinds[number % len(kinds)], ("127.0.0.1", ports[number % len(ports)]))
            if number % 100 == 0:
                time.sleep(max(0.0, begun + number / pace - time.monotonic()))


@contextlib.contextmanager
def strangers(orders: Sequence[tuple[Any, ...]]) -> Iterator[None]:
    """Processes that do that meanwhile: each a function's name and its arguments."""
    processes = [
        subprocess.Popen([sys.executable, __file__, "--stranger", json.dumps(order)], start_new_session=True)
        for order in orders
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def be_a_stranger(order: str) -> None:
    name, *arguments = json.loads(order)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    {"silent": keep_silent, "knock": knock, "datagrams": send_datagrams}[name](*arguments)


def orders_of(case: str, training: Training) -> list[tuple[Any, ...]]:
    """What strangers do to that training."""
    if case == "datagrams":
        ports = [udp_port(each.pid) for each in (training.shard, training.worker)]
        return [("datagrams", ports, seen_session(ports[0]), DATAGRAMS)]
    silent, both = ("silent", training.shard_port, SILENT), [training.shard_port, training.hub_port]
    if case == "strangers":
        return [silent, ("knock", both, PACE)]
    return [silent, ("knock", both, 0), ("knock", both[::-1], 0)]


# -- measuring ---------------------------------------------------------------------------------------------


def measure_round(case: str, attacked: Training, spared: Training, seconds: float) -> dict[str, Any]:
    """Rates and processor time of both trainings while one is attacked."""
    both = (attacked, spared)
    with strangers(orders_of(case, attacked)):
        time.sleep(3.0)  # until strangers are there
        made, spent = [each.made() for each in both], [each.processor() for each in both]
        begun, before, waits = time.monotonic(), time.time(), []
        for _ in range(5):
            time.sleep(seconds / 5)
            if case != "datagrams":
                waits.append(attacked.let_in())
        took = time.monotonic() - begun
        made = [each.made() - other for each, other in zip(both, made, strict=True)]
        spent = [each.processor() - other for each, other in zip(both, spent, strict=True)]
        if not all(each.living() for each in both):
            raise SystemExit(f"a run ended: {case}")
        return {
            "seconds": took,
            "rates": [each / took for each in made],  # of the attacked one, and of the other
            "ratio": made[0] / made[1],
            "milliseconds": [1e3 * cpu / each for cpu, each in zip(spent, made, strict=True)],
            "let_in": waits,
            "snapshots": attacked.newest_snapshot() > before,
        }


def measure(case: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Attack the two trainings in turn, `rounds` times."""
    load, found = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        pair = []
        for each in ("one", "other"):
            folder = Path(place) / each
            folder.mkdir()
            pair.append(Training(folder, "ltp" if case == "datagrams" else "tcp", stack))
        time.sleep(2.0)
        for number in range(rounds):
            attacked, spared = pair if number % 2 == 0 else pair[::-1]
            found.append(measure_round(case, attacked, spared, seconds))
            print(f"{case}: {found[-1]}", flush=True)
        for each in pair:
            each.close()
    ratios = [each["ratio"] for each in found]
    swapped = [math.sqrt(a * b) for a, b in zip(ratios[::2], ratios[1::2], strict=False)]
    ratio, target = statistics.median(swapped), TARGETS[case]
    met = None if target is None else ratio >= target
    return {
        "case": case,
        "load": load,
        "rounds": found,
        "ratios": swapped,
        "ratio": ratio,
        "target": target,
        "met": met,
    }


def draw(cases: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Rates of the attacked training to those of the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.4), layout="constrained")
    for at, case in enumerate(cases):
        axes.bar(at, case["ratio"], color="#2b6ca3")
        axes.plot([at] * len(case["ratios"]), case["ratios"], "o", color="#e9a23b", markersize=4)
        if case["target"] is not None:
            axes.plot([at - 0.4, at + 0.4], [case["target"]] * 2, ":", color="#888888")
    axes.set_xticks(range(len(cases)), [case["case"] for case in cases])
    axes.set_ylabel("rate of the attacked run / the other\n(dots: pairs of rounds; dotted: target)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, help="an even number")
    parser.add_argument("--case", choices=list(TARGETS), nargs="+", default=list(TARGETS))
    parser.add_argument("--stranger", help="what a process of this benchmark's own is to do")
    args = parser.parse_args()
    if args.stranger:
        be_a_stranger(args.stranger)
    seconds = QUICK_SECONDS if args.quick else SECONDS
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    cases = [measure(case, seconds, rounds) for case in args.case]
    path = write_results("strangers", output_folder(args), cases, args.quick)
    draw(cases, path.with_suffix(".png"))
    for case in cases:
        verdict = {None: "no target", True: "met", False: "MISSED"}[case["met"]]
        print(f"{case['case']}: {case['ratio']:.3f} of the rate of the run beside it ({verdict})")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
