"""Servers and clients: ZeroMQ sockets that carry a header and perhaps a payload.

An endpoint belongs to one thread at a time, and to the process that made it. Payloads are not copied on
arrival: the memoryview keeps the message alive.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import math
import re
import socket as sockets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from atoll.core.errors import RunError, UserError
from atoll.net import context as process
from atoll.net.keys import Keys
from atoll.net.strangers import EVENTS as STRANGERS_EVENTS
from atoll.net.strangers import Strangers
from atoll.wire.messages import HEADER_BYTES, LostBlocks

Buffer: TypeAlias = Any  # whatever has the buffer protocol: bytes, memoryview, a numpy array
Offered: TypeAlias = Literal["sent", "full", "gone"]

SERVER_INCOMING = 32  # messages of one client that wait here; then its own queue fills
SERVER_OUTGOING = 4096  # messages that wait for one client; beyond, they are dropped
CLIENT_INCOMING = 64
CLIENT_OUTGOING = 100_000  # messages, not copies: payloads lie where their owner has them
CLOSING_SECONDS = 1.0  # for which a closed client still tries to send its messages
_HANDSHAKE_SECONDS = 10.0
_BACKLOG = 4096  # connections that wait to be accepted; the system may allow fewer
_MONITOR_EVENTS = 1  # of a server's connections that wait here, and libzmq's own thousand: then libzmq waits
_RECONNECT_SECONDS = (0.1, 1.0)  # first and longest pause
SOON = (0.1, 0.2)  # first and longest pause, if a lost connection is urgent
_PROBE_SECONDS = 0.5
_PROBE_PAUSE_SECONDS = 2.0
_HANGS_UP = "it takes connections and closes them at once"
_NOT_YET = "not connected yet"
NOTHING_LISTENS = "nothing listens there"
_WANTS_KEY = "wants a key: give the run's key file"
_NO_KEYS = "takes no key: it was started without"
# A ZeroMQ's greeting (RFC 23): a signature; once the peer has sent its own, version and security mechanism.
_SIGNATURE, _MECHANISM = b"\xff" + bytes(8) + b"\x7f", slice(12, 32)
_MECHANISM_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)

# Events of a client's connection.
_NOTED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

_domains, _monitors = itertools.count(), itertools.count()


@dataclass(frozen=True)
class Received:
    """A message that a server received. `peer` addresses answers while the connection lasts. `lost`: the
    blocks of the payload that the link lost, and the values in their place."""

    peer: bytes
    header: bytes
    payload: memoryview | None
    lost: LostBlocks | None = None


class Endpoint:
    """Base of servers and clients; `name` ("hub", "shard 1") and `address` are in every error."""

    def __init__(self, kind: int, address: str, name: str) -> None:
        self.address, self.name = address, name
        self.dropped = 0  # messages that were no header, or header and payload
        self.wake = -1  # a file descriptor that is readable while messages wait outside the socket
        self._generation = process.generation()
        self._closed = False
        self._socket: zmq.Socket[bytes] = process.context().socket(kind)
        self._most = 3 + (kind == zmq.ROUTER)  # frames; for a router the sender's comes first
        self._monitor: zmq.Socket[bytes] | None = None  # a client's
        self._strangers: Strangers | None = None  # a server's
        self.user = threading.get_ident()
        process.opened(self)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    def _take(self) -> list[zmq.Frame] | None:
        """Return the frames of the next message, or None; at most one more than a message has, as a sign
        of too many."""
        try:
            frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None
        while frames[-1].more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) < self._most:
                frames.append(frame)
            else:
                frames[-1] = frame  # read on to the message's end, and keep nothing
        return frames

    def _wait(self, until: float) -> bool:
        """True if something came before the monotonic time `until`."""
        return bool(poll([self], until - time.monotonic()))

    def _alive(self) -> zmq.Socket[bytes]:
        if self._generation != process.generation():
            raise RunError(
                f"{self.name} at {self.address}: a forked process cannot use its parent's connection"
            )
        if self._closed:
            raise RunError(f"{self.name} at {self.address}: the connection is closed")
        self.user = threading.get_ident()
        return self._socket

    def abandon(self) -> None:
        """Close at once, and drop unsent messages."""
        if not self._closed:
            self._end(0)

    def _end(self, linger: float) -> None:
        self._closed = True
        if self._generation != process.generation():
            return  # the parent's
        if self._monitor is not None or self._strangers is not None:
            self._socket.monitor(None, 0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        if self._strangers is not None:
            self._strangers.close()
        self._socket.close(linger=_milliseconds(linger))
        process.closed(self)


_Self = TypeVar("_Self", bound=Endpoint)


class Server(Endpoint):
    """Listens at `address` ("tcp://127.0.0.1:5555"; port 0: any free one, see `.address`; "ipc:///path").

    With `keys`, only clients with equal keys are let in, and traffic is encrypted. Without, the address must
    be this machine's own alone. Keys make no difference to a path: the file's mode is 0600, so that only
    processes of this user can connect, and nothing is encrypted. `limit` is the largest frame in bytes: a
    client that sends a larger one loses its connection.

    The messages of one client that wait here are bounded in number. libzmq has no bound for a message whose
    frames never end: any client that is let in (without keys, any on this machine) could fill the memory.

    Raises UserError for an address that is in use, not this machine's, or in need of keys.
    """

    def __init__(self, address: str, keys: Keys | None, *, limit: int, name: str) -> None:
        _check_place(address, keys, name)
        super().__init__(zmq.ROUTER, address, name)
        self._limit = limit
        keys = None if is_path(address) else keys
        self._domain = b"atoll-%d" % next(_domains)
        self._file: Path | None = None  # of a path
        self._inode = 0
        try:
            self._open(keys, limit)
        except BaseException:
            self._end(0)
            raise

    def _open(self, keys: Keys | None, limit: int) -> None:
        door = self._socket
        _tune(door, self.address, limit, SERVER_INCOMING, SERVER_OUTGOING)
        door.linger = 0
        door.backlog = _BACKLOG
        door.router_mandatory = True
        if keys is not None:
            door.zap_domain = self._domain
            door.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without its keeper, nobody is let in
            door.curve_server = True
            door.curve_secretkey = keys.server_secret.encode("ascii")
            door.curve_publickey = keys.server_public.encode("ascii")
            process.admit(self._domain, z85.decode(keys.client_public))
        monitor = _monitor_of(door, STRANGERS_EVENTS, _MONITOR_EVENTS)
        try:
            self._strangers = Strangers(self.name, monitor, has_keys=keys is not None)
        except BaseException:  # no descriptors are left: open sockets would keep the process from ending
            door.monitor(None, 0)
            monitor.close(linger=0)
            raise
        try:
            door.bind(self.address.replace("tcp://localhost:", "tcp://127.0.0.1:"))
        except zmq.ZMQError as error:
            raise UserError(f"{self.name}: {_why_not_bound(self.address, error.errno)}") from None
        self._strangers.bound.wait(1.0)
        self.address = door.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
        if is_path(self.address):
            self._file = Path(self.address.removeprefix("ipc://"))
            self._file.chmod(0o600)
            self._inode = self._file.stat().st_ino

    def take_report(self) -> str:
        """Return a line, now and then, if the port is full or connections of strangers were closed, with
        their addresses; else an empty string."""
        return self._strangers.take_report() if self._strangers is not None else ""

    def receive(self, timeout: float) -> Received | None:
        """Return the next message, waiting for up to `timeout` seconds; None if there is none."""
        self._alive()
        until = time.monotonic() + timeout
        while True:
            frames = self._take()
            if frames is None:
                if not timeout or not self._wait(until):
                    return None
            elif 2 <= len(frames) <= 3 and len(frames[1]) <= HEADER_BYTES:
                payload = frames[2].buffer if len(frames) == 3 else None
                return Received(frames[0].bytes, frames[1].bytes, payload)
            else:
                self.dropped += 1
                if time.monotonic() > until:
                    return None  # endless bad messages must not keep the server from its other work

    def send(self, peer: bytes, header: bytes, payload: Buffer | None = None, *, copy: bool = True) -> bool:
        """Send, never waiting; False if the peer is gone or too much waits for it: then nothing is sent.

        With copy=False the payload must stay unchanged until the peer has answered to it.
        """
        return self.offer(peer, header, payload, copy=copy) == "sent"

    def offer(
        self, peer: bytes, header: bytes, payload: Buffer | None = None, *, copy: bool = True
    ) -> Offered:
        """Send, never waiting, and return "sent", "full" (try again later) or "gone" (the connection is
        lost)."""
        door = self._alive()
        check_size(self, header, payload, self._limit)
        try:
            # The first frame decides: a router takes all frames of a message or none.
            door.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.Again:
            return "full"
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.ENOTCONN, errno.EINVAL):
                return "gone"
            raise
        _send_all(door, header, payload, copy)
        return "sent"

    def close(self) -> None:
        """Stop listening, and drop unsent messages; the port is free when this returns."""
        if self._closed:
            return
        if self._generation == process.generation():
            try:
                self._socket.unbind(self.address)
                assert self._strangers is not None
                self._strangers.unbound.wait(1.0)
            except zmq.ZMQError:
                pass  # not bound, after all
            process.dismiss(self._domain)
            with contextlib.suppress(OSError):
                # Another server may have taken the path meanwhile.
                if self._file is not None and self._file.stat().st_ino == self._inode:
                    self._file.unlink()
        self._end(0)


class Client(Endpoint):
    """Connects to a server, and again when the connection is lost; messages sent meanwhile wait.

    The constructor does not wait for the connection: see `connected`, and `check`, which raises permanent
    errors. `reconnect` has the first and the longest pause between attempts, in seconds.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        *,
        limit: int,
        name: str,
        reconnect: tuple[float, float] = _RECONNECT_SECONDS,
    ) -> None:
        check_reach(address, keys, name)
        super().__init__(zmq.DEALER, address, name)
        self._losses = 0
        keys = None if is_path(address) else keys
        self._keys = keys
        self._limit = limit
        self._reconnect = reconnect
        self._linked = False
        self._refusal = ""  # why the server will never let this client in
        self._trouble = _NOT_YET
        self._unclear = False  # a handshake ended for an unknown reason
        self._handshake_began: float | None = None
        self._next_probe = 0.0
        try:
            self._open(keys, limit)
        except BaseException:
            self._end(0)
            raise

    def _open(self, keys: Keys | None, limit: int) -> None:
        link = self._socket
        _tune(link, self.address, limit, CLIENT_INCOMING, CLIENT_OUTGOING)
        link.linger = _milliseconds(CLOSING_SECONDS)
        link.reconnect_ivl, link.reconnect_ivl_max = (_milliseconds(pause) for pause in self._reconnect)
        if keys is not None:
            link.curve_serverkey = keys.server_public.encode("ascii")
            link.curve_secretkey = keys.client_secret.encode("ascii")
            link.curve_publickey = keys.client_public.encode("ascii")
        self._monitor = _monitor_of(link, _NOTED)
        try:
            link.connect(self.address)
        except zmq.ZMQError as error:
            raise UserError(f"{self.name}: cannot connect to {self.address}: {error.strerror}") from None

    @property
    def connected(self) -> bool:
        """True while the connection stands: the server has let this client in."""
        self._watch()
        return self._linked

    @property
    def losses(self) -> int:
        """Number of connections that were made and lost. A message sent just before a loss may be lost
        too."""
        self._watch()
        return self._losses

    @property
    def trouble(self) -> str:
        """Why there is no connection, in words ("nothing listens there"); empty when there is one."""
        self._watch()
        return "" if self._linked else self._trouble

    def check(self) -> None:
        """Raise UserError if the other side refuses the key, or is no Atoll.

        May take a second, now and then, if there is no connection and the reason is unclear.
        """
        self._watch()
        if self._refusal:
            raise UserError(self._refusal)

    def send(self, header: bytes, payload: Buffer | None = None) -> None:
        """Send, never waiting. The payload is not copied: it must stay unchanged until the other side has
        answered. Raises RunError if far too many messages wait already."""
        link = self._alive()
        check_size(self, header, payload, self._limit)
        try:
            _send_all(link, header, payload, copy=False)
        except zmq.Again:
            self.check()  # a refused client has no queue
            why = self.trouble or "it does not read them"
            raise RunError(
                f"{CLIENT_OUTGOING} messages wait for {self.name} at {self.address}: {why}"
            ) from None

    def receive(self, timeout: float) -> tuple[bytes, memoryview | None] | None:
        """Return the next header and payload, waiting for up to `timeout` seconds; None if there are none."""
        self._alive()
        until = time.monotonic() + timeout
        while True:
            frames = self._take()
            if frames is None:
                if not timeout or not self._wait(until):
                    return None
            elif len(frames) <= 2 and len(frames[0]) <= HEADER_BYTES:
                return frames[0].bytes, frames[1].buffer if len(frames) == 2 else None
            else:
                self.dropped += 1

    def close(self) -> None:
        """Close; unsent messages go out in the background, for up to a second."""
        if not self._closed:
            self._end(CLOSING_SECONDS)

    def _watch(self) -> None:
        """Handle the connection's events since the last look."""
        if self._closed or self._monitor is None or self._generation != process.generation():
            return
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            self._note(int(event["event"]), int(event["value"]))
        now = time.monotonic()
        slow = self._handshake_began is not None and now > self._handshake_began + _PROBE_SECONDS
        if (self._unclear or slow) and not self._linked and not self._refusal and now >= self._next_probe:
            hung_up, self._unclear = self._unclear, False
            self._probe(hung_up)
            self._next_probe = time.monotonic() + _PROBE_PAUSE_SECONDS

    def _note(self, event: int, value: int) -> None:
        if event in (zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED):
            self._handshake_began = time.monotonic() if event == zmq.EVENT_CONNECTED else None
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._linked, self._unclear, self._refusal, self._trouble = True, False, "", ""
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._refuse("refuses this key")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
            no_key = self._keys is None
            self._refuse(_WANTS_KEY if no_key else _NO_KEYS)
        elif event == zmq.EVENT_DISCONNECTED:
            self._losses += self._linked
            # Before the end of a handshake there are several causes: see _probe.
            self._unclear = self._unclear or not self._linked
            self._trouble = "the connection was lost" if self._linked else self._trouble
            self._linked = False
        elif self._refusal:
            return
        elif event == zmq.EVENT_CLOSED:
            self._trouble = NOTHING_LISTENS
        elif event == zmq.EVENT_CONNECT_RETRIED and self._trouble == _NOT_YET:
            self._trouble = "no such machine, or no way to it"  # a socket was never made
        elif event == zmq.EVENT_CONNECTED and self._trouble != _HANGS_UP:
            self._trouble = "it takes connections and answers nothing"

    def _refuse(self, how: str) -> None:
        self._linked, self._trouble = False, f"it {how}"
        self._refusal = f"{self.name} at {self.address} {how}"

    def _probe(self, hung_up: bool) -> None:
        """Ask the port for its greeting, which every ZeroMQ sends (RFC 23). A server with another key, or
        without, hangs up without a message, and so does a tunnel to a server that is not up yet: the greeting
        tells them apart.

        A ZeroMQ that has not hung up may only be far away: a handshake takes four round trips.
        """
        greeting = _greeting_of(self.address)
        if greeting is None:
            return  # silence: a greeting may still come
        if re.match(rb"\xff.{8}[\x7f\x01]", greeting, re.DOTALL):
            if self._keys is not None and hung_up:
                self._refuse(_NO_KEYS if greeting[_MECHANISM].startswith(b"NULL") else "refuses this key")
            elif self._keys is None and hung_up and greeting[_MECHANISM].startswith(b"CURVE"):
                self._refuse(_WANTS_KEY)
        elif greeting:
            self._refuse("speaks no Atoll")
        else:
            self._trouble = _HANGS_UP


