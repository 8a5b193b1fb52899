"""Speed of the link between two workers: a small server in each, and a client that measures.

Over one TCP connection: echoes of a byte, whose median gives the latency; then bytes to be thrown away, first
a few, to find the size of a transfer that is worth measuring. A connection begins with the server's token, so
that nobody else is served; a server serves one connection at a time, and none for long.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from statistics import median

from atoll.core.errors import DeadlineError, PeerLostError

TOKEN_BYTES = 16
MOST_BYTES = 2**28  # of one transfer
MOST_ECHOES = 9
SERVED_SECONDS = 30.0  # for one connection, at most
_GREETING_SECONDS = 2.0  # for a connection to say the token
_SLICE_SECONDS = 0.2  # between looks at whether the server is to end
_ECHO, _TAKE = b"e", b"t"
_ASK = struct.Struct("!cQ")  # what, and of how many bytes
_ECHO_SHARE, _TAKE_SHARE = 0.25, 0.5  # of the time: for all echoes, and for the long transfer
_FIRST_BYTES = 2**16
_GROWS = 1.2  # a transfer that is so many times faster than the one before is followed by another
_PIECE = bytes(2**18)


class LinkServer:
    """Answers echoes and takes bytes on a thread of its own, at `port` of `host`, until `close`.

    A client must know `token`. Raises OSError if the server cannot listen.
    """

    def __init__(self, host: str) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="atoll links", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, and break off a connection under way. Closing twice does no harm."""
        self._over.set()
        self._thread.join(10 * _SLICE_SECONDS)
        self._listener.close()

    def _serve(self) -> None:
        self._listener.settimeout(_SLICE_SECONDS)
        while not self._over.is_set():
            with contextlib.suppress(OSError):  # nobody came, or one is gone: the next
                link, _ = self._listener.accept()
                with link:
                    self._serve_one(_Link(link, time.monotonic() + SERVED_SECONDS, self._over))

    def _serve_one(self, link: _Link) -> None:
        if not hmac.compare_digest(link.take(TOKEN_BYTES, _GREETING_SECONDS), self.token):
            return
        while True:
            what, size = _ASK.unpack(link.take(_ASK.size))
            if what not in (_ECHO, _TAKE) or size > MOST_BYTES:
                return
            if what == _TAKE:
                link.throw_away(size)
            link.say(_ECHO)


def measure(name: str, address: tuple[str, int], token: bytes, seconds: float) -> tuple[float, float]:
    """Measure the link to the server at `address`, in at most `seconds`: (bytes per second, seconds one way).

    `name` is the server's owner, for errors. The latency is half of the median echo. The bandwidth is that of
    the fastest of some transfers, each planned by the one before for half of the time that is left
    (MOST_BYTES at most): a connection over a long link begins slowly, and so more follow for as long as they
    are faster. Raises DeadlineError if it takes longer, and PeerLostError if the server is not there, ends,
    or does not take the token.
    """
    begin = time.monotonic()
    until = begin + seconds
    try:
        with socket.create_connection(address, max(0.01, seconds)) as link:
            return _measure(_Link(link, until, threading.Event()), token, begin, seconds)
    except TimeoutError:
        raise DeadlineError(
            f"waited {time.monotonic() - begin:.1f} s for {name} at {address[0]}:{address[1]} on the "
            f"measuring of its link (it was given {seconds:g} s)"
        ) from None
    except OSError as error:
        raise PeerLostError(
            f"{name} at {address[0]}:{address[1]} ended the measuring of its link: {error.strerror or error}"
        ) from None


def _measure(link: _Link, token: bytes, begin: float, seconds: float) -> tuple[float, float]:
    link.say(token)
    echoes = [_timed(link, _ECHO, 0)]
    while len(echoes) < MOST_ECHOES and time.monotonic() - begin < _ECHO_SHARE * seconds:
        echoes.append(_timed(link, _ECHO, 0))
    echo = median(echoes)
    rates = [_FIRST_BYTES / _without(_timed(link, _TAKE, _FIRST_BYTES), echo)]
    while (size := _next_size(rates[-1], begin + seconds - time.monotonic())) > _FIRST_BYTES:
        try:
            rates.append(size / _without(_timed(link, _TAKE, size), echo))
        except TimeoutError:  # the transfers before count
            break
        if rates[-1] < _GROWS * rates[-2]:
            break
    return max(rates[1:] or rates), echo / 2  # the first is so short that on a near link it tells little


def _next_size(rate: float, left: float) -> int:
    """Return the bytes that take their share of the `left` seconds, at `rate` bytes per second. A link
    that lets the first bytes through faster than later ones has twice as long."""
    return min(MOST_BYTES, int(rate * _TAKE_SHARE * max(0.0, left)))


def _without(taken: float, echo: float) -> float:
    """Return a transfer's time without its answer's way; above 0, whatever the clock's resolution."""
    return max(taken - echo, taken / 100, 1e-9)


def _timed(link: _Link, what: bytes, size: int) -> float:
    begin = time.monotonic()
    link.say(_ASK.pack(what, size))
    while size:
        piece = min(size, len(_PIECE))
        link.say(_PIECE[:piece])
        size -= piece
    link.take(1)
    return time.monotonic() - begin


class _Link:
    """A connection that ends with TimeoutError at `until` (monotonic), or when `over` is set."""

    def __init__(self, link: socket.socket, until: float, over: threading.Event) -> None:
        self._link, self._until, self._over = link, until, over
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._thrown = bytearray(len(_PIECE))

    def take(self, size: int, seconds: float | None = None) -> bytes:
        """Return exactly so many bytes, within `seconds` if given. Raises ConnectionError if the
        connection ends."""
        until = self._until if seconds is None else min(self._until, time.monotonic() + seconds)
        got = b""
        while len(got) < size:
            got += bytes(self._some(size - len(got), until))
        return got

    def throw_away(self, size: int) -> None:
        while size:
            size -= len(self._some(size, self._until))

    def say(self, data: bytes) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._link.settimeout(left)
        self._link.sendall(data)

    def _some(self, most: int, until: float) -> memoryview:
        """Return received bytes, at least one; they are good until the next call."""
        while True:
            left = until - time.monotonic()
            if left <= 0 or self._over.is_set():
                raise TimeoutError
            self._link.settimeout(min(left, _SLICE_SECONDS))
            with contextlib.suppress(TimeoutError):
                count = self._link.recv_into(self._thrown, min(most, len(self._thrown)))
                if not count:
                    raise ConnectionError("the connection is closed")
                return memoryview(self._thrown)[:count]
