"""(o) Messages through a tunnel, beside ZeroMQ over TCP: small ones, and those of a step of training.

    python benchmarks/tunnel.py [--quick] [--rounds N]

In the lab: a server and a client, and a link of 200 Mbit/s with a round trip of 40 ms between them, without
loss, and with 3 % in bursts of 8 packets; and once over loopback. The client has a connection of each kind
to the same server, and they take turns, in a new random order each round:

- ping: 100 bytes there and back, one at a time;
- flood: 2,000 of them at once, until all are back;
- step: a gradient of 0.4 MB and a word; the mean of 0.4 MB comes back; a word; parameters of 0.4 MB come
  back. Through a tunnel the gradient is lossy, or, for a third contestant, reliable like the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atoll.lab.emulator import available
from atoll.lab.namespaces import find_way
from atoll.net.endpoint import Client, poll
from atoll.net.keys import Keys, make_keys, read_keys, write_keys
from atoll.net.tunnel import Lossy, TunnelClient, TunnelServer
from common import options, output_folder, write_results
from support.sites import Sites, pair, phase

INSIDE = "ATOLL_BENCHMARK_INSIDE"
LINKS = {
    "loopback": None,
    "200 Mbit/s, 40 ms": (0.0, 1.0),
    "200 Mbit/s, 40 ms, 3 % lost in bursts of 8": (0.03, 8.0),
}
KINDS = ("tcp", "tunnel, lossy", "tunnel, reliable")
RATE, DELAY = 200e6, 0.02
ELEMENTS, HIGH = 100_000, 1 / 3  # of the gradient, float32; the share of its blocks that arrive in the end
PINGS, FLOOD, STEPS, WARM = 20, 2000, 4, 10  # of a turn; steps before the first, in which rates are found
BLOCK = 330  # float32 in a datagram
LIMIT = 2**26
DEADLINE = 60.0  # seconds, of each wait


@dataclass
class Case:
    """One contestant on one link. Times in ms."""

    link: str
    kind: str
    pings: list[float] = field(default_factory=list)
    floods: list[float] = field(default_factory=list)  # messages per second, there and back
    steps: list[float] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        def at(values: list[float], share: float) -> float:
            return round(float(np.quantile(values, share)), 2)

        return {
            "link": self.link,
            "kind": self.kind,
            "ping": at(self.pings, 0.5),
            "ping_p99": at(self.pings, 0.99),
            "messages": round(at(self.floods, 0.5)),
            "step": at(self.steps, 0.5),
            "step_p90": at(self.steps, 0.9),
            "rounds": len(self.floods),
        }


# -- the two ends ------------------------------------------------------------------------------------------


def serve(address: str, keys: Keys) -> None:
    """Answer, until killed."""
    values = np.ones(ELEMENTS, dtype=np.float32)
    with TunnelServer(address, keys, limit=LIMIT, name="server") as door:
        print(door.address, flush=True)
        while True:
            poll([door], 1.0)
            while (got := door.receive(0)) is not None:
                if got.header == b"word":
                    door.offer(got.peer, b"values", values.data, copy=False)
                elif got.payload is None:
                    door.offer(got.peer, got.header)


class Talker:
    """A connection of one kind, and what is measured with it."""

    def __init__(self, kind: str, address: str, keys: Keys) -> None:
        make = Client if kind == "tcp" else TunnelClient
        self._client = make(address, keys, limit=LIMIT, name="server")
        self._lossy = kind == "tunnel, lossy"
        self._iteration = 0
        rng = np.random.default_rng(0)
        self._gradient = rng.standard_normal(ELEMENTS, dtype=np.float32)
        blocks = -(-ELEMENTS // BLOCK)
        self._high = np.zeros(blocks, dtype=np.bool_)
        self._high[rng.permutation(blocks)[: round(HIGH * blocks)]] = True

    def _hear(self) -> None:
        until = time.monotonic() + DEADLINE
        while self._client.receive(0.5) is None:
            self._client.check()
            if self._client.losses or time.monotonic() > until:
                raise SystemExit(f"nothing came back: {self._client.trouble}")

    def ping(self) -> float:
        start = time.perf_counter()
        self._client.send(b"x" * 100)
        self._hear()
        return (time.perf_counter() - start) * 1e3

    def flood(self) -> float:
        start = time.perf_counter()
        for _ in range(FLOOD):
            self._client.send(b"x" * 100)
        for _ in range(FLOOD):
            self._hear()
        return FLOOD / (time.perf_counter() - start)

    def step(self) -> float:
        start = time.perf_counter()
        self._iteration += 1
        if self._lossy and isinstance(self._client, TunnelClient):
            lossy = Lossy(0, self._iteration, "float32", self._high)
            self._client.send(b"gradient", self._gradient.data, lossy)
        else:
            self._client.send(b"gradient", self._gradient.data)
        for _ in range(2):
            self._client.send(b"word")
            self._hear()
        return (time.perf_counter() - start) * 1e3

    def close(self) -> None:
        self._client.close()


def talk(address: str, keys: Keys, link: str, rounds: int) -> None:
    """Be the client; prints a line of JSON for each kind."""
    order = random.Random(0)
    talkers = {kind: Talker(kind, address, keys) for kind in KINDS}
    cases = {kind: Case(link, kind) for kind in KINDS}
    for talker in talkers.values():
        for _ in range(WARM):
            talker.step()
    for _ in range(rounds):
        for kind in order.sample(KINDS, len(KINDS)):
            talker, case = talkers[kind], cases[kind]
            case.pings += [talker.ping() for _ in range(PINGS)]
            case.floods.append(talker.flood())
            case.steps += [talker.step() for _ in range(STEPS)]
    for case in cases.values():
        print(json.dumps(asdict(case)), flush=True)
    for talker in talkers.values():
        talker.close()


# -- both, on a link ---------------------------------------------------------------------------------------


Start = Callable[..., "subprocess.Popen[str]"]


@contextlib.contextmanager
def ends(loss: tuple[float, float] | None) -> Iterator[tuple[Start, Start, str]]:
    """How the server and the client are started, and the server's host."""
    if loss is None:

        def here(command: list[str]) -> subprocess.Popen[str]:
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

        yield here, here, "127.0.0.1"
        return
    qualities = {"delay": DELAY, "loss": loss[0], "burst": loss[1]}
    with Sites(pair([phase(RATE, **qualities)])) as sites:
        yield (
            lambda command: sites.start(0, command),
            lambda command: sites.start(1, command),
            sites.address(0),
        )


