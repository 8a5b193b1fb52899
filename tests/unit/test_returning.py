"""Connections to servers that come back: what is sent again, to whom, and who does not come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from atoll.core.errors import PeerLostError
from atoll.net.endpoint import Client, Server, poll
from atoll.net.returning import ReturningLinks
from atoll.server.links import LogLink
from atoll.wire.messages import (
    VERSION,
    AnyMessage,
    Hello,
    Ready,
    Refused,
    Welcome,
    WhoIsMissing,
    decode_untrusted,
    encode,
)

HELLO = Hello(version=VERSION, run="r", role="worker", worker=3, incarnation=4)
DEADLINE = 20.0


class Peer:
    """A server that is where it is until it is ended, and its one client."""

    def __init__(self, address: str = "tcp://127.0.0.1:0") -> None:
        self.server = Server(address, None, limit=2**20, name="shard 0")
        self.address = self.server.address
        self.came: list[AnyMessage] = []

    def refuse(self) -> None:
        """Wait for a message, and refuse it as one of a stranger."""
        received = self.server.receive(DEADLINE)
        assert received is not None
        self.came.append(decode_untrusted(received.header))
        self.server.send(received.peer, encode(Refused(reason="say Hello first")))

    def look(self, shard: int = 0, comes_back: bool = True) -> None:
        """Take what has come, and welcome whoever says Hello."""
        poll([self.server], 0.01)
        while (received := self.server.receive(0)) is not None:
            message = decode_untrusted(received.header)
            self.came.append(message)
            if isinstance(message, Hello):
                self.server.send(received.peer, encode(Welcome(run="r", shard=shard, comes_back=comes_back)))

    def close(self) -> None:
        self.server.close()


class Links:
    """The links to one peer, which where() moves."""

    def __init__(self, address: str) -> None:
        self.where = [address]
        self.told: list[object] = []
        self.links = ReturningLinks(
            self.where,
            None,
            hello=HELLO,
            limit=2**20,
            name=lambda index: f"shard {index}",
            ends=lambda index: f"shard {index} is gone for good",
            where=lambda: self.where,
            is_it=lambda index, welcome: welcome.shard == index,
            lost=self.told.append,
            back=lambda index, seconds: self.told.append((index, 0 < seconds < DEADLINE)),
        )

    def look(self) -> None:
        def handle(index: int, header: bytes, _payload: memoryview | None) -> None:
            message = decode_untrusted(header)
            assert isinstance(message, Welcome)
            self.links.handle_welcome(index, message)

        self.links.take(self.links.clients, handle)
        self.links.check()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    made: list[Peer] = []
    yield made
    for peer in made:
        peer.close()


def until(links: Links, peer: Peer, done: object, **welcome: object) -> None:
    end = time.monotonic() + DEADLINE
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end
        peer.look(**welcome)  # type: ignore[arg-type]
        links.look()


def test_what_is_not_answered_is_sent_again_to_one_that_comes_back_elsewhere(peers: list[Peer]) -> None:
    peers.append(Peer())
    links = Links(peers[0].address)
    first, second, asked = Ready(digest="first"), Ready(digest="second"), WhoIsMissing()
    links.links.send(0, first, until="a")
    links.links.send(0, second, until="b")
    links.links.send(0, asked)
    until(links, peers[0], lambda: not links.links.strangers and len(peers[0].came) == 4)
    assert peers[0].came == [HELLO, first, second, asked]
    links.links.answered("a")
    peers[0].close()
    peers[0] = Peer()
    links.where = [peers[0].address]
    until(links, peers[0], lambda: links.links.come_back == 1 and len(peers[0].came) >= 2)
    assert peers[0].came == [HELLO, second]
    assert links.told == [0, (0, True)]
    assert links.links.addresses == [peers[0].address]
    assert links.links.gone(0) == ""
    links.links.answered("b", instead=asked)
    peers[0].close()
    peers[0] = Peer()
    links.where = [peers[0].address]
    until(links, peers[0], lambda: len(peers[0].came) >= 2)
    assert peers[0].came == [HELLO, asked]
    links.links.close()


def test_another_at_the_old_port_is_told_nothing(peers: list[Peer]) -> None:
    peers.append(Peer())
    links = Links(peers[0].address)
    links.links.send(0, Ready(digest="first"), until="a")
    until(links, peers[0], lambda: not links.links.strangers)
    peers[0].close()
    peers[0] = Peer()
    links.where = [peers[0].address]  # shard 7 says that it is there
    until(links, peers[0], lambda: len(peers[0].came) >= 1, shard=7)
    for _ in range(20):
        peers[0].look(shard=7)
        links.look()
    assert set(peers[0].came) == {HELLO}
    assert links.links.strangers == [0]
    assert links.links.gone(0).startswith(" (lost ")
    links.links.close()


def test_one_without_a_journal_is_gone_for_good(peers: list[Peer]) -> None:
    peers.append(Peer())
    links = Links(peers[0].address)
    until(links, peers[0], lambda: not links.links.strangers, comes_back=False)
    peers[0].close()
    with pytest.raises(PeerLostError, match="shard 0 is gone for good"):
        until(links, Peer(), lambda: False)
    links.links.close()


def test_a_connection_that_came_by_itself_begins_with_a_hello_too(peers: list[Peer]) -> None:
    """While nobody looked the server was gone and back at its port; who says no Hello is refused there."""
    peers.append(Peer())
    links = Links(peers[0].address)
    until(links, peers[0], lambda: not links.links.strangers)
    peers[0].close()
    again = Server(peers[0].address, None, limit=2**20, name="shard 0")
    peers[0].server = again
    (client,) = links.links.clients
    end = time.monotonic() + DEADLINE
    while not (client.losses and client.connected):
        assert time.monotonic() < end
        poll([client], 0.01)
    links.links.send(0, Ready(digest="first"), until="a")
    while (received := again.receive(0.1)) is None:
        assert time.monotonic() < end
    again.send(received.peer, encode(Refused(reason="say Hello first")))
    while client not in poll([client], 0.1):
        assert time.monotonic() < end
    links.look()  # hands out Welcomes only
    peers[0].came.clear()
    until(links, peers[0], lambda: len(peers[0].came) >= 2)
    assert peers[0].came[:2] == [HELLO, Ready(digest="first")]
    links.links.close()


# -- a connection that came by itself ----------------------------------------------------------------------


def reborn_at_the_next_receive(peers: list[Peer], client: Client, say: Callable[[], None]) -> None:
    """When the client is to receive next, having looked for losses: the server dies, the client `say`s
    something, and the server's next life, at the same address, refuses that, for it has heard no Hello."""
    receive = client.receive

    def late(timeout: float) -> tuple[bytes, memoryview | None] | None:
        client.receive = receive  # type: ignore[method-assign]
        peers[-1].close()
        end = time.monotonic() + DEADLINE
        while not client.losses:  # what it says from now on waits for the next life
            assert time.monotonic() < end
            poll([client], 0.01)
        say()
        peers.append(Peer(peers[-1].address))
        peers[-1].refuse()
        assert poll([client], DEADLINE)
        return receive(timeout)

    client.receive = late  # type: ignore[method-assign]


def test_what_a_server_says_that_has_heard_no_hello_is_passed_over(peers: list[Peer]) -> None:
    peers.append(Peer())
    links = Links(peers[0].address)
    until(links, peers[0], lambda: not links.links.strangers)
    ready = Ready(digest="push")
    reborn_at_the_next_receive(peers, links.links.clients[0], lambda: links.links.send(0, ready, until="a"))
    links.look()
    assert len(peers) == 2
    until(links, peers[1], lambda: peers[1].came == [ready, HELLO, ready])
    assert links.links.come_back == 1
    links.links.close()


def test_a_shard_passes_over_what_a_log_says_that_has_heard_no_hello(peers: list[Peer]) -> None:
    """Of shard 0, which was started again while shard 1 applied its lines."""
    peers.append(Peer())
    log = LogLink(peers[0].address, None, run="r", shard=1, apply=lambda *_: None)
    end = time.monotonic() + DEADLINE
    while not log.comes_back:
        assert time.monotonic() < end
        peers[0].look()
        log.take()
    reborn_at_the_next_receive(peers, log.client, lambda: log.staged(0, 3, 7))
    log.take()
    assert len(peers) == 2
    assert log.is_lost  # and another connection takes its place
    log.close()
