"""Strangers: connections of a server that have not shown that they belong to the run.

libzmq accepts whoever connects, and waits ten seconds for a handshake. Each connection takes a descriptor
meanwhile, so that some hundreds of silent ones would leave none for a worker, or for the journal. So the
kernel is asked to keep silent ones to itself, as many as it has room for, and the others are bounded, in all
and for each address: beyond, the oldest is closed. One who belongs here takes a stranger's place at any time.

libzmq tells of each connection that it accepts by its descriptor, and not of which one a handshake has
succeeded. The kernel tells that: a server sends its last word of a handshake only to a client that has the
key, so a client is through once it has acknowledged more bytes than what anybody gets (ZMTP, RFC 23 and 26).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator

import zmq

from atoll.core.descriptors import Reserve, raise_descriptor_limit

EVENTS = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CLOSE_FAILED
    | zmq.EVENT_MONITOR_STOPPED
)
MOST_STRANGERS = 16384  # in all, where descriptors allow as many
# Bytes that a server sends to anybody: its greeting, and with keys its WELCOME, or an ERROR; READY is longer.
_TO_ANYBODY, _WITH_KEYS = 64, 64 + 170 + 32
_LEAST_STRANGERS = 16
_SILENT_SECONDS = 60  # for which the kernel keeps a silent connection to itself
_LEAST_KEPT_BACK, _KEPT_BACK_SHARE = 32, 16  # descriptors for files and links of our own: that share
_COUNT_SECONDS = 5.0  # between looks at how many descriptors the rest of the process has
_REFILL_SECONDS = 0.2
_REPORT_SECONDS = 60.0  # between lines on the same
_MOST_NAMED = 4  # addresses in a line
_ACKED_AT, _INFO_BYTES = 120, 256  # struct tcp_info: tcpi_bytes_acked, 64 bits (include/uapi/linux/tcp.h)
_EVENT = struct.Struct("=HI")
_DESCRIPTORS = "/proc/self/fd"

_all: set[Strangers] = set()


class Strangers:
    """Watches the connections of one server by its monitor, on a thread of its own, until the monitor stops.

    `has_keys`: clients must show a key. Lines for people are in `take_report`.
    """

    def __init__(self, name: str, monitor: zmq.Socket[bytes], *, has_keys: bool) -> None:
        self._monitor = monitor
        self._limit = raise_descriptor_limit()
        self._through = _WITH_KEYS if has_keys else _TO_ANYBODY
        self._reserve = Reserve()
        # Two descriptors of nothing: a connection's is copied over one of them, which takes no new number.
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._hand = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.bound = threading.Event()  # the port is open, and its kernel told
        self.unbound = threading.Event()  # the port is free
        self._open: dict[int, str] = {}  # all connections: descriptor -> peer's address and port
        self._coming: OrderedDict[int, str] = OrderedDict()  # strangers, the oldest first: the address
        self._from: dict[str, OrderedDict[int, None]] = {}  # the same by address
        self._others, self._counted_at = 64, 0.0  # descriptors that are no connections of ours
        self._fewer = self._limit  # connections beyond which an accept has failed
        self._fewer_until = 0.0
        self._refill_at = 0.0
        self._lock = threading.Lock()  # guards the next three
        self._closed: Counter[str] = Counter()  # since the last report, by address
        self._closed_full = False  # connections that belong here filled the port meanwhile
        self._report_at = 0.0
        _all.add(self)
        self._thread = threading.Thread(target=self._watch, name=f"atoll door of {name}", daemon=True)
        self._thread.start()

    @property
    def strangers(self) -> int:
        """Connections that may still be strangers'."""
        return len(self._coming)

    @property
    def connections(self) -> int:
        """All of them."""
        return len(self._open)

    def take_report(self) -> str:
        """A line, once, when connections were closed for want of room; else nothing."""
        if not self._closed or time.monotonic() < self._report_at:
            return ""
        with self._lock:
            closed, full = self._closed, self._closed_full
            self._closed, self._closed_full = Counter(), False
            self._report_at = time.monotonic() + _REPORT_SECONDS
        named = ", ".join(f"{count} from {host}" for host, count in closed.most_common(_MOST_NAMED))
        rest = len(closed) - _MOST_NAMED
        named += f", and {rest} more addresses" if rest > 0 else ""
        if full:
            return (
                f"full: {self.connections} connections are all that {self._limit} open files allow; turned "
                f"away: {named}; raise the limit (ulimit -n) where this is started"
            )
        return (
            f"closed {closed.total() if hasattr(closed, 'total') else sum(closed.values())} connections that "
            f"did not show that they belong to the run, to keep room for others: {named}"
        )

    def close(self) -> None:
        """After the monitor was stopped: end the thread."""
        self._thread.join(2.0)
        _all.discard(self)
        self._reserve.close()
        os.close(self._nothing)
        os.close(self._hand)

    # -- the thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        # It must not end before the monitor does: libzmq waits for room in it.
        while True:
            try:
                if self._monitor.poll(200) and self._take():
                    break
                if time.monotonic() > self._refill_at:  # also what a file has taken of it, and given back
                    self._refill_at = 0.0
                    self._reserve.refill()
            except zmq.ZMQError:
                break  # the context ends
            except Exception:  # a connection that cannot be looked at: the next
                continue
        with contextlib.suppress(zmq.ZMQError):
            self._monitor.close(linger=0)

    def _take(self) -> bool:
        """Take what the monitor tells; whether that was its last word."""
        for _ in range(64):
            try:
                head = self._monitor.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            while self._monitor.getsockopt(zmq.RCVMORE):
                self._monitor.recv(zmq.NOBLOCK)
            event, value = _EVENT.unpack(head)
            if event == zmq.EVENT_LISTENING:
                self._leave_silent(value)
                self.bound.set()
            elif event == zmq.EVENT_ACCEPTED:
                self._accepted(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._forget(value)
            elif event == zmq.EVENT_ACCEPT_FAILED:
                self._accept_failed()
            elif event in (zmq.EVENT_CLOSED, zmq.EVENT_CLOSE_FAILED):
                self.unbound.set()
            elif event == zmq.EVENT_MONITOR_STOPPED:
                return True
        return False

    def _leave_silent(self, descriptor: int) -> None:
        """Have the kernel keep a connection to itself until its client says something, as a client of ZeroMQ
        does at once: a silent one takes no descriptor."""
        with self._look_at(descriptor) as link, contextlib.suppress(OSError):
            if link is not None:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_SECONDS)

    def _accepted(self, descriptor: int) -> None:
        self._forget(descriptor)  # an earlier connection of that number
        with self._look_at(descriptor) as link:
            peer = _peer_of(link) if link is not None else None
        if peer is None:
            return  # gone again, or a path, which the file system guards
        host, where = peer
        self._open[descriptor] = where
        self._coming[descriptor] = host
        self._from.setdefault(host, OrderedDict())[descriptor] = None
        self._make_room(host)

    def _make_room(self, host: str) -> None:
        room = self._room()
        most = max(_LEAST_STRANGERS, min(room * 7 // 8, MOST_STRANGERS))
        most_of_one = max(_LEAST_STRANGERS, most * 7 // 8)
        while len(self._from.get(host, ())) > most_of_one:
            self._judge(next(iter(self._from[host])))
        while len(self._coming) > most:
            self._judge(next(iter(self._coming)))
        while _connections() > room and self._coming:
            self._judge(next(iter(self._coming)), full=len(self._coming) == 1)

    def _judge(self, descriptor: int, full: bool = False) -> None:
        """Close this connection, unless it is a stranger's no more; where the port is `full`, in any case."""
        host = self._coming.pop(descriptor)
        others = self._from[host]
        del others[descriptor]
        if not others:
            del self._from[host]
        with self._look_at(descriptor) as link:
            peer = _peer_of(link) if link is not None else None
            if link is None or peer is None or peer[1] != self._open[descriptor]:
                del self._open[descriptor]
                return
            if not full and _acknowledged(link) > self._through:
                return
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # libzmq closes it
        del self._open[descriptor]
        with self._lock:
            self._closed[host] += 1
            self._closed_full = self._closed_full or full

    def _accept_failed(self) -> None:
        """Descriptors are used up. Until one is free libzmq tries again, without a pause."""
        now = time.monotonic()
        here = _connections()
        self._fewer, self._fewer_until = max(_LEAST_STRANGERS, here - _LEAST_KEPT_BACK), now + _COUNT_SECONDS
        before = len(self._open)
        while _connections() > self._fewer and self._coming:
            self._judge(next(iter(self._coming)))
        if len(self._open) == before and not self._refill_at:
            # All belong here. So that who waits is turned away, and libzmq has peace, it is let in first.
            self._reserve.give()
            self._refill_at = now + _REFILL_SECONDS

    def _forget(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        host = self._coming.pop(descriptor, None)
        if host is not None:
            others = self._from[host]
            del others[descriptor]
            if not others:
                del self._from[host]

    def _room(self) -> int:
        """Connections that there may be, of all servers of this process."""
        now, here = time.monotonic(), _connections()
        if here > self._limit // 4 and now > self._counted_at + _COUNT_SECONDS:
            self._counted_at = now
            with contextlib.suppress(OSError):  # there is none left to look with
                self._others = max(0, len(os.listdir(_DESCRIPTORS)) - here)  # noqa: PTH208
        kept_back = max(_LEAST_KEPT_BACK, self._limit // _KEPT_BACK_SHARE)
        room = max(_LEAST_STRANGERS, self._limit - self._others - kept_back)
        return min(room, self._fewer) if now < self._fewer_until else room

    @contextlib.contextmanager
    def _look_at(self, descriptor: int) -> Iterator[socket.socket | None]:
        """The connection, by a copy of its descriptor: libzmq may close that one meanwhile, and another may
        get its number. None where it is closed already."""
        try:
            os.dup2(descriptor, self._hand, inheritable=False)
        except OSError:
            yield None
            return
        link: socket.socket | None = None
        try:
            with contextlib.suppress(OSError):  # a file by now
                link = socket.socket(fileno=self._hand)
            yield link
        finally:
            if link is not None:
                link.detach()
            os.dup2(self._nothing, self._hand, inheritable=False)


def _connections() -> int:
    """Connections of all servers of this process."""
    return sum(len(each._open) for each in tuple(_all))


def _peer_of(link: socket.socket) -> tuple[str, str] | None:
    """A peer's address, and the address with its port; None for what has none."""
    try:
        name = link.getpeername()
    except OSError:
        return None
    if not isinstance(name, tuple):
        return None
    host = str(name[0]).removeprefix("::ffff:")
    return host, f"{host} {name[1]}"


def _acknowledged(link: socket.socket) -> int:
    """Bytes of ours that a client's kernel says it has; 0 where the system does not tell."""
    try:
        info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return 0
    return int(struct.unpack_from("=Q", info, _ACKED_AT)[0]) if len(info) >= _ACKED_AT + 8 else 0
