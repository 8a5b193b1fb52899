"""Transfers over TCP, to measure a link with: a thread that takes those of several connections, and the
sending end.

A connection sends its token, and then its transfers, each as its length (8 bytes, little-endian) and its
bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from atoll.core.errors import PeerLostError, UserError
from atoll.wire.linktest import TOKEN_BYTES
from atoll.wire.messages import FlowLost, Taken

FlowListener: TypeAlias = Callable[[Taken | FlowLost], None]

GREETING_SECONDS = 10.0  # for a connection to send its token
SILENCE_SECONDS = 300.0  # in the middle of a transfer, after which its sender is given up
MOST_STRANGERS = 16  # connections that have sent no token yet; a further one closes the oldest
_LENGTH = struct.Struct("<Q")
_LOOK_SECONDS = 0.2
_FULL_SECONDS = 0.05  # before another try, where this process has too many files open
_SOCKET_LOOK = 0.05  # how often a sender that cannot send looks at what else there is
_PIECE = 2**20

# Linux' struct tcp_info: where its 32-bit counters of segments stand (include/uapi/linux/tcp.h).
_RETRANSMITTED_AT, _SENT_AT, _INFO_BYTES = 100, 156, 160


@dataclass
class _Flow:
    """The transfers of one connection. Their bytes are counted, and kept nowhere."""

    number: int
    size: int
    token: bytes
    transfers: int = 0


@dataclass
class _Link:
    """A connection. Until it has sent its token it has no flow, and may send nothing else."""

    socket: socket.socket
    flow: _Flow | None
    heard: float
    head: bytearray = field(default_factory=bytearray)  # the received part of the token or of a length
    got: int = -1  # bytes of the transfer; -1: none has begun


class TcpFlows:
    """Takes transfers at `port` of `host` on a thread of its own, and reports each through `told`, from that
    thread, until `close`.

    Raises UserError if it cannot listen.
    """

    def __init__(self, host: str, port: int, told: FlowListener) -> None:
        self._told = told
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=MOST_STRANGERS)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"link server: another process has TCP port {port} of {host} already, to which transfers "
                    "come (--listen's port and 1): give another port, or stop that one"
                ) from None
            why = os.strerror(error.errno or 0)
            raise UserError(f"cannot take TCP connections at {host}:{port}: {why}") from None
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()  # guards the next two
        self._flows: dict[bytes, _Flow] = {}  # by token: flows without a connection yet
        self._failure = ""
        self._links: dict[int, _Link] = {}  # by file descriptor; touched by the thread alone
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._over = threading.Event()
        self._scratch = memoryview(bytearray(_PIECE))  # received bytes are thrown away here
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="atoll link tcp", daemon=True)
        self._thread.start()

    def open(self, number: int, size: int) -> bytes:
        """Open a flow of transfers of `size` bytes each; return its token. Raises UserError if the thread
        has failed."""
        token = secrets.token_bytes(TOKEN_BYTES)
        flow = _Flow(number, size, token)
        with self._lock:
            if self._failure:
                raise UserError(self._failure)
            self._flows[token] = flow
        return token

    def drop(self, number: int) -> None:
        """End a flow, and its connection."""
        self._dropped.put(number)
        self._look()

    def close(self) -> None:
        self._over.set()
        self._look()
        self._thread.join(10.0)
        self._listener.close()
        os.close(self._woken)
        os.close(self._wake)

    def _look(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been woken already
            os.write(self._wake, b"x")

    def _serve(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            while not self._over.is_set():
                self._turn()
        except Exception as error:
            self._fail(f"what takes TCP transfers has failed: {type(error).__name__}: {error}")
        for link in list(self._links.values()):
            self._end(link)
        self._selector.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(_LOOK_SECONDS):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd == self._woken:
                self._drop_asked()
            elif key.fd in self._links:  # and not ended just now
                self._take(self._links[key.fd])
        self._end_silent(time.monotonic())

    def _fail(self, reason: str) -> None:
        """Report all flows as lost; no new one is opened any more."""
        with self._lock:
            self._failure = reason
            lost = [*self._flows.values(), *(link.flow for link in self._links.values())]
            self._flows.clear()
        for flow in lost:
            if flow is not None:
                self._told(FlowLost(flow=flow.number, reason=reason))

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # other errors: the client is gone again
                self._over.wait(_FULL_SECONDS)
            return
        with contextlib.suppress(OSError):
            strangers = [each for each in self._links.values() if each.flow is None]  # the oldest first
            if len(strangers) >= MOST_STRANGERS:
                self._end(strangers[0])
            link.setblocking(False)
            self._links[link.fileno()] = _Link(link, None, time.monotonic())
            self._selector.register(link, selectors.EVENT_READ)

    def _drop_asked(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        with contextlib.suppress(queue.Empty):
            while True:
                number = self._dropped.get_nowait()
                with self._lock:
                    for token in [token for token, flow in self._flows.items() if flow.number == number]:
                        del self._flows[token]
                for link in [each for each in self._links.values() if each.flow is not None]:
                    if link.flow is not None and link.flow.number == number:
                        self._end(link)

    def _take(self, link: _Link) -> None:
        try:
            self._take_some(link)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(link, f"its connection ended: {error.strerror or error}")

    def _take_some(self, link: _Link) -> None:
        """Take received bytes. Raises ConnectionError if no more come."""
        link.heard = time.monotonic()
        if link.got < 0:
            wanted = TOKEN_BYTES if link.flow is None else _LENGTH.size
            said = link.socket.recv(wanted - len(link.head), socket.MSG_DONTWAIT)
            if not said:
                raise ConnectionError("it was closed")
            link.head += said
            if len(link.head) == wanted:
                self._head(link)
            return
        flow = link.flow
        assert flow is not None
        room = self._scratch[: min(_PIECE, flow.size - link.got)]
        more = link.socket.recv_into(room, 0, socket.MSG_DONTWAIT)
        if not more:
            raise ConnectionError("it was closed in the middle of a transfer")
        link.got += more
        if link.got == flow.size:
            self._told(Taken(flow=flow.number, transfer=flow.transfers, at=time.monotonic(), size=flow.size))
            flow.transfers += 1
            link.got = -1

    def _head(self, link: _Link) -> None:
        head = bytes(link.head)
        link.head.clear()
        if link.flow is None:
            with self._lock:
                link.flow = self._flows.pop(head, None)  # a token is good once
            if link.flow is None:
                raise ConnectionError("another token")
            return
        if _LENGTH.unpack(head)[0] != link.flow.size:
            raise ConnectionError("a transfer of another length than was agreed")
        link.got = 0

    def _end_silent(self, now: float) -> None:
        for link in list(self._links.values()):
            silence = now - link.heard
            if link.flow is None and silence > GREETING_SECONDS:
                self._end(link)
            elif link.got >= 0 and silence > SILENCE_SECONDS:
                self._end(link, f"nothing came for {SILENCE_SECONDS:g} s in the middle of a transfer")

    def _end(self, link: _Link, reason: str = "") -> None:
        """End a connection; with a reason, report its flow as lost."""
        self._links.pop(link.socket.fileno(), None)
        self._selector.unregister(link.socket)
        link.socket.close()
        if reason and link.flow is not None:
            self._told(FlowLost(flow=link.flow.number, reason=reason))


class TcpSender:
    """A connection to a server's `TcpFlows`, by which transfers are sent. `congestion` is the kernel's
    algorithm by name; empty: its default, which the attribute `congestion` then names.

    Raises UserError for an algorithm that this kernel does not have or allow, and PeerLostError if the port
    does not answer.
    """

    def __init__(self, place: tuple[str, int], token: bytes, congestion: str, seconds: float) -> None:
        self._name = f"the server's TCP port {place[1]} at {place[0]}"
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind, protocol)
        except OSError as error:
            raise PeerLostError(f"{self._name}: {error.strerror}") from None
        try:
            if congestion:
                choose_congestion(self._socket, congestion)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(seconds)
            self._socket.connect(where)
            self._socket.sendall(token)
            self._socket.setblocking(False)
        except TimeoutError:
            self._socket.close()
            raise PeerLostError(
                f"{self._name} did not answer within {seconds:g} s; does a firewall let it through?"
            ) from None
        except OSError as error:
            self._socket.close()
            raise PeerLostError(f"{self._name}: {error.strerror}") from None
        except UserError:
            self._socket.close()
            raise
        said = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        self.congestion = said.rstrip(b"\0").decode()

    def send(self, data: memoryview, look: Callable[[], None]) -> None:
        """Hand a transfer over to the kernel. `look` is called during waits, at least every 50 ms, and may
        raise to end them. Raises PeerLostError if the connection ends."""
        try:
            for part in (memoryview(_LENGTH.pack(len(data))), data):
                left = part
                while left:
                    left = self._send_some(left, look)
        except OSError as error:
            raise PeerLostError(f"{self._name}: the connection ended: {error.strerror}") from None

    def _send_some(self, left: memoryview, look: Callable[[], None]) -> memoryview:
        """Return the rest after the kernel has taken some, or after a wait."""
        try:
            return left[self._socket.send(left[:_PIECE], socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            look()
            select.select([], [self._socket], [], _SOCKET_LOOK)
            return left

    def segments(self) -> tuple[int, int]:
        """Return the numbers of segments with data sent so far, and of those sent again, by the kernel's
        count."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if len(info) < _INFO_BYTES:  # Linux before 4.6
            return 0, 0
        sent, again = (struct.unpack_from("=I", info, at)[0] for at in (_SENT_AT, _RETRANSMITTED_AT))
        return int(sent), int(again)

    def close(self) -> None:
        """End the connection. Unsent data is thrown away: it would disturb the next measurement."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


def choose_congestion(link: socket.socket, name: str) -> None:
    """Set the congestion control of a TCP socket. Raises UserError, which names the available ones."""
    try:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode("ascii", "replace"))
    except FileNotFoundError:
        raise UserError(
            f"transport tcp:{name}: this kernel has no congestion control {name!r}; it has "
            f"{', '.join(_congestions('available'))} (modprobe tcp_{name} may load it)"
        ) from None
    except PermissionError:
        raise UserError(
            f"transport tcp:{name}: this user may not choose {name!r}; allowed are "
            f"{', '.join(_congestions('allowed'))} (sysctl net.ipv4.tcp_allowed_congestion_control)"
        ) from None
    except OSError as error:
        raise UserError(f"transport tcp:{name}: {error.strerror}") from None


def _congestions(which: str) -> list[str]:
    try:
        with open(f"/proc/sys/net/ipv4/tcp_{which}_congestion_control", encoding="ascii") as file:  # noqa: PTH123
            return file.read().split()
    except OSError:
        return ["nothing that it tells"]


def most_in_flight() -> int | None:
    """Return the most bytes that this kernel lets a TCP connection have on its way (the last of
    net.ipv4.tcp_wmem); None if it does not tell."""
    try:
        with open("/proc/sys/net/ipv4/tcp_wmem", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[-1])
    except (OSError, ValueError, IndexError):
        return None