def poll(endpoints: Sequence[_Self], timeout: float, wake: int = -1) -> list[_Self]:
    """Return the endpoints that have something to receive. Wait for up to `timeout` seconds for one, or
    until the file descriptor `wake` is readable."""
    poller = zmq.Poller()
    if wake >= 0:
        poller.register(wake, zmq.POLLIN)
    for endpoint in endpoints:
        poller.register(endpoint._alive(), zmq.POLLIN)
        if endpoint.wake >= 0:
            poller.register(endpoint.wake, zmq.POLLIN)
    ready = {socket for socket, _ in poller.poll(_milliseconds(timeout))}
    return [endpoint for endpoint in endpoints if endpoint._socket in ready or endpoint.wake in ready]


def _monitor_of(link: zmq.Socket[bytes], events: int, room: int = 0) -> zmq.Socket[bytes]:
    """Return the socket on which libzmq reports these events of `link`.

    A server's has a thread that only reads it (net/strangers.py), and a bound: others decide how many events
    there are. A client's has room for any number (0), some 300 bytes each: libzmq's one thread for all of a
    process's connections waits for room there. A client whose server is away has two events for each try, and
    its owner may look at it only after a long evaluation.
    """
    place = f"inproc://atoll-monitor-{next(_monitors)}"
    link.monitor(place, events)
    watch = process.context().socket(zmq.PAIR)
    watch.linger, watch.rcvhwm = 0, room
    watch.connect(place)
    return watch


