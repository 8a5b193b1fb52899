"""The two ends of benchmarks/fairness.py and benchmarks/incast.py, which start each in a site of the lab.

    python benchmarks/shared_worker.py shard PLAN
    python benchmarks/shared_worker.py workers PLAN

PLAN is JSON (`Plan`). The workers' flows end at the shard, each over a connection of its own: `ltp` ones are
sessions of links of their own, others are TCP with that congestion control. Each end says what it has to say
as lines of JSON: the shard where it listens, both at the end what they measured. Times are of
CLOCK_MONOTONIC, which both ends share.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from atoll.ltp.events import Arrived, Delivered, Opened
from atoll.ltp.order import Extent
from atoll.ltp.settings import LtpSettings
from atoll.net.linksession import LinkSession
from atoll.net.ltplink import LtpLink
from atoll.wire.datagrams import payload_bytes

LTP = "ltp"
CHUNK, ITEM = 0, 4  # float32
HIGH = 0.2  # of the blocks
EVERY = 0.1  # seconds from one look at the flows to the next
PATIENCE = 60.0  # seconds for anything that one end waits for
INFO_BYTES = 256  # of Linux' struct tcp_info (include/uapi/linux/tcp.h): microseconds, bytes
RTT_AT, MIN_RTT_AT, ACKED_AT = 68, 148, 120


@dataclass(frozen=True)
class Plan:
    """What both ends do. Either flows that are sent for `seconds` from `starts` (one for each) on, or answers
    of `size` bytes of every flow to the shard's word, `rounds` times after `warm` ones."""

    host: str  # the shard's
    port: int  # TCP, one; UDP too
    flows: tuple[str, ...]  # ltp, cubic, bbr
    size: int  # bytes of a transfer or answer
    seconds: float = 0.0
    starts: tuple[float, ...] = ()
    rounds: int = 0
    warm: int = 0
    link_rate: float | None = None  # bytes per second of datagrams: the shard grants shares of it
    secrets: tuple[str, ...] = ()  # hexadecimal, of the ltp flows


@dataclass
class Seen:
    """A flow at one moment, by its sender: bytes that came, seconds of round trip and of the least one."""

    at: list[float] = field(default_factory=list)
    came: list[int] = field(default_factory=list)
    rtt: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    why: list[str] = field(default_factory=list)


def sessions_of(plan: Plan) -> Iterator[tuple[int, int, bytes]]:
    """Flow, session's number and secret of the ltp ones."""
    numbers = [number for number, flow in enumerate(plan.flows) if flow == LTP]
    for number, secret in zip(numbers, plan.secrets, strict=True):
        yield number, number + 1, bytes.fromhex(secret)


def settings() -> LtpSettings:
    return LtpSettings()