def measure(link: str, keys: Path, rounds: int) -> list[Case]:
    """The three kinds on this link."""
    with ends(LINKS[link]) as (start_server, start_client, host):
        me = [sys.executable, __file__, "--keys", str(keys)]
        server = start_server([*me, "--serve", f"tcp://{host}:0"])
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            client = start_client([*me, "--talk", address, "--link", link, "--rounds", str(rounds)])
            out, _ = client.communicate(timeout=DEADLINE + 20.0 * rounds)
        finally:
            server.kill()
            server.wait(DEADLINE)
    if client.returncode:
        raise SystemExit(f"{link}: the client ended with status {client.returncode}")
    return [Case(**json.loads(line)) for line in out.splitlines()]


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", help="used by the benchmark itself")
    parser.add_argument("--talk", help="used by the benchmark itself")
    parser.add_argument("--link", help="used by the benchmark itself")
    parser.add_argument("--keys", help="used by the benchmark itself")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, read_keys(args.keys))
    if args.talk:
        talk(args.talk, read_keys(args.keys), args.link, args.rounds)
        return 0
    if INSIDE not in os.environ:
        if reason := available():
            print(f"left out: {reason}")
            return 0
        command = [*find_way(), sys.executable, __file__, *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, INSIDE: "1"}, check=False).returncode
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)  # of this namespace
    rounds = 3 if args.quick else args.rounds
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        write_keys(keys, make_keys())
        records = [case.record() for link in LINKS for case in measure(link, keys, rounds)]
    for each in records:
        print(
            f"{each['link']}, {each['kind']}: ping {each['ping']} ms (99 %: {each['ping_p99']}), "
            f"{each['messages']} messages/s, step {each['step']} ms (90 %: {each['step_p90']})"
        )
    print(write_results("tunnel", output_folder(args), records, args.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