def _tune(link: zmq.Socket[bytes], address: str, limit: int, incoming: int, outgoing: int) -> None:
    link.maxmsgsize = limit
    link.rcvhwm, link.sndhwm = incoming, outgoing
    link.handshake_ivl = _milliseconds(_HANDSHAKE_SECONDS)
    link.ipv6 = "[" in address
    # The connection to a machine that vanishes ends after two minutes of silence.
    link.tcp_keepalive, link.tcp_keepalive_idle = 1, 60
    link.tcp_keepalive_intvl, link.tcp_keepalive_cnt = 10, 6


def _send_all(link: zmq.Socket[bytes], header: bytes, payload: Buffer | None, copy: bool) -> None:
    if payload is None:
        link.send(header, zmq.NOBLOCK)
    else:
        link.send(header, zmq.NOBLOCK | zmq.SNDMORE)
        link.send(flat(payload), zmq.NOBLOCK, copy=copy)


def check_size(endpoint: Endpoint, header: bytes, payload: Buffer | None, limit: int) -> None:
    """Raise RunError for a message above `limit`: the other side would cut the connection without a
    reason."""
    size = max(len(header), 0 if payload is None else memoryview(payload).nbytes)
    if size > limit:
        raise RunError(
            f"{endpoint.name} at {endpoint.address}: a message of {size} bytes, where {limit} is the most"
        )


