"""The server of `atoll link serve`: a client with the key opens transports through it, and hears when each
transfer has become usable.

Clients talk to it over an authenticated channel (net/endpoint.py). The channel hands out what the transports
need: a token for a TCP connection; a session's id, ports and secret for datagrams. So nobody else's bytes are
taken.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from atoll.core.errors import UserError
from atoll.core.units import format_bytes
from atoll.net.endpoint import Received, Server, host_and_port, poll
from atoll.net.keys import Keys
from atoll.net.tcpflows import FlowListener, TcpFlows
from atoll.wire.datagrams import LTP_VERSION
from atoll.wire.linktest import LINK_ROLE
from atoll.wire.messages import (
    VERSION,
    AnyMessage,
    ClockRead,
    FlowLost,
    Goodbye,
    Hello,
    LtpOpened,
    OpenLtp,
    OpenTcp,
    Ping,
    ReadClock,
    Refused,
    Taken,
    TcpOpened,
    Welcome,
    WireError,
    decode_untrusted,
    encode,
)

NAME = "link server"
LAST_PORT = 2**16 - 1
FRAME = 2**16  # bytes of a message: none has a payload
MOST_CLIENTS = 16
MOST_FLOWS = 8  # of a client
MOST_MEMORY = 2**31  # bytes that all transfers together may take here
IDLE_SECONDS = 900.0  # without a word, after which a client is sent away
_LTP_MEMORY = 8  # bytes for each element, as in `ltpflows.ELEMENT_BYTES`, which needs a package more
_LOOK_SECONDS = 0.2
_PING_SECONDS = 1.0  # between checks that clients are still there


class LtpFlows(Protocol):
    """Takes transfers of datagrams."""

    ports: list[int]

    def open(self, number: int, elements: int, datagram_bytes: int) -> tuple[int, bytes, bool]:
        """Wait for a session; return its id, its secret, and whether its datagrams are sealed."""

    def drop(self, number: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class _Client:
    """A client that has said Hello, and its flows, with the memory that each takes."""

    heard: float
    flows: dict[int, tuple[str, int]] = field(default_factory=dict)  # number: (transport, bytes)


class LinkServer:
    """Listens at `listen` ("tcp://HOST:PORT"). TCP connections come to PORT + 1, datagrams to UDP ports from
    PORT + 1 on; port 0: any free ones. `make_ltp` makes the taker of datagrams from host, first port and
    callback; None: only TCP is measured.

    Raises UserError for an address that is in use, not this machine's, or in need of keys.
    """

    def __init__(
        self,
        listen: str,
        keys: Keys | None,
        make_ltp: Callable[[str, int, FlowListener], LtpFlows] | None = None,
    ) -> None:
        self._server = Server(listen, keys, limit=FRAME, name=NAME)
        place = host_and_port(listen)
        if place is None:
            self._server.close()
            raise UserError(f"{NAME}: {listen}: transports need ports: write tcp://HOST:PORT")
        if place[1] == LAST_PORT:
            self._server.close()
            raise UserError(
                f"{NAME}: {listen}: transfers come to the next port, so {LAST_PORT - 1} is the last"
            )
        host = {"localhost": "127.0.0.1", "*": "0.0.0.0"}.get(place[0], place[0])
        data_port = place[1] + 1 if place[1] else 0
        self._results: queue.SimpleQueue[Taken | FlowLost] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._clients: dict[bytes, _Client] = {}
        self._numbers = itertools.count(1)
        self._pinged = time.monotonic()
        self.served = 0  # transfers that were taken
        with contextlib.ExitStack() as made:
            made.callback(self._close_channel)
            self.tcp = TcpFlows(host, data_port, self._tell)
            made.callback(self.tcp.close)
            self.ltp = make_ltp(host, data_port, self._tell) if make_ltp is not None else None
            if self.ltp is not None:
                made.callback(self.ltp.close)
            self._closing = made.pop_all()

    def __enter__(self) -> LinkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        return self._server.address

    def close(self) -> None:
        """End, and break off transfers under way. Closing twice does no harm."""
        self._closing.close()

    def _close_channel(self) -> None:
        self._server.close()
        os.close(self._woken)
        os.close(self._wake)

    def serve(self, until: Callable[[], bool]) -> None:
        """Serve until `until` returns True; it is asked at least every 0.2 s."""
        while not until():
            poll([self._server], _LOOK_SECONDS, self._woken)
            self._tell_results()
            for _ in range(100):  # during a flood, results go out in between
                received = self._server.receive(0)
                if received is None:
                    break
                self._handle(received, time.monotonic())
            self._look_after(time.monotonic())

    # -- reports of transports, from threads of their own

    def _tell(self, result: Taken | FlowLost) -> None:
        self._results.put(result)
        with contextlib.suppress(BlockingIOError):  # it has been woken already
            os.write(self._wake, b"x")

    def _tell_results(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        with contextlib.suppress(queue.Empty):
            while True:
                result = self._results.get_nowait()
                peer = next((at for at, each in self._clients.items() if result.flow in each.flows), None)
                if peer is None:
                    continue  # it has gone meanwhile
                if isinstance(result, FlowLost):
                    self._drop(result.flow, self._clients[peer].flows.pop(result.flow)[0])
                self.served += isinstance(result, Taken)
                self._clients[peer].heard = time.monotonic()
                self._say(peer, result)

    # -- messages of clients

    def _handle(self, received: Received, now: float) -> None:
        try:
            message = decode_untrusted(received.header)
        except WireError as error:
            self._say(received.peer, Refused(reason=f"that is {error}"))
            return
        client = self._clients.get(received.peer)
        if isinstance(message, Hello):
            self._welcome(received.peer, message, now)
        elif client is None:
            self._say(received.peer, Refused(reason="say Hello first"))
        elif isinstance(message, Goodbye):
            self._forget(received.peer)
        else:
            client.heard = now
            self._say(received.peer, self._answer(client, message))

    def _welcome(self, peer: bytes, hello: Hello, now: float) -> None:
        if hello.version != VERSION:
            reason = (
                f"it speaks version {VERSION} of the protocol, and this side version {hello.version}: "
                "install the same Atoll on both"
            )
        elif hello.role != LINK_ROLE:
            reason = f"it only measures links (`atoll link serve`), and has no use for a {hello.role[:16]!r}"
        elif len(self._clients) >= MOST_CLIENTS and peer not in self._clients:
            reason = f"it serves {MOST_CLIENTS} clients already; try again later"
        else:
            self._clients.setdefault(peer, _Client(now)).heard = now
            self._say(peer, Welcome(run=LINK_ROLE))
            return
        self._say(peer, Refused(reason=reason))

    def _answer(self, client: _Client, message: AnyMessage) -> AnyMessage:
        if isinstance(message, ReadClock):
            return ClockRead(number=message.number, at=time.monotonic())
        if isinstance(message, OpenTcp):
            reason = self._no_room(client, message.size)
            if not reason:
                try:
                    return self._open_tcp(client, message)
                except UserError as error:
                    reason = str(error)
        elif isinstance(message, OpenLtp):
            reason = self._no_ltp(message) or self._no_room(client, _LTP_MEMORY * message.elements)
            if not reason and self.ltp is not None:
                try:
                    return self._open_ltp(self.ltp, client, message)
                except UserError as error:
                    reason = str(error)
        else:
            reason = f"it has no answer to {type(message).__name__}"
        return Refused(reason=reason, request=type(message).__name__, number=getattr(message, "number", 0))

    def _open_tcp(self, client: _Client, wish: OpenTcp) -> TcpOpened:
        flow = next(self._numbers)
        token = self.tcp.open(flow, wish.size)
        client.flows[flow] = ("tcp", wish.size)
        return TcpOpened(number=wish.number, flow=flow, port=self.tcp.port, token=token)

    def _open_ltp(self, ltp: LtpFlows, client: _Client, wish: OpenLtp) -> LtpOpened:
        flow = next(self._numbers)
        session, secret, sealed = ltp.open(flow, wish.elements, wish.datagram_bytes)
        client.flows[flow] = ("ltp", _LTP_MEMORY * wish.elements)
        return LtpOpened(
            number=wish.number, flow=flow, session=session, ports=ltp.ports, secret=secret, sealed=sealed
        )

    def _no_ltp(self, wish: OpenLtp) -> str:
        if self.ltp is None:
            return "it takes no datagrams: it was started for TCP alone"
        if wish.version != LTP_VERSION:
            return (
                f"it speaks version {LTP_VERSION} of the loss-tolerant transport, and this side version "
                f"{wish.version}: install the same Atoll on both"
            )
        return ""

    def _no_room(self, client: _Client, size: int) -> str:
        taken = sum(each for one in self._clients.values() for _, each in one.flows.values())
        if len(client.flows) >= MOST_FLOWS:
            return f"a client may have {MOST_FLOWS} transports open"
        if taken + size > MOST_MEMORY:
            return (
                f"transfers of {format_bytes(size)}: it has {format_bytes(MOST_MEMORY - taken)} left of "
                f"{format_bytes(MOST_MEMORY)}"
            )
        return ""

    # -- clients that are gone

    def _look_after(self, now: float) -> None:
        """Forget clients that are gone, or have been silent for too long."""
        if now - self._pinged < _PING_SECONDS:
            return
        self._pinged = now
        for peer, client in list(self._clients.items()):
            if now - client.heard > IDLE_SECONDS:
                self._say(peer, Refused(reason=f"nothing was heard for {IDLE_SECONDS:g} s"))
                self._forget(peer)
            else:
                self._say(peer, Ping())

    def _say(self, peer: bytes, message: AnyMessage) -> None:
        if self._server.offer(peer, encode(message)) == "gone":
            self._forget(peer)

    def _forget(self, peer: bytes) -> None:
        client = self._clients.pop(peer, None)
        for flow, (transport, _) in client.flows.items() if client is not None else ():
            self._drop(flow, transport)

    def _drop(self, flow: int, transport: str) -> None:
        if transport == "tcp":
            self.tcp.drop(flow)
        elif self.ltp is not None:
            self.ltp.drop(flow)
