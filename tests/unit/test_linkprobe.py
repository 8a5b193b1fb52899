"""Measuring a link between two workers, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from atoll.core.errors import DeadlineError, PeerLostError
from atoll.net import linkprobe
from atoll.net.linkprobe import LinkServer, measure


@pytest.fixture
def server() -> Iterator[LinkServer]:
    server = LinkServer("127.0.0.1")
    yield server
    server.close()


class SlowLink:
    """A way to a server that takes `delay` seconds each way and carries `rate` bytes a second to it."""

    def __init__(self, server: LinkServer, delay: float, rate: float) -> None:
        self._delay, self._rate = delay, rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._there = socket.create_connection(("127.0.0.1", server.port), 10)
        self._threads = [threading.Thread(target=self._carry, daemon=True)]
        self._threads[0].start()

    def _carry(self) -> None:
        here, _ = self._listener.accept()
        with here:
            back = threading.Thread(target=self._back, args=(here,), daemon=True)
            back.start()
            while data := here.recv(2**14):
                time.sleep(len(data) / self._rate + (self._delay if len(data) < 100 else 0))
                self._there.sendall(data)
            self._there.shutdown(socket.SHUT_RDWR)
            back.join(10)

    def _back(self, here: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):  # who measures may be done, and gone
            while data := self._there.recv(2**14):
                time.sleep(self._delay)
                here.sendall(data)

    def close(self) -> None:
        self._threads[0].join(10)
        self._listener.close()
        self._there.close()


def test_a_link_of_this_machine(server: LinkServer) -> None:
    bandwidth, latency = measure("worker 1", ("127.0.0.1", server.port), server.token, 5.0)
    assert bandwidth > 1e7
    assert 0 < latency < 0.1
    # The server is there for the next one.
    assert measure("worker 1", ("127.0.0.1", server.port), server.token, 5.0)[0] > 1e7


def test_a_slow_link_is_measured_as_it_is(server: LinkServer) -> None:
    """A busy machine makes a link slower and never faster, so one measurement of several is to be close."""
    until = time.monotonic() + 60.0
    while True:
        link = SlowLink(server, delay=0.02, rate=2e6)
        begin = time.monotonic()
        bandwidth, latency = measure("worker 1", link.address, server.token, 2.0)
        took = time.monotonic() - begin  # and not the seconds that a larger transfer would take
        link.close()
        assert bandwidth < 2.5e6
        assert latency >= 0.02
        if took < 10.0 and bandwidth > 0.5e6 and latency < 0.06:
            return
        assert time.monotonic() < until, (took, bandwidth, latency)


@pytest.mark.parametrize(
    ("rate", "left", "size"),
    [(1e6, 1.0, 500_000), (2**16, 1.0, 2**15), (1e12, 10.0, 2**28), (1e6, -1.0, 0)],
)
def test_a_transfer_takes_its_share_of_the_time_that_is_left(rate: float, left: float, size: int) -> None:
    assert linkprobe._next_size(rate, left) == size


def is_ended(link: socket.socket) -> bool:
    """Whether the other side ends the connection, as it does at once where it has not read all."""
    try:
        return link.recv(1) == b""
    except ConnectionError:
        return True


def test_a_stranger_is_not_served(server: LinkServer) -> None:
    with pytest.raises(PeerLostError, match="worker 1 at 127.0.0.1:.* ended the measuring of its link"):
        measure("worker 1", ("127.0.0.1", server.port), bytes(16), 5.0)
    assert measure("worker 1", ("127.0.0.1", server.port), server.token, 5.0)[0] > 0


@pytest.mark.parametrize("sent", [b"", b"x", b"x" * 100, linkprobe._ASK.pack(b"t", 2**40)])
def test_what_is_no_request_ends_the_connection(server: LinkServer, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 10) as link:
        link.sendall(server.token + sent)
        with contextlib.suppress(OSError):  # it has ended the connection already
            link.shutdown(socket.SHUT_WR)
        assert is_ended(link)
    assert measure("worker 1", ("127.0.0.1", server.port), server.token, 5.0)[0] > 0


def test_nobody_is_there(server: LinkServer) -> None:
    server.close()
    with pytest.raises(PeerLostError, match="Connection refused"):
        measure("worker 1", ("127.0.0.1", server.port), server.token, 5.0)


def test_a_server_that_does_not_answer() -> None:
    line = r"waited \d+\.\d s for worker 1 .* \(it was given 0.3 s\)"
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(DeadlineError, match=line),
    ):
        measure("worker 1", silent.getsockname(), bytes(16), 0.3)


def test_a_server_that_ends_does_not_wait_for_who_is_there() -> None:
    server = LinkServer("127.0.0.1")
    with socket.create_connection(("127.0.0.1", server.port), 10) as link:
        link.sendall(server.token)
        begin = time.monotonic()
        server.close()
        server.close()
        assert time.monotonic() - begin < 5.0
        assert is_ended(link)
    assert not any(thread.name == "atoll links" for thread in threading.enumerate())