def flat(payload: Buffer) -> memoryview | bytes:
    view = memoryview(payload)
    return view.cast("B") if view.nbytes else b""


def _milliseconds(seconds: float) -> int:
    """Convert seconds for ZeroMQ, rounded up, since a wait of 0 would be a spin; -1 is for ever."""
    return -1 if seconds == math.inf else max(0, min(math.ceil(seconds * 1000), 2**31 - 1))


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return the host and port of "tcp://HOST:PORT"; None for anything else."""
    found = re.fullmatch(r"tcp://(?:\[([^\]]+)\]|([^\[\]/;:]+)):([0-9]{1,5}|\*)", address)
    if not address.isprintable() or " " in address:
        return None
    port = int(found[3].replace("*", "0")) if found else 0
    return (found[1] or found[2], port) if found and port < 2**16 else None


def is_path(address: str) -> bool:
    """True for the address of a Unix socket: "ipc:///path"."""
    return address.startswith("ipc://")


def _is_local(address: str) -> bool:
    """True if only this machine's processes can reach the address."""
    place = host_and_port(address)
    if place is None or place[0] == "localhost":
        return True  # a path
    try:
        return ipaddress.ip_address(place[0]).is_loopback
    except ValueError:
        return False


def _check_address(address: str, name: str) -> None:
    if host_and_port(address) is None and not is_path(address):
        raise UserError(f"{name}: {address!r} is no address; write tcp://HOST:PORT or ipc://PATH")
    if address.startswith("ipc://@"):
        raise UserError(
            f"{name}: {address}: a name without a file, which other users reach; write ipc://PATH"
        )


