"""The process's one ZeroMQ context, made at first use, and the thread that checks clients' keys.

A forked child begins without one: its parent's sockets and threads are not its own.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from contextlib import suppress
from typing import Protocol

import zmq
from zmq.utils import garbage

_IO_THREADS = 1
# zmq.h's ZMQ_ZERO_COPY_RECV, which has no name in pyzmq. Without a copy each small message that waits keeps
# the 18 KB that it was read into: 10,000 connections with 30 unread heartbeats each would take gigabytes.
# Large ones are read into their own place either way.
_ZERO_COPY_RECV = 10
_FINISH_SECONDS = 2.0

_lock = threading.Lock()
_context: zmq.Context[zmq.Socket[bytes]] | None = None
_allowed: dict[bytes, bytes] = {}  # ZAP domain -> the client's public key, 32 bytes
_keeper: threading.Thread | None = None
_open: set[Closable] = set()
_generation = 0


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return the context of this process."""
    global _context
    with _lock:
        if _context is None:
            _context = zmq.Context(_IO_THREADS)
            with suppress(zmq.ZMQError):  # a libzmq that does not know it
                _context.set(_ZERO_COPY_RECV, 0)
        return _context


def generation() -> int:
    """Return the number of forks between this process and the first one: a socket works only in its own
    process."""
    return _generation


class Closable(Protocol):
    """An endpoint, as its context sees it."""

    user: int  # the thread that used it last

    def abandon(self) -> None: ...


def opened(endpoint: Closable) -> None:
    """Note an open endpoint; its close calls `closed`."""
    with _lock:
        _open.add(endpoint)


def closed(endpoint: Closable) -> None:
    with _lock:
        _open.discard(endpoint)


def admit(domain: bytes, client: bytes) -> None:
    """At the servers of this ZAP domain, let in only clients with this public key (32 bytes)."""
    global _keeper
    door = context()
    with _lock:
        _allowed[domain] = client
        if _keeper is None:
            requests = door.socket(zmq.REP)
            requests.linger = 0
            requests.bind("inproc://zeromq.zap.01")  # by ZeroMQ RFC 27
            _keeper = threading.Thread(target=_keep_doors, args=(requests,), name="atoll-keys", daemon=True)
            _keeper.start()


def dismiss(domain: bytes) -> None:
    """Forget a domain whose servers are closed."""
    with _lock:
        _allowed.pop(domain, None)


def _keep_doors(requests: zmq.Socket[bytes]) -> None:
    """Answer ZAP requests (RFC 27) until the context ends."""
    with suppress(zmq.ContextTerminated):
        while True:
            requests.send_multipart(_answer(requests.recv_multipart()))
    requests.close(linger=0)


def _answer(request: list[bytes]) -> list[bytes]:
    # version, request id, domain, address, identity, mechanism, credentials...
    number = request[1] if len(request) > 1 else b""
    good = (
        len(request) == 7
        and request[0] == b"1.0"
        and request[5] == b"CURVE"
        and _allowed.get(request[2]) == request[6]
    )
    status = [b"200", b"OK"] if good else [b"400", b"another key"]
    return [b"1.0", number, *status, b"", b""]


def _forget() -> None:
    """Reset a forked child's state: the threads are gone, and the sockets are the parent's."""
    global _lock, _context, _keeper, _generation
    _lock = threading.Lock()
    _context, _keeper = None, None
    _allowed.clear()
    _open.clear()
    _generation += 1


@atexit.register
def finish() -> None:
    """At a process's end, let closed endpoints send what they still hold (no longer than their linger), and
    drop the messages of open ones: a message that is sent without a copy must not outlive its memory.

    Runs before pyzmq's own release of messages sent without a copy (`garbage`, imported above), as handlers
    run last first; a message that is freed after that would crash the process.
    """
    if _context is None:
        return
    running = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    for endpoint in list(_open):
        if endpoint.user not in running:
            endpoint.abandon()
    if not _open:
        _context.term()
    # With an endpoint open in a thread that goes on, term would wait for ever.
    end = time.monotonic() + _FINISH_SECONDS
    while garbage.gc.refs and time.monotonic() < end:
        time.sleep(0.005)


os.register_at_fork(after_in_child=_forget)
