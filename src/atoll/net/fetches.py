"""Payloads of chunks between the members of a group, over TCP connections of their own: a service that
answers, each connection on a thread, and the connections on which a member asks.

A payload goes from the owner's memory into the asker's with no copy between. It is not encrypted, as c10d's
traffic is not; but a client without the service's secret gets nothing (`wire/fetches.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

from atoll.core.errors import AtollError, DeadlineError, PeerLostError, RunError
from atoll.core.texts import one_line
from atoll.wire.base import WireError
from atoll.wire.fetches import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    FETCH_BYTES,
    MOST_REASON,
    OPENING_BYTES,
    PROOF_BYTES,
    SECRET_BYTES,
    Fetch,
    answer_untrusted,
    encode_answer,
    encode_fetch,
    fetch_untrusted,
    kind_bytes,
    opening,
    opening_untrusted,
    server_proof,
)

# read(fetch): the requested payload, or more of it, as bytes. It may wait, and raise.
ReadBytes: TypeAlias = Callable[[Fetch], AbstractContextManager[memoryview]]

OPENING_SECONDS = 10.0  # for a client to open its connection, and for a service to answer
MOST_STRANGERS = 64  # connections that are not opened yet; a further one closes the oldest
_TRIES, _PAUSE_SECONDS = 6, 0.02  # of a member whose connection was closed so, if strangers flood the port
_SLICE_SECONDS = 0.2  # of a wait, between which the clock is looked at
_CLOSING_SECONDS = 10.0  # for the threads to end


class RefusedError(RunError):
    """The owner could not give the payload; the line says why."""


class FetchService:
    """Answers fetches at `port` of `host`, from `serve` on, until `close`.

    Only a client that knows `secret`, as a member of a group of `count`, is answered. `patience` is in
    seconds: how long to wait for `serve`, and for a client that takes nothing. Raises OSError if it cannot
    listen.
    """

    def __init__(self, host: str, count: int, patience: float) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.sent = 0  # bytes of payloads
        self._count, self._patience = count, patience
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MOST_STRANGERS)
        self.host, self.port = self._listener.getsockname()[:2]
        self._read: ReadBytes | None = None
        self._serves, self._over = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # guards the next two, and `sent`
        self._links: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}  # of the links, the oldest first
        self._thread = threading.Thread(target=self._accept, name="atoll-members", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that the interpreter's end meets in torch aborts the process

    def serve(self, read: ReadBytes) -> None:
        """Answer by `read` from now on, on the threads of the connections."""
        self._read = read
        self._serves.set()

    def close(self) -> None:
        """Break off transfers under way, and end the threads. Closing twice does no harm."""
        if self._over.is_set():
            return
        atexit.unregister(self.close)
        self._over.set()
        self._serves.set()
        self._thread.join(_CLOSING_SECONDS)
        self._listener.close()
        with self._lock:
            links = dict(self._links)
        for link in links:
            with contextlib.suppress(OSError):  # it has ended by itself
                link.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + _CLOSING_SECONDS
        for thread in links.values():
            thread.join(max(0.0, until - time.monotonic()))

    def _accept(self) -> None:
        self._listener.settimeout(_SLICE_SECONDS)
        while not self._over.is_set():
            try:
                link, _ = self._listener.accept()
            except TimeoutError:  # nobody came
                continue
            except OSError:  # the client is gone again, or this process has too many files open
                self._over.wait(_SLICE_SECONDS)
                continue
            with self._lock:
                if len(self._strangers) >= MOST_STRANGERS:  # silent strangers must not shut a member out
                    self._send_away(next(iter(self._strangers)))
                self._strangers[link] = None
                thread = threading.Thread(target=self._serve, args=(link,), daemon=True)
                thread.name = f"atoll-members-{link.fileno()}"
                self._links[link] = thread
            thread.start()

    def _send_away(self, stranger: socket.socket) -> None:
        del self._strangers[stranger]
        with contextlib.suppress(OSError):  # it has gone by itself
            stranger.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _serve(self, link: socket.socket) -> None:
        """Serve one connection until its end."""
        try:
            with link:
                _prepare(link)
                self._meet(link)
                with self._lock:
                    self._strangers.pop(link, None)
                while not self._over.is_set() and self._answer(link):
                    pass
        except (OSError, AtollError):
            pass  # the client is gone, or a stranger: its connection ends
        finally:
            with self._lock:
                self._strangers.pop(link, None)
                del self._links[link]

    def _meet(self, link: socket.socket) -> None:
        """Let a client in. Raises WireError for a stranger."""
        until, challenge = time.monotonic() + OPENING_SECONDS, secrets.token_bytes(CHALLENGE_BYTES)
        _say(link, challenge, until)
        rank, theirs = opening_untrusted(_hear(link, OPENING_BYTES, until), challenge, self.secret)
        if rank >= self._count:
            raise WireError(f"a member {rank} of {self._count}")
        _say(link, server_proof(rank, theirs, self.secret), until)

    def _answer(self, link: socket.socket) -> bool:
        """Answer the next fetch; return whether there was one."""
        head = self._next_head(link)
        if not head:
            return False
        until = time.monotonic() + OPENING_SECONDS
        head += _hear(link, FETCH_BYTES - len(head), until) if len(head) < FETCH_BYTES else b""
        fetch = fetch_untrusted(head, _hear(link, kind_bytes(head), until))
        begun = False  # an answer that is half sent cannot become a refusal
        try:
            if not self._serves.wait(self._patience) or self._read is None:
                raise DeadlineError(f"it has waited {self._patience:g} s to hold any chunks")
            with self._read(fetch) as payload:
                if len(payload) < fetch.nbytes:
                    raise WireError(
                        f"{fetch.kind!r} of chunk {fetch.chunk} has {len(payload)} bytes, not {fetch.nbytes}"
                    )
                begun, until = True, time.monotonic() + self._patience
                _say(link, encode_answer(False, fetch.nbytes), until)
                _say(link, payload[: fetch.nbytes], until)
            with self._lock:
                self.sent += fetch.nbytes
        except Exception as error:
            if begun:
                raise
            self._refuse(link, error)
        return True

    def _next_head(self, link: socket.socket) -> bytes:
        """Return the next bytes of a fetch's head, however long they take; empty at the connection's end."""
        while not self._over.is_set():
            with contextlib.suppress(BlockingIOError):
                return link.recv(FETCH_BYTES)
        return b""

    def _refuse(self, link: socket.socket, error: Exception) -> None:
        """Send the client the reason why there is no payload."""
        said = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
        line = (said.splitlines() or ["an error without a word"])[0].encode()[:MOST_REASON]
        until = time.monotonic() + OPENING_SECONDS
        _say(link, encode_answer(True, len(line)) + line, until)


class FetchLink:
    """A connection to a member's service, for one thread at a time.

    `name` is the service's owner. `until` is a monotonic time; raises DeadlineError after it, and
    PeerLostError if the service cannot be reached, or does not know the secret.
    """

    def __init__(self, name: str, address: tuple[str, int], secret: bytes, rank: int, until: float) -> None:
        self._name = name
        for tries_left in reversed(range(_TRIES)):
            self._connect(address, until)
            try:
                self._meet(secret, rank, min(until, time.monotonic() + OPENING_SECONDS))
            except OSError as error:  # closed before it was opened: strangers may have filled the places
                self.close()
                if not tries_left:
                    raise PeerLostError(f"{name} did not let this member in: {_why(error)}") from None
                time.sleep(_PAUSE_SECONDS)
            except BaseException:
                self.close()
                raise
            else:
                return

    def _connect(self, address: tuple[str, int], until: float) -> None:
        try:
            self._link = socket.create_connection(address, max(0.01, until - time.monotonic()))
        except TimeoutError:
            raise DeadlineError(f"{self._name} at {address[0]}:{address[1]} takes no connection") from None
        except OSError as error:
            why = error.strerror or str(error)
            raise PeerLostError(f"{self._name} at {address[0]}:{address[1]}: {why}") from None

    def _meet(self, secret: bytes, rank: int, until: float) -> None:
        _prepare(self._link)
        own, theirs = secrets.token_bytes(CHALLENGE_BYTES), _hear(self._link, CHALLENGE_BYTES, until)
        _say(self._link, opening(rank, own, theirs, secret), until)
        proof = _hear(self._link, PROOF_BYTES, until)
        if not hmac.compare_digest(proof, server_proof(rank, own, secret)):
            raise PeerLostError(f"{self._name}: who answers there does not know the group's secret")

    def fetch(self, fetch: Fetch, into: memoryview, until: float, look: Callable[[], None]) -> None:
        """Fill `into`, of `fetch.nbytes`. `look` is called during waits, and may raise.

        Raises RefusedError, after which the connection may be used further; DeadlineError after `until`, and
        PeerLostError if the connection ends: after these it may not.
        """
        try:
            _say(self._link, encode_fetch(fetch), until, look)
            head = _hear(self._link, ANSWER_BYTES, until, look)
            refused = answer_untrusted(head, fetch.nbytes)
            if refused:
                reason = _hear(self._link, refused, until, look).decode(errors="replace")
                raise RefusedError(f"{self._name}: {one_line(reason, MOST_REASON)}")
            _fill(self._link, into, until, look)
        except WireError as error:
            raise PeerLostError(f"{self._name} sent {error}") from None
        except OSError as error:
            raise PeerLostError(f"{self._name}: {_why(error)}") from None

    def close(self) -> None:
        self._link.close()


def _prepare(link: socket.socket) -> None:
    """Make the socket block in slices, by the kernel's own timeouts: Python's would keep MSG_WAITALL from
    working."""
    link.settimeout(None)
    seconds = struct.pack("ll", 0, int(_SLICE_SECONDS * 1e6))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _nothing() -> None:
    """Do nothing during a wait."""


def _hear(link: socket.socket, count: int, until: float, look: Callable[[], None] = _nothing) -> bytes:
    heard = bytearray(count)
    _fill(link, memoryview(heard), until, look)
    return bytes(heard)


def _fill(link: socket.socket, into: memoryview, until: float, look: Callable[[], None]) -> None:
    """Fill `into`. Raises DeadlineError after `until`, and OSError if the connection ends."""
    while into:
        try:
            more = link.recv_into(into, 0, socket.MSG_WAITALL)
        except BlockingIOError:  # a slice is over
            look()
            _check(until)
            continue
        if not more:
            raise ConnectionError("it closed the connection")
        into = into[more:]
        if into:
            _check(until)


def _say(
    link: socket.socket, data: bytes | memoryview, until: float, look: Callable[[], None] = _nothing
) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[link.send(left) :]
        except BlockingIOError:
            look()
            _check(until)


def _check(until: float) -> None:
    if time.monotonic() > until:
        raise DeadlineError("timed out")


def _why(error: OSError) -> str:
    return error.strerror or str(error)