def check_reach(address: str, keys: Keys | None, name: str) -> None:
    """Raise the UserError that a `Client` of `address` would raise, without connecting to it."""
    _check_address(address, name)
    place = host_and_port(address)
    if place is not None and not place[1]:
        raise UserError(f"{name}: {address!r} has no port to connect to; write tcp://HOST:PORT")
    if keys is None and not _is_local(address):
        raise UserError(f"{name} at {address} is on another machine, so the run's key file is needed")


def check_listen(address: str, keys: Keys | None, name: str) -> None:
    """Raise the errors that a `Server` at `address` would raise, as far as they can be known without one:
    for callers that must wait for something else first."""
    _check_place(address, keys, name)
    place = host_and_port(address)
    if place is None:
        return  # a path
    host = place[0].replace("localhost", "127.0.0.1")
    try:
        family, kind, protocol, _, where = sockets.getaddrinfo(
            host, place[1], type=sockets.SOCK_STREAM, flags=sockets.AI_NUMERICHOST
        )[0]
    except sockets.gaierror:  # libzmq takes an interface's name too, which it looks up itself
        if host not in ("*", *(each for _, each in sockets.if_nameindex())):
            raise UserError(f"{name}: {_why_not_bound(address, errno.ENODEV)}") from None
        return
    with sockets.socket(family, kind, protocol) as door:
        door.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        try:
            door.bind(where)
        except OSError as error:
            raise UserError(f"{name}: {_why_not_bound(address, error.errno)}") from None


