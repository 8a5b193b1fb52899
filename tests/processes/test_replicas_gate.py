"""A primary and a standby that the test plays: what may leave the primary, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from shard_cluster import Run, gradients

from atoll.net.endpoint import Server
from atoll.server import mirror
from atoll.server.mirror import Mirror
from atoll.wire import messages as m
from atoll.wire.messages import AnyMessage, Duty, Welcome, decode_untrusted, encode

DEADLINE = 20.0
QUIET = 0.3  # seconds in which nothing comes
PRIMARY, STANDBY = 1, 2  # incarnations


class HubPlayed:
    """What the mirror asks of the hub's link."""

    def __init__(self) -> None:
        self.duty: Duty | None = Duty(term=1, primary=True, serves=True)
        self.welcome = Welcome(run="test", incarnation=PRIMARY)
        self.said: list[AnyMessage] = []

    def say(self, message: AnyMessage) -> None:
        self.said.append(message)


class StandbyPlayed:
    """A standby that takes in what comes, and acknowledges when the test says so."""

    def __init__(self) -> None:
        self.server = Server("tcp://127.0.0.1:0", None, limit=2**31 - 1, name="the standby")
        self.stream, self.peer = "", b""
        self.heard: list[AnyMessage] = []

    def take(self, seconds: float = QUIET) -> list[AnyMessage]:
        """All that comes until nothing has for `seconds`; greets whoever says Hello."""
        found = []
        while (received := self.server.receive(seconds)) is not None:
            message = decode_untrusted(received.header)
            if isinstance(message, m.Hello):
                assert (message.role, message.incarnation, message.shard) == ("primary", PRIMARY, 0)
                self.peer = received.peer
                self.acknowledge()
                continue
            if isinstance(message, m.Begin):
                self.stream, self.heard = message.stream, []
            self.heard.append(message)
            found.append(message)
        return found

    def acknowledge(self, count: int | None = None) -> None:
        standing = m.Standing(stream=self.stream, count=len(self.heard) if count is None else count)
        self.server.send(self.peer, encode(standing))


class Played(Run):
    """A shard of two workers, whose hub and standby are the test's."""

    def __init__(self, consistency: str = "bsp") -> None:
        self.hub_played, self.standby = HubPlayed(), StandbyPlayed()
        played: Any = self.hub_played
        super().__init__(
            1, 2, consistency=consistency, mirror=lambda index: Mirror(index, "test", None, played, None)
        )

    def name_standby(self) -> None:
        """The hub names the standby; it takes in the state."""
        address = self.standby.server.address
        self.hub_played.duty = Duty(term=2, primary=True, partner=STANDBY, address=address, serves=True)
        self.wait_for(lambda: any(isinstance(each, m.CopyChunk) for each in self.standby.take()))

    def wait_for(self, condition: Any) -> None:
        until = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.01)

    def in_sync(self) -> None:
        self.name_standby()
        self.standby.take()
        self.standby.acknowledge()
        self.wait_for(lambda: m.InSync(incarnation=PRIMARY, standby=STANDBY) in self.hub_played.said)

    def close(self) -> None:
        super().close()
        self.standby.server.close()


@pytest.fixture
def run() -> Iterator[Played]:
    played = Played()
    yield played
    played.close()
    assert not played.cluster.errors


def contribute(run: Played, iteration: int = 0) -> None:
    for worker in run.workers:
        worker.push(iteration, gradients(worker.rank))
        worker.commit(iteration)


def test_nothing_is_acknowledged_before_the_standby_has_it(run: Played) -> None:
    run.in_sync()
    contribute(run)
    copies = [each for each in run.standby.take() if isinstance(each, m.Copy)]
    assert len(copies) == 2 * (len(run.model.chunks) + 1)  # pushes and commits
    assert run.workers[0].silent(0, m.Committed)
    run.standby.acknowledge(len(run.standby.heard) - 1)
    assert run.workers[1].silent(0, m.Committed)
    run.standby.acknowledge()
    for worker in run.workers:
        assert worker.expect(0, m.Committed)[0].iteration == 0


def test_the_hub_alone_lets_the_primary_go_on_without_its_standby(run: Played) -> None:
    run.in_sync()
    contribute(run)
    run.standby.take()
    run.standby.server.close()  # it is dead: that alone is no reason
    lost = m.LostTouch(incarnation=PRIMARY, partner=STANDBY)
    run.wait_for(lambda: lost in run.hub_played.said)
    assert run.workers[0].silent(0, m.Committed)
    run.hub_played.duty = Duty(term=3, primary=True, serves=True)
    for worker in run.workers:
        assert worker.expect(0, m.Committed)[0].iteration == 0
    told = run.workers[0].expect(0, Welcome)[0]  # when it was in sync
    assert told.comes_back
    assert not run.workers[0].expect(0, Welcome)[0].comes_back  # there is no journal


def test_a_standby_that_has_not_caught_up_holds_nobody_up(run: Played) -> None:
    run.name_standby()
    contribute(run)
    assert run.workers[0].expect(0, m.Committed)[0].iteration == 0
    assert not [said for said in run.hub_played.said if isinstance(said, m.InSync)]


def test_what_is_only_read_waits_for_a_standby_that_was_long_silent(
    run: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have taken the primary's place, while this one stood still."""
    run.in_sync()
    monkeypatch.setattr(mirror, "_FRESH", 0.0)
    run.workers[0].ask(0)
    run.wait_for(lambda: m.Probe() in run.standby.take())
    assert run.workers[0].silent(0, m.Parameters)
    run.standby.acknowledge()
    run.workers[0].assert_has(run.workers[0].parameters(0))


def test_a_standby_that_comes_back_on_a_new_connection_gets_what_it_lacks(run: Played) -> None:
    run.in_sync()
    contribute(run)
    run.standby.take()
    heard, address = list(run.standby.heard), run.standby.server.address
    run.standby.server.close()
    run.standby.server = Server(address, None, limit=2**31 - 1, name="the standby")
    run.standby.heard = heard[:-3]  # what it had when the connection broke
    run.wait_for(lambda: run.standby.take() or len(run.standby.heard) == len(heard))
    assert run.standby.heard == heard
    run.standby.acknowledge()
    assert run.workers[0].expect(0, m.Committed)[0].iteration == 0


def test_a_standby_that_is_far_behind_holds_the_workers_up(
    run: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.in_sync()
    monkeypatch.setattr(mirror, "_BACKLOG", 1024)
    contribute(run)
    copies = run.standby.take()
    run.workers[0].push(1, gradients(0))
    assert not run.standby.take()  # the shard takes no more
    sent = 3 * len(run.model.chunks) + 2  # pushes and commits

    def have_come() -> bool:
        run.standby.acknowledge()
        copies.extend(run.standby.take())
        return len(copies) == sent

    assert 0 < len(copies) < sent
    run.wait_for(have_come)


def test_each_chunk_is_copied_once_and_in_its_place(run: Played) -> None:
    run.name_standby()
    run.standby.take()
    first, *rest = run.standby.heard
    assert isinstance(first, m.Begin)
    chunks = [each.chunk for each in rest if isinstance(each, m.CopyChunk) and not each.key]
    assert chunks == list(run.model.chunks)
