"""Strangers: connections of a server that have not shown that they belong to the run.

libzmq accepts whoever connects, and waits ten seconds for a handshake. Each connection takes a descriptor
meanwhile, so that some hundreds of silent ones would leave none for a worker, or for the journal. So the
kernel is asked to keep silent ones to itself, as many as it has room for, and the others are bounded, in all
and for each address: beyond, the oldest is closed. One who belongs here takes a stranger's place at any time.

libzmq tells of each connection that it accepts by its descriptor, and not of which one a handshake has
succeeded. The kernel tells that: a server sends its last word of a handshake only to a client that has the
key, so a client is through once it has acknowledged more bytes than what anybody gets (ZMTP, RFC 23 and 26).

A failed handshake costs libzmq 40 to 90 us. Where many fail, the kernel drops, for a while, whatever does not
begin as a client of libzmq does: that costs this process nothing (net/packetfilter.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence

import zmq

from atoll.core.descriptors import Reserve, raise_descriptor_limit
from atoll.net.packetfilter import Instruction, attach, detach, only_greetings

EVENTS = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CLOSE_FAILED
    | zmq.EVENT_MONITOR_STOPPED
)
MOST_STRANGERS = 16384  # in all, if descriptors allow as many
# Bytes that a server sends to anybody: its greeting, and with keys its WELCOME, or an ERROR; READY is longer.
_TO_ANYBODY, _WITH_KEYS = 64, 64 + 170 + 32
_LEAST_STRANGERS = 16
_SILENT_SECONDS = 60  # for which the kernel keeps a silent connection to itself
_LEAST_KEPT_BACK, _KEPT_BACK_SHARE = 32, 16  # descriptors for files and links of our own: that share
_COUNT_SECONDS = 5.0  # between looks at how many descriptors the rest of the process has
_REFILL_SECONDS = 0.2
_REPORT_SECONDS = 60.0  # between two such lines
_MOST_NAMED = 4  # addresses in a line
_FLOOD_SECONDS, _FLOOD_RATE = 0.2, 100.0  # how often failed handshakes are counted; a flood, each second
_SCREEN_SECONDS = 60.0  # for which the kernel drops connections that begin otherwise than a client's
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
        self._hand = _Hand()
        self._screen = _Screen(self._hand)
        self.bound = threading.Event()  # the port is open, and its kernel told
        self.unbound = threading.Event()  # the port is free
        self._open: set[int] = set()  # descriptors of all connections
        self._coming: OrderedDict[int, str] = OrderedDict()  # strangers, the oldest first: the address, or ""
        self._unseen: OrderedDict[int, None] = OrderedDict()  # those whose address was not asked for yet
        self._from: dict[str, OrderedDict[int, None]] = {}  # the others by address
        self._others, self._counted_at = 64, 0.0  # descriptors that are no connections of ours
        self._fewer = self._limit  # connections beyond which an accept has failed
        self._fewer_until = 0.0
        self._refill_at = 0.0
        self._port = 0  # of TCP
        self._lock = threading.Lock()  # guards the next three
        self._closed: Counter[str] = Counter()  # since the last report, by address
        self._closed_full = False  # connections that belong here filled the port meanwhile
        self._report_at = 0.0
        _all.add(self)
        self._thread = threading.Thread(target=self._watch, name=f"atoll door of {name}", daemon=True)
        self._thread.start()

    @property
    def strangers(self) -> int:
        """Number of connections that may still be strangers'."""
        return len(self._coming)

    @property
    def connections(self) -> int:
        """Number of all connections."""
        return len(self._open)

    def take_report(self) -> str:
        """Return a line, once, when connections were closed for want of room, or many failed; else an
        empty string."""
        if flood := self._screen.take_report():
            return flood
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
        """End the thread, after the monitor was stopped."""
        self._thread.join(2.0)
        _all.discard(self)
        self._reserve.close()
        self._hand.close()

    # -- the thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        # It must not end before the monitor does: libzmq waits for room in it.
        while True:
            try:
                if self._monitor.poll(200) and self._take():
                    break
                self._screen.poll(time.monotonic())
                if time.monotonic() > self._refill_at:  # a file may have borrowed from the reserve
                    self._refill_at = 0.0
                    self._reserve.refill()
            except zmq.ZMQError:
                break  # the context ends
            except Exception:  # a connection that cannot be looked at: the next
                continue
        with contextlib.suppress(zmq.ZMQError):
            self._monitor.close(linger=0)

    def _take(self) -> bool:
        """Handle the monitor's events; return whether it has stopped."""
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
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._screen.handle_succeeded()
            elif event == zmq.EVENT_DISCONNECTED:
                self._forget(value)
                self._screen.handle_ended()
            elif event == zmq.EVENT_ACCEPT_FAILED:
                self._accept_failed()
            elif event in (zmq.EVENT_CLOSED, zmq.EVENT_CLOSE_FAILED):
                self.unbound.set()
            elif event == zmq.EVENT_MONITOR_STOPPED:
                return True
        return False

    def _leave_silent(self, descriptor: int) -> None:
        """Have the kernel keep a connection to itself until its client sends something, as a client of
        ZeroMQ does at once: a silent one takes no descriptor."""
        with self._hand.at(descriptor) as link:
            port = _name_of(link.getsockname)[1] if link is not None else 0
            if link is not None and port:
                self._port = port
                with contextlib.suppress(OSError):
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_SECONDS)
                    self._screen.handle_listening(descriptor, port)

    def _accepted(self, descriptor: int) -> None:
        self._forget(descriptor)  # an earlier connection of that number
        if not self._port:
            return  # the server listens at a path, which the file system guards
        self._screen.lift_of(descriptor)
        self._open.add(descriptor)
        self._coming[descriptor] = ""
        self._unseen[descriptor] = None
        self._make_room()

    def _make_room(self) -> None:
        room = self._room()
        most = max(_LEAST_STRANGERS, min(room * 7 // 8, MOST_STRANGERS))
        most_of_one = max(_LEAST_STRANGERS, most * 7 // 8)
        if len(self._coming) > most_of_one:
            while self._unseen:
                host = self._see(self._unseen.popitem(last=False)[0])
                while len(self._from.get(host, ())) > most_of_one:
                    self._judge(next(iter(self._from[host])))
        while len(self._coming) > most:
            self._judge(next(iter(self._coming)))
        while _connections() > room and self._coming:
            self._judge(next(iter(self._coming)), full=len(self._coming) == 1)

    def _see(self, descriptor: int) -> str:
        """Return a stranger's address, which costs as much as all else; empty if the connection is gone."""
        with self._hand.at(descriptor) as link:
            host = self._client_of(link)
        if host:
            self._coming[descriptor] = host
            self._from.setdefault(host, OrderedDict())[descriptor] = None
        else:
            self._forget(descriptor)
        return host

    def _judge(self, descriptor: int, full: bool = False) -> None:
        """Close this connection, unless it is no longer a stranger's; if the port is `full`, in any case."""
        self._no_stranger(descriptor)
        with self._hand.at(descriptor) as link:
            host = self._client_of(link)
            if host and link is not None:
                if not full and _acknowledged(link) > self._through:
                    return
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)  # libzmq closes it
                with self._lock:
                    self._closed[host] += 1
                    self._closed_full = self._closed_full or full
        self._open.discard(descriptor)

    def _client_of(self, link: socket.socket | None) -> str:
        """Return the address of a client of this server; empty for any other file."""
        if link is None or _name_of(link.getsockname)[1] != self._port:
            return ""
        return _name_of(link.getpeername)[0]

    def _accept_failed(self) -> None:
        """Free descriptors, which are used up. Until one is free libzmq tries again, without a pause."""
        now = time.monotonic()
        here = _connections()
        self._fewer, self._fewer_until = max(_LEAST_STRANGERS, here - _LEAST_KEPT_BACK), now + _COUNT_SECONDS
        before = len(self._open)
        while _connections() > self._fewer and self._coming:
            self._judge(next(iter(self._coming)))
        if len(self._open) == before and not self._refill_at:
            # All belong here. A reserved descriptor lets the waiting client in, to be turned away.
            self._reserve.give()
            self._refill_at = now + _REFILL_SECONDS

    def _forget(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        self._no_stranger(descriptor)

    def _no_stranger(self, descriptor: int) -> None:
        self._unseen.pop(descriptor, None)
        host = self._coming.pop(descriptor, "")
        if host:
            others = self._from[host]
            del others[descriptor]
            if not others:
                del self._from[host]

    def _room(self) -> int:
        """Return the number of connections that all servers of this process may have."""
        now, here = time.monotonic(), _connections()
        if here > self._limit // 4 and now > self._counted_at + _COUNT_SECONDS:
            self._counted_at = now
            with contextlib.suppress(OSError):  # no descriptor is left to look with
                self._others = max(0, len(os.listdir(_DESCRIPTORS)) - here)  # noqa: PTH208
        kept_back = max(_LEAST_KEPT_BACK, self._limit // _KEPT_BACK_SHARE)
        room = max(_LEAST_STRANGERS, self._limit - self._others - kept_back)
        return min(room, self._fewer) if now < self._fewer_until else room


class _Hand:
    """Copies libzmq's descriptors, one at a time: libzmq may close one meanwhile, and another file may get
    its number."""

    def __init__(self) -> None:
        # Two descriptors of /dev/null: another is copied over one of them, which takes no new number.
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._copy = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def at(self, descriptor: int) -> Iterator[socket.socket | None]:
        """Yield the connection of that number, or the file that has the number by now; None if there is
        none."""
        try:
            os.dup2(descriptor, self._copy, inheritable=False)
        except OSError:
            yield None
            return
        link = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, self._copy)  # asks for nothing
        try:
            yield link
        finally:
            link.detach()
            os.dup2(self._nothing, self._copy, inheritable=False)

    def close(self) -> None:
        os.close(self._nothing)
        os.close(self._copy)


class _Screen:
    """While many handshakes fail, has the kernel drop connections that do not begin like a client of
    libzmq."""

    def __init__(self, hand: _Hand) -> None:
        self._hand = hand
        self._listener, self._port = -1, 0
        self._succeeded = 0  # handshakes whose connections still stand
        self._failed, self._counted_at = 0, time.monotonic()  # handshakes since then
        self._until = 0.0  # 0: the kernel drops nothing
        self._was_on = False
        self._report = ""

    def handle_listening(self, descriptor: int, port: int) -> None:
        """Note the listening socket and its port."""
        self._listener, self._port = descriptor, port

    def handle_succeeded(self) -> None:
        """Count a client whose handshake succeeded."""
        self._succeeded += 1

    def handle_ended(self) -> None:
        """Count the end of a connection. libzmq does not report whether its handshake had succeeded: as
        many ends as there were successes count as successful."""
        if self._succeeded:
            self._succeeded -= 1
        else:
            self._failed += 1

    def lift_of(self, descriptor: int) -> None:
        """Let everything through to an accepted connection, which has inherited the port's program."""
        if self._was_on:
            with self._hand.at(descriptor) as link:
                if link is not None:
                    detach(link)

    def poll(self, now: float) -> None:
        """Begin or end dropping, if that is due."""
        if self._until and now > self._until:
            self._until = 0.0
            self._set(None)
        seconds = now - self._counted_at
        if seconds < _FLOOD_SECONDS:
            return
        failed, self._failed, self._counted_at = self._failed, 0, now
        if failed > _FLOOD_RATE * seconds and not self._until and self._set(only_greetings()):
            self._was_on, self._until = True, now + _SCREEN_SECONDS
            self._report = (
                f"flooded: within {seconds:.1f} s {failed} connections did not show that they belong to the "
                f"run; for {_SCREEN_SECONDS:g} s those that begin otherwise than a client does are dropped"
            )

    def take_report(self) -> str:
        """Return a line, once, after dropping has begun."""
        report, self._report = self._report, ""
        return report

    def _set(self, steps: Sequence[Instruction] | None) -> bool:
        """Have the kernel run this program at the port, or none; return whether it does."""
        with self._hand.at(self._listener) as link:
            if link is None or _name_of(link.getsockname)[1] != self._port:
                return False  # it is closed
            if steps is not None:
                return attach(link, steps)
            detach(link)
            return True


def _connections() -> int:
    """Return the number of connections of all servers of this process."""
    return sum(len(each._open) for each in tuple(_all))


def _name_of(ask: Callable[[], object]) -> tuple[str, int]:
    """Return host and port of one end of a connection; empty and 0 if it has none."""
    try:
        name = ask()
    except OSError:
        return "", 0
    return (str(name[0]).removeprefix("::ffff:"), int(name[1])) if isinstance(name, tuple) else ("", 0)


def _acknowledged(link: socket.socket) -> int:
    """Return the number of this server's bytes that a client's kernel has acknowledged; 0 if the system
    does not report it."""
    try:
        info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return 0
    return int(struct.unpack_from("=Q", info, _ACKED_AT)[0]) if len(info) >= _ACKED_AT + 8 else 0