def _check_place(address: str, keys: Keys | None, name: str) -> None:
    _check_address(address, name)
    if keys is None and not _is_local(address):
        raise UserError(
            f"{name}: other machines can reach {address}, so a key file is needed: make one with "
            "`atoll keys FILE`, or listen at tcp://127.0.0.1:PORT"
        )


def _why_not_bound(address: str, number: int | None) -> str:
    if number == errno.EADDRINUSE:
        return f"another process listens at {address} already; give another port, or stop that one"
    if number in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"cannot listen at {address}: no address of this machine"
    return f"cannot listen at {address}: {zmq.strerror(number or 0)}"


def _rest_of_greeting(link: sockets.socket) -> bytes:
    """Return a ZeroMQ's greeting after its signature, up to the security mechanism; less, if it is slow."""
    said, until = b"", time.monotonic() + _PROBE_SECONDS
    with contextlib.suppress(OSError):
        link.sendall(b"\x03")
        while (left := _MECHANISM.stop - len(_SIGNATURE) - len(said)) > 0 and time.monotonic() < until:
            if not (more := link.recv(left)):
                break
            said += more
    return said


def _greeting_of(address: str) -> bytes | None:
    """Return the first bytes that the listener at `address` answers to a ZeroMQ's signature; empty if it
    hangs up, None if it is silent."""
    place = host_and_port(address)
    try:
        if place is not None:
            link = sockets.create_connection(place, _PROBE_SECONDS)
        else:
            link = sockets.socket(sockets.AF_UNIX)
            link.settimeout(_PROBE_SECONDS)
            link.connect(address.removeprefix("ipc://"))
        with link:
            link.sendall(_SIGNATURE)  # the kernel keeps a silent connection from a server of ours
            try:
                said = link.recv(10)
            except TimeoutError:
                link.sendall(b"\r\n\r\n")  # a web server waits to be asked
                return link.recv(10)
            if said[:1] == _SIGNATURE[:1]:
                said += _rest_of_greeting(link)
            return said
    except TimeoutError:
        return None
    except OSError:
        return b""
