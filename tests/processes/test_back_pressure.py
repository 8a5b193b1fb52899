"""A part that reads nothing costs memory up to a bound, and then who sends waits or is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import zmq
from msgspec import Raw

from atoll.core.errors import RunError
from atoll.net import endpoint
from atoll.net.endpoint import Client, Server
from atoll.server.logkeeper import LogKeeper
from atoll.server.peers import Peers
from atoll.wire import messages as m

DEADLINE = 60.0


def wait_for(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until, f"waited {DEADLINE:g} s for {what}"
        time.sleep(0.001)


def test_the_log_keeps_news_together_for_a_hub_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "SERVER_OUTGOING", 4)
    with Server("tcp://127.0.0.1:0", None, limit=2**24, name="shard 0") as server:
        peers = Peers(server, "test")
        keeper = LogKeeper(1, peers, lambda _sequence, _entry: None)
        with Client(server.address, None, limit=2**24, name="shard 0") as hub:
            hub.send(m.encode(m.Hello(version=m.VERSION, run="test", role="hub", pid=os.getpid())))
            received = server.receive(DEADLINE)
            assert received is not None
            assert not peers.greet(received.peer, m.decode_untrusted(received.header))  # type: ignore[arg-type]
            filler = bytes(2**20)
            sent = 0
            while peers.takes(peers.hub):
                peers.send(peers.hub, m.Over(), filler)
                sent += 1
            commit_many(keeper, 500)
            assert len(peers._waiting.get(received.peer, ())) <= 1  # and not one for each commit
            got: list[m.AnyMessage] = []
            told: list[m.Used] = []  # in order, each once

            def take() -> bool:
                while (message := hub.receive(0)) is not None:
                    got.append(m.decode_untrusted(message[0]))
                    told.extend(getattr(got[-1], "used", []))
                peers.flush()
                keeper.poll()
                return sum(used.stop - used.start for used in told) == 500

            wait_for(take, "the news")
    assert sum(isinstance(each, m.Over) for each in got) == sent
    # One, but for what the kernel took while commits came.
    assert sum(isinstance(each, m.Fenced) for each in got) < 50
    assert [used.start for used in told] == [0, *(used.stop for used in told[:-1])]


def commit_many(keeper: LogKeeper, count: int) -> None:
    """As a worker under asp does, with one sample each; all is staged."""
    setup = m.Setup(
        digest="", workers=1, shards=1, consistency="asp", slack=0, optimizers=[], layout=Raw(b""), chunks=[],
        hyperparameters=[],
    )  # fmt: skip
    keeper.set_up(setup, [0])
    assert not keeper.handle_join(0, 1)
    for iteration in range(count):
        assert not keeper.handle_staged(0, 0, 1, iteration)
        used = [m.Used(sampler=0, epoch=0, start=iteration, stop=iteration + 1)]
        commit = m.Commit(
            incarnation=1, iteration=iteration, weight=1.0, samples=1.0, hyperparameters=[], used=used
        )
        assert not keeper.handle_worker(0, commit)
        keeper.poll()


def test_who_sends_to_a_client_that_reads_nothing_is_told_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server's queue to one client, as the hub's: bounded, and what is beyond is dropped."""
    monkeypatch.setattr(endpoint, "SERVER_OUTGOING", 4)
    with (
        Server("tcp://127.0.0.1:0", None, limit=2**24, name="hub") as server,
        Client(server.address, None, limit=2**24, name="hub") as client,
    ):
        client.send(b"here")
        received = server.receive(DEADLINE)
        assert received is not None
        filler = bytes(2**20)
        sent = 0
        # The kernel goes on taking bytes, so an answer is only good for the moment when it was given.
        while (said := server.offer(received.peer, b"header", filler)) == "sent":
            sent += 1
            assert sent < 2000
        assert said == "full"
        while server.send(received.peer, b"header", filler):
            sent += 1
            assert sent < 2000
        got = 0

        def take() -> bool:
            nonlocal got
            while client.receive(0) is not None:
                got += 1
            return got == sent

        wait_for(take, "all that was sent")
        wait_for(lambda: server.send(received.peer, b"again"), "room")


def test_a_server_that_reads_nothing_fills_the_senders_own_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's messages wait in its own queue, whose end is an error that names the other side."""
    monkeypatch.setattr(endpoint, "CLIENT_OUTGOING", 8)
    with (
        Server("tcp://127.0.0.1:0", None, limit=2**24, name="shard 1") as server,
        Client(server.address, None, limit=2**24, name="shard 1") as client,
    ):
        wait_for(lambda: client.connected, "the connection")
        filler = bytes(2**20)

        def send_many() -> None:
            for _ in range(2000):
                client.send(b"header", filler)

        with pytest.raises(RunError, match=rf"8 messages wait for shard 1 at {server.address}: it does not"):
            send_many()
        assert server._socket.getsockopt(zmq.RCVHWM) == endpoint.SERVER_INCOMING