def high(values: np.ndarray[Any, Any], seed: int) -> np.ndarray[Any, Any]:
    blocks = -(-values.nbytes // payload_bytes(settings().datagram_bytes))
    mask = np.zeros(blocks, dtype=np.bool_)
    mask[np.random.default_rng(seed).permutation(blocks)[: round(HIGH * blocks)]] = True
    return mask


# -- the shard ----------------------------------------------------------------------------------------------


class Shard:
    """Takes everything; asks for answers, if that is the plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.arrived: list[tuple[int, float]] = []  # flow, when
        self._condition = threading.Condition()
        self._opened = 0  # sessions
        self.sessions: dict[int, LinkSession] = {}
        self.links: dict[int, socket.socket] = {}
        if LTP in plan.flows:
            self.link = LtpLink(plan.host, (plan.port,), name="shard", link_rate=plan.link_rate)
            for flow, number, secret in sessions_of(plan):
                most = {CHUNK: Extent(plan.size // ITEM, np.dtype(np.float32))}
                session = self.link.open(number, secret, None, False, settings=settings(), extents=most)
                self.sessions[flow] = session
                threading.Thread(target=self._take_ltp, args=(flow, session), daemon=True).start()
        self.listener = socket.create_server((plan.host, plan.port), backlog=64)

    def accept(self) -> None:
        """The TCP flows' connections; each says its number first."""
        self.listener.settimeout(PATIENCE)
        for _ in range(sum(flow != LTP for flow in self.plan.flows)):
            link, _ = self.listener.accept()
            link.settimeout(None)
            flow = link.recv(1)[0]
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.links[flow] = link
            threading.Thread(target=self._take_tcp, args=(flow, link), daemon=True).start()
        with self._condition:
            if not self._condition.wait_for(lambda: self._opened == len(self.sessions), PATIENCE):
                raise SystemExit(f"{self._opened} of {len(self.sessions)} sessions opened in {PATIENCE:g} s")

    def answers(self) -> list[list[float]]:
        """Seconds from the shard's word until each flow's answer is of use, for each round."""
        found = []
        for number in range(self.plan.warm + self.plan.rounds):
            with self._condition:
                self.arrived.clear()
            began = time.monotonic()
            for flow in range(len(self.plan.flows)):
                if flow in self.sessions:
                    self.sessions[flow].send(CHUNK, number, np.zeros(1, np.float32), reliable=True)
                else:
                    self.links[flow].sendall(b"x")
            with self._condition:
                count = len(self.plan.flows)
                if not self._condition.wait_for(lambda: len(self.arrived) == count, PATIENCE):  # noqa: B023
                    raise SystemExit(
                        f"round {number}: {len(self.arrived)} of {count} answers in {PATIENCE:g} s"
                    )
                found.append([when - began for _, when in sorted(self.arrived)])
            time.sleep(0.3)  # the last repairs and words
        return found[self.plan.warm :]

    def _note(self, flow: int) -> None:
        with self._condition:
            self.arrived.append((flow, time.monotonic()))
            self._condition.notify_all()

    def _take_ltp(self, flow: int, session: LinkSession) -> None:
        with contextlib.suppress(Exception):  # the end: the process is over
            while True:
                for event in session.events(EVERY):
                    if isinstance(event, Arrived):
                        self._note(flow)
                    elif isinstance(event, Opened):
                        with self._condition:
                            self._opened += 1
                            self._condition.notify_all()

    def _take_tcp(self, flow: int, link: socket.socket) -> None:
        memory, got = bytearray(2**18), 0
        while count := link.recv_into(memory):
            got += count
            while got >= self.plan.size:
                got -= self.plan.size
                self._note(flow)


# -- the workers --------------------------------------------------------------------------------------------


class LtpFlow:
    def __init__(self, plan: Plan, flow: int, number: int, secret: bytes, link: LtpLink) -> None:
        where = [(plan.host, plan.port)]
        word = {CHUNK: Extent(1, np.dtype(np.float32))}
        self.session = link.open(number, secret, where, True, settings=settings(), extents=word)
        self._values = np.ones(plan.size // ITEM, np.float32)
        self._high = high(self._values, flow)
        self._sent = self._open = 0
        until = time.monotonic() + PATIENCE
        self._early: list[Any] = []  # events: the shard's word may come with the opening
        while not any(isinstance(event, Opened) for event in self._early):
            self._early += self.session.events(EVERY)
            if time.monotonic() > until:
                raise SystemExit(f"flow {flow}: nothing was heard from the shard in {PATIENCE:g} s")

    def _send(self) -> None:
        self.session.send(CHUNK, self._sent, self._values, self._high)
        self._sent += 1
        self._open += 1

    def keep_sending(self, until: float) -> None:
        """Two transfers are always open."""
        while time.monotonic() < until:
            while self._open < 2:
                self._send()
            self._open -= sum(isinstance(event, Delivered) for event in self.session.events(EVERY))

    def answer(self, rounds: int) -> None:
        asked = 0
        until = time.monotonic() + rounds * PATIENCE
        while (asked < rounds or self._open) and time.monotonic() < until:
            events, self._early = self._early or self.session.events(EVERY), []
            for event in events:
                if isinstance(event, Arrived):
                    asked += 1
                    self._send()
                self._open -= isinstance(event, Delivered)

    def look(self, seen: Seen) -> None:
        status = self.session.status().session
        size = settings().datagram_bytes
        seen.came.append((status.sent - status.lost) * size - status.in_flight)
        seen.rtt.append(status.rtt)
        seen.least.append(status.min_rtt)
        seen.why.append(status.reason)


class TcpFlow:
    def __init__(self, plan: Plan, flow: int, control: str) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.connect((plan.host, plan.port))
        self._socket.sendall(bytes([flow]))
        self._memory = bytes(plan.size)

    def keep_sending(self, until: float) -> None:
        self._socket.settimeout(1.0)
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                self._socket.send(self._memory[: 2**18])

    def answer(self, rounds: int) -> None:
        for _ in range(rounds):
            if self._socket.recv(1):
                self._socket.sendall(self._memory)

    def look(self, seen: Seen) -> None:
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
        seen.came.append(struct.unpack_from("<Q", info, ACKED_AT)[0])
        seen.rtt.append(struct.unpack_from("<I", info, RTT_AT)[0] / 1e6)
        seen.least.append(struct.unpack_from("<I", info, MIN_RTT_AT)[0] / 1e6)
        seen.why.append("")


def work(plan: Plan) -> list[dict[str, Any]]:
    """All flows, each on a thread of its own; what was seen of them."""
    # Long flows have links of their own; for answers one link's thread costs less than eight in one process.
    link = LtpLink(ports=(0,), name="workers")
    ltp = {
        flow: (number, secret, link if plan.rounds else LtpLink(ports=(0,), name=f"worker {flow}"))
        for flow, number, secret in sessions_of(plan)
    }
    flows: list[LtpFlow | TcpFlow] = [
        LtpFlow(plan, flow, *ltp[flow]) if flow in ltp else TcpFlow(plan, flow, control)
        for flow, control in enumerate(plan.flows)
    ]
    if plan.rounds:
        threads = [threading.Thread(target=flow.answer, args=(plan.warm + plan.rounds,)) for flow in flows]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(plan.rounds * PATIENCE)
        return []
    began = time.monotonic()
    over = began + max(plan.starts) + plan.seconds

    def send(flow: LtpFlow | TcpFlow, start: float) -> None:
        time.sleep(start)
        flow.keep_sending(over)

    seen = [Seen() for _ in flows]
    for flow, start in zip(flows, plan.starts, strict=True):
        threading.Thread(target=send, args=(flow, start), daemon=True).start()
    while (now := time.monotonic()) < over:
        for flow, each in zip(flows, seen, strict=True):
            each.at.append(now - began)
            flow.look(each)
        time.sleep(EVERY)
    return [asdict(each) for each in seen]


def main() -> None:
    role, given = sys.argv[1:]
    plan = Plan(**{key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(given).items()})
    if role == "shard":
        shard = Shard(plan)
        print(json.dumps("listening"), flush=True)
        shard.accept()
        if plan.rounds:
            print(json.dumps(shard.answers()), flush=True)
        time.sleep(3600)  # until it is ended
    else:
        print(json.dumps(work(plan)), flush=True)


if __name__ == "__main__":
    main()
