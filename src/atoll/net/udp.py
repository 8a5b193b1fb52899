"""UDP sockets that carry bursts: many datagrams in one system call, as rows of one array.

If the system has segmentation offload, the kernel cuts a burst into datagrams (UDP_SEGMENT) and joins
consecutive arrivals (UDP_GRO). If it has none, or refuses it, each datagram takes a call of its own;
`UdpPort.offload` says which, and why. Nothing here waits: `poll` the port. Source: docs/ltp.md, "Bursts,
stripes, and a link's thread".
"""

from __future__ import annotations

import errno
import socket as sockets
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from atoll.core.errors import RunError, UserError
from atoll.net import context as process
from atoll.net.packetfilter import Instruction, attach

Bytes: TypeAlias = npt.NDArray[np.uint8]
Address: TypeAlias = tuple[Any, ...]  # (host, port), of IPv6 with flow and scope: as the socket module has it

BUFFER_BYTES = 8 * 2**20  # of unread datagrams: 64 ms of 1 Gbit/s. The usual 208 KiB are 1.7 ms
SEND_BUFFER_BYTES = 2 * 2**20  # a burst of 2 ms at 8 Gbit/s: more would be a queue that no rate knows of
MOST_SEGMENTS = 64  # of one call: Linux's UDP_MAX_SEGMENTS before 6.9
MOST_CALL_BYTES = 65_000  # of one call: with the headers it must stay within an IP packet's 65,535
MOST_DATAGRAM_BYTES = 65_507  # of IPv4
ARENA_BYTES = 2**20  # that one `receive` takes at most, so that sending gets its turn
MOST_CALLS = 256  # of one `receive`: of tiny or empty datagrams the arena would take any number
_SLOT = 2**16  # bytes that a call to receive may bring
_ALIGNED = 64
_IPV4_AND_UDP_BYTES, _IPV6_AND_UDP_BYTES = 28, 48
_OFFLOAD_CALLS_OFF = (errno.EIO, errno.EINVAL, errno.ENOPROTOOPT, errno.EOPNOTSUPP)

# Linux's numbers, which Python's socket module lacks.
_UDP_SEGMENT, _UDP_GRO = 103, 104
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _SO_TIMESTAMPNS, _SO_RXQ_OVFL = 32, 33, 35, 40
_IP_MTU_DISCOVER, _IP_MTU, _IPV6_MTU_DISCOVER, _IPV6_MTU, _DONT_FRAGMENT = 10, 14, 23, 24, 2
_INT = struct.Struct("=i")
_UNSIGNED = struct.Struct("=I")
_SHORT = struct.Struct("=H")
_TIME = struct.Struct("@ll")  # seconds and nanoseconds
_ANCILLARY_BYTES = 128  # room for a length, a count and a time
MOST_LATENESS = 1.0  # seconds from arrival to reading that are believed: a clock may be set

Refused: TypeAlias = Literal["full", "lost", "again"]


class Received(NamedTuple):
    """Consecutive datagrams of one length from one address: `frames` is (n, size), and `sizes` (n,)
    repeats the size for each. They lie in the port's memory, good until its next `receive`. `arrived`
    (monotonic) is when the last of them came to this machine: a thread may read late."""

    frames: Bytes
    sizes: npt.NDArray[np.int64]
    address: Address
    arrived: float


@dataclass(frozen=True)
class Offload:
    """A port's way through the system: whether the kernel cuts sent bursts and joins arrivals; if not, why
    not."""

    sends: bool
    receives: bool
    reason: str


@dataclass
class Counters:
    """Counts of one port, since it was opened."""

    sent: int = 0  # datagrams
    sent_bytes: int = 0
    sent_calls: int = 0
    received: int = 0
    received_bytes: int = 0
    received_calls: int = 0
    full: int = 0  # calls that found no room
    refused: int = 0  # errors of the network: nobody listens there, no route leads there
    too_large: int = 0  # datagrams larger than the route takes: lost
    dropped: int = 0  # by the kernel, for want of room or by `take_only`; a burst counts once


