"""Servers, clients and made-up strangers, for the tests of what goes over the net."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from atoll.core.errors import UserError
from atoll.net.endpoint import Client, Received, Server
from atoll.net.keys import Keys, make_keys
from atoll.wire.messages import (
    Hello,
)

ANY = "tcp://127.0.0.1:0"
LIMIT = 2**24
SOON = 60.0  # seconds in which everything here must have happened, on a busy machine too

KEYS = make_keys()
OTHERS = make_keys()
HELLO = Hello(version=1, run="r", role="worker")


@contextmanager
def pair(keys: Keys | None = None, limit: int = LIMIT) -> Iterator[tuple[Server, Client]]:
    with (
        Server(ANY, keys, limit=limit, name="hub") as server,
        Client(server.address, keys, limit=limit, name="hub") as client,
    ):
        yield server, client


def must_receive(server: Server) -> Received:
    received = server.receive(SOON)
    assert received is not None
    return received


def serves(server: Server, client: Client, text: bytes = b"are you there?", noise: bool = False) -> None:
    """The server takes a message of a good client and answers it."""
    client.send(text, b"payload")
    received = must_receive(server)
    while received.header != text and noise:
        received = must_receive(server)
    assert (received.header, received.payload) == (text, b"payload")
    assert server.send(received.peer, b"yes")
    answer = client.receive(SOON)
    assert answer == (b"yes", None)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, "the deadline passed"
        time.sleep(0.01)


def check_until_it_raises(client: Client) -> str:
    end = time.monotonic() + SOON
    with pytest.raises(UserError) as caught:  # noqa: PT012
        while time.monotonic() < end:
            client.check()
            time.sleep(0.01)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextmanager
def reserved() -> Iterator[str]:
    """An address whose port no other process is given while servers here come and go at it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ's listeners do
        holder.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{holder.getsockname()[1]}"


@contextmanager
def fake(talk: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server of something else: `talk` for each connection. Yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_ones: list[socket.socket] = []

    def serve(link: socket.socket) -> None:
        with suppress(OSError):
            talk(link)

    def accept() -> None:
        with suppress(OSError):
            while True:
                link = listener.accept()[0]
                open_ones.append(link)
                threading.Thread(target=serve, args=(link,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        accepting.join(SOON)  # one more may just have come in
        for link in [listener, *open_ones]:
            link.close()