class UdpPort:
    """A UDP socket at `address` (host and port; port 0: any free one, see `.address`), IPv4 or IPv6.

    `buffer_bytes` is the requested room for datagrams that wait to be read; `.receive_buffer` is the kernel's
    grant. The port belongs to one thread at a time, and to the process that made it. Raises UserError for an
    address that is in use or not this machine's.
    """

    def __init__(
        self, address: tuple[str, int], buffer_bytes: int = BUFFER_BYTES, *, offload: bool = True
    ) -> None:
        self.family, where = resolve(*address)
        self._generation = process.generation()
        self._socket = sockets.socket(self.family, sockets.SOCK_DGRAM)
        self.count = Counters()
        self.drained = True
        self.trouble = ""  # the last thing that kept datagrams from leaving, in words
        self._closed = False
        self._arena = np.zeros(ARENA_BYTES, np.uint8)
        self._memory = self._arena.data
        try:
            self._socket.setblocking(False)
            self.receive_buffer = self._buffer(buffer_bytes, _SO_RCVBUFFORCE, sockets.SO_RCVBUF)
            self._buffer(SEND_BUFFER_BYTES, _SO_SNDBUFFORCE, sockets.SO_SNDBUF)
            self._set_up()
            self.offload = self._probe_offload() if offload else Offload(False, False, "it was turned off")
            self._bind(where)
        except BaseException:
            self._socket.close()
            raise
        self.address: Address = self._socket.getsockname()

    def __enter__(self) -> UdpPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor, for `poll`."""
        return self._alive().fileno()

    def close(self) -> None:
        """Close the port. Closing twice does no harm."""
        self._closed = True
        self._socket.close()

    def send(self, frames: Bytes, address: Address) -> int:
        """Send each row of `frames`, (n, size), as a datagram to `address`; return the number of rows dealt
        with.

        Fewer than n: the system has no room now, and the rest may go again when the port is writable. Rows
        that the network refuses (nobody listens there, too large for the route) count as dealt with: for
        their sender they are lost, and `count` and `trouble` say so. Rows that are not contiguous in memory
        are copied first.
        """
        door = self._alive()
        rows, size = frames.shape
        data = np.ascontiguousarray(frames).reshape(-1).data
        sent = 0
        while sent < rows:
            take = min(rows - sent, self._rows_of_a_call(size))
            piece = data[sent * size : (sent + take) * size]
            try:
                if take > 1:
                    cut = (sockets.IPPROTO_UDP, _UDP_SEGMENT, _SHORT.pack(size))
                    door.sendmsg((piece,), (cut,), 0, address)
                else:
                    door.sendto(piece, address)
            except OSError as error:
                what = self._refused(error, take, size, address)
                if what == "full":
                    self.count.full += 1
                    break
                if what == "lost":
                    sent += take
            else:
                sent += take
                self.count.sent += take
                self.count.sent_bytes += take * size
                self.count.sent_calls += 1
        return sent

    def receive(self) -> list[Received]:
        """Return the datagrams that have come, up to ARENA_BYTES or MOST_CALLS, in order; never waits.

        A kernel joins datagrams of one length, the last of which may be shorter: that one is another element.
        Afterwards `drained` says whether that was all.
        """
        door, memory = self._alive(), self._memory
        parts: list[_Run] = []
        now, clock = _clocks()
        at = refusals = 0
        self.drained = False
        for _ in range(MOST_CALLS):
            if at + _SLOT > ARENA_BYTES:
                break
            try:
                count, ancillary, _, address = door.recvmsg_into((memory[at : at + _SLOT],), _ANCILLARY_BYTES)
            except BlockingIOError:
                self.drained = True
                break
            except OSError as error:  # the network's error about a datagram sent before
                refusals += 1
                if error.errno not in _NETWORK or refusals > MOST_SEGMENTS:
                    raise
                self.count.refused += 1
                continue
            told, when = self._told(ancillary)
            size, arrived = told or count, when - clock
            if not now - MOST_LATENESS <= arrived <= now:
                arrived = time.monotonic()
            self.count.received_calls += 1
            self.count.received_bytes += count
            if count:
                at = _note(parts, at, count, size, address, arrived)
        runs = [run for run in parts if run.rows]
        self.count.received += sum(run.rows for run in runs)
        return [run.received(self._arena) for run in runs]

    def take_only(self, steps: Sequence[Instruction]) -> bool:
        """Have the kernel drop packets that a program of `atoll.net.packetfilter` refuses, in place of the
        program before; return whether it does. The program sees only the beginning of a joined burst.
        `count.dropped` counts its drops."""
        return attach(self._alive(), steps)

    # -- setting up ----------------------------------------------------------------------------------------

    def _buffer(self, size: int, force: int, ask: int) -> int:
        """Ask for a buffer; return its real size in bytes (Linux keeps as much again for its own records)."""
        try:
            if not _IS_LINUX:
                raise PermissionError
            self._socket.setsockopt(sockets.SOL_SOCKET, force, size)
        except PermissionError:  # only the administrator passes the system's bound
            self._socket.setsockopt(sockets.SOL_SOCKET, ask, size)
        got = self._socket.getsockopt(sockets.SOL_SOCKET, ask)
        return got // 2 if _IS_LINUX else got

    def _set_up(self) -> None:
        door = self._socket
        if self.family == sockets.AF_INET6:
            door.setsockopt(sockets.IPPROTO_IPV6, sockets.IPV6_V6ONLY, 0)
        if not _IS_LINUX:
            return
        # A datagram of which one fragment is lost is lost whole: rather learn that it is too large.
        door.setsockopt(sockets.IPPROTO_IP, _IP_MTU_DISCOVER, _DONT_FRAGMENT)
        if self.family == sockets.AF_INET6:
            door.setsockopt(sockets.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _DONT_FRAGMENT)
        for option in (_SO_RXQ_OVFL, _SO_TIMESTAMPNS):
            door.setsockopt(sockets.SOL_SOCKET, option, 1)

    def _probe_offload(self) -> Offload:
        if not _IS_LINUX:
            return Offload(False, False, f"{sys.platform} has none")
        why = []
        for option, what in ((_UDP_SEGMENT, "UDP_SEGMENT"), (_UDP_GRO, "UDP_GRO")):
            try:
                # For UDP_SEGMENT, 0 means "as each call says"; this only asks whether the kernel knows it.
                self._socket.setsockopt(sockets.IPPROTO_UDP, option, int(option == _UDP_GRO))
            except OSError as error:
                why.append(f"no {what}: {error.strerror}")
        lacking = " ".join(why)
        return Offload("UDP_SEGMENT" not in lacking, "UDP_GRO" not in lacking, "; ".join(why))

    def _bind(self, where: Address) -> None:
        try:
            self._socket.bind(where)
        except OSError as error:
            shown = shown_address(where)
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"another process has UDP port {shown} already; give another one") from None
            if error.errno == errno.EADDRNOTAVAIL:
                raise UserError(f"cannot open UDP port {shown}: no address of this machine") from None
            raise UserError(f"cannot open UDP port {shown}: {error.strerror}") from None

    def _alive(self) -> sockets.socket:
        if self._generation != process.generation():
            why = "a forked process cannot use its parent's"
        elif self._closed:
            why = "it is closed"
        else:
            return self._socket
        raise RunError(f"UDP port {shown_address(self.address)}: {why}")

    # -- sending and receiving -----------------------------------------------------------------------------

    def _rows_of_a_call(self, size: int) -> int:
        return min(MOST_SEGMENTS, max(1, MOST_CALL_BYTES // size)) if self.offload.sends else 1

    def _refused(self, error: OSError, rows: int, size: int, address: Address) -> Refused:
        """Return what becomes of the rows that a call did not send. Raises errors that the network did not
        cause."""
        number = error.errno
        if number in (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.ENOMEM):
            return "full"
        if number in _NETWORK:
            self.count.refused += 1
            self.trouble = f"{shown_address(address)}: {error.strerror}"
            return "lost"
        most = _most_bytes(self._socket, address)
        if number == errno.EMSGSIZE or (rows > 1 and number == errno.EINVAL and size > most):
            self.count.too_large += rows
            self.trouble = (
                f"datagrams of {size} bytes are too large for the way to {shown_address(address)}, "
                f"which takes {most} at most"
            )
            return "lost"
        if rows > 1 and number in _OFFLOAD_CALLS_OFF:  # a tunnel or an old driver on the way out: no offload
            why = f"sending in bursts to {shown_address(address)}: {error.strerror}"
            reason = "; ".join(filter(None, [self.offload.reason, why]))
            self.offload = Offload(False, self.offload.receives, reason)
            return "again"
        raise error

    def _told(self, ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[int, float]:
        """Return the length of the datagrams that the kernel joined (0: it joined none), and their arrival
        by the system's clock (0: unknown)."""
        size, when = 0, 0.0
        for level, kind, data in ancillary:
            if level == sockets.IPPROTO_UDP and kind == _UDP_GRO:
                size = int(_INT.unpack_from(data)[0])
            elif level == sockets.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIME.unpack_from(data)
                when = seconds + nanoseconds * 1e-9
            elif level == sockets.SOL_SOCKET and kind == _SO_RXQ_OVFL:
                self.count.dropped = int(_UNSIGNED.unpack_from(data)[0])
        return size, when


_IS_LINUX = sys.platform == "linux"
# Errors of the network about a datagram, this one or an earlier one: they weigh no more than a loss.
_NETWORK = frozenset(
    (
        *(errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN),
        *(errno.EPERM, errno.EACCES, errno.EADDRNOTAVAIL, errno.ECONNRESET, errno.EPROTO),
    )
)


@dataclass
class _Run:
    """Datagrams of one length from one address that lie one after the other in the arena."""

    start: int
    size: int
    rows: int
    address: Address
    arrived: float

    @property
    def end(self) -> int:
        return self.start + self.rows * self.size

    def received(self, arena: Bytes) -> Received:
        frames = arena[self.start : self.end].reshape(self.rows, self.size)
        return Received(frames, np.full(self.rows, self.size, np.int64), self.address, self.arrived)


def _note(runs: list[_Run], at: int, count: int, size: int, address: Address, arrived: float) -> int:
    """Add `count` bytes that came to byte `at` of the arena; return the place for the next ones."""
    whole, rest = divmod(count, size)
    last = runs[-1] if runs else None
    if last is not None and last.size == size and last.end == at and last.address == address:
        last.rows += whole
        last.arrived = arrived
    else:
        runs.append(_Run(at, size, whole, address, arrived))
    at += whole * size
    if not rest:
        return at  # the next datagrams may be of the same run: they must lie beside these
    runs.append(_Run(at, rest, 1, address, arrived))
    return -(-(at + rest) // _ALIGNED) * _ALIGNED


def _clocks() -> tuple[float, float]:
    """Return the monotonic time, and the kernel's clock for arrivals minus the monotonic one. The fastest
    of three tries counts: if a thread were put off between the two clocks, all arrivals would seem too
    early."""
    tries = []
    for _ in range(3):
        before, clock, after = time.monotonic(), time.time(), time.monotonic()
        tries.append((after - before, after, clock - after))
    _, now, ahead = min(tries)
    return now, ahead


def resolve(host: str, port: int) -> tuple[int, Address]:
    """Return the family and the address of a host. May ask a name server. Raises UserError if there is
    none."""
    if not 0 <= port < 2**16:
        raise UserError(f"port {port} of {host}: between 0 and 65535")
    try:
        found = sockets.getaddrinfo(host, port, type=sockets.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"no address of {host!r}, port {port}: {error}") from None
    family, _, _, _, address = found[0]
    return family, address


def shown_address(address: Address) -> str:
    """Return an address for an error's line: host and port, an IPv6 host in brackets."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _most_bytes(door: sockets.socket, address: Address) -> int:
    """Return the largest datagram that the route to `address` takes, as far as this machine knows."""
    option, level, headers = (
        (_IPV6_MTU, sockets.IPPROTO_IPV6, _IPV6_AND_UDP_BYTES)
        if door.family == sockets.AF_INET6
        else (_IP_MTU, sockets.IPPROTO_IP, _IPV4_AND_UDP_BYTES)
    )
    try:
        with sockets.socket(door.family, sockets.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: it only chooses the route
            return min(MOST_DATAGRAM_BYTES, probe.getsockopt(level, option) - headers)
    except OSError:
        return MOST_DATAGRAM_BYTES
