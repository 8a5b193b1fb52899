"""A standby whose primary, hub and journal the test plays: what it says that it holds."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.net.endpoint import Client, Server
from atoll.server.records import HandledMessage, encode_header
from atoll.server.shard import Shard
from atoll.server.standby import Standby
from atoll.wire import messages as m
from atoll.wire.messages import AnyMessage, Duty, Welcome, decode_untrusted, encode

DEADLINE = 20.0
PRIMARY = 1


class HubPlayed:
    def __init__(self, hub: Server) -> None:
        self.duty: Duty | None = Duty(term=1, primary=False, partner=PRIMARY, address="tcp://127.0.0.1:1")
        self.welcome = Welcome(run="test", incarnation=2, workers=1)
        self.client = Client(hub.address, None, limit=2**20, name="hub")
        self.addresses: list[str] = []
        self.steps = 0
        self.said: list[AnyMessage] = []

    def say(self, message: AnyMessage) -> None:
        self.said.append(message)

    def take(self) -> None:
        pass


class JournalPlayed:
    """Writes when the test says so."""

    fileno, is_full, size = -1, False, 0

    def __init__(self, path: Path) -> None:
        self.path, self.folder, self.incomplete = path, self, path / "standby"
        self.appended = self.segments = self.clears = 0
        self._waiting: list[Callable[[], None]] = []

    def append(self, _told: Any, _payload: Any) -> None:
        self.appended += 1

    def begin_segment(self) -> None:
        self.segments += 1

    def clear(self) -> None:
        self.clears += 1

    def begin_anew(self) -> None:
        self.clear()
        self.begin_segment()

    def when_written(self, act: Callable[[], None]) -> None:
        self._waiting.append(act)

    def release(self) -> None:
        pass

    def write(self) -> None:
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            act()


class Stage:
    def __init__(self, folder: Path) -> None:
        self._hub = Server("tcp://127.0.0.1:0", None, limit=2**20, name="hub")
        self.server = Server("tcp://127.0.0.1:0", None, limit=2**20, name="the standby")
        self.hub, self.journal = HubPlayed(self._hub), JournalPlayed(folder)
        played: Any = self.hub
        journal: Any = self.journal
        self.standby = Standby(
            0,
            "test",
            self.server,
            played,
            lambda meanwhile: Shard(0, self.server, run="test", workers=1, meanwhile=meanwhile),
            journal=journal,
        )
        self.primaries: list[Client] = []

    def primary(self, incarnation: int = PRIMARY) -> Client:
        """A new connection, on which the primary says Hello."""
        client = Client(self.server.address, None, limit=2**20, name="the standby")
        self.primaries.append(client)
        hello = m.Hello(version=m.VERSION, run="test", role="primary", shard=0, incarnation=incarnation)
        client.send(encode(hello))
        self.turn()
        return client

    def turn(self) -> None:
        for _ in range(3):
            self.standby.run(iter([False, True]).__next__)

    def standing(self, client: Client) -> list[int]:
        found = []
        while (received := client.receive(0.1)) is not None:
            standing = decode_untrusted(received[0])
            assert isinstance(standing, m.Standing)
            found.append(standing.count)
        return found

    def close(self) -> None:
        for endpoint in (*self.primaries, self.hub.client, self.server, self._hub):
            endpoint.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def copy() -> m.Copy:
    hello = m.Hello(version=m.VERSION, run="test", role="worker", worker=0, incarnation=7)
    told = HandledMessage(role="worker", index=0, incarnation=7, message=msgspec.Raw(encode(hello)))
    return m.Copy(record=msgspec.Raw(encode_header(told)))


def test_it_holds_what_is_written_and_says_so_on_a_new_connection_too(stage: Stage) -> None:
    first = stage.primary()
    stage.journal.write()
    assert stage.standing(first) == [0]
    for message in (m.Begin(stream=secrets.token_hex(8)), copy(), copy()):
        first.send(encode(message))
    stage.turn()
    assert stage.journal.appended == 2
    assert set(stage.standing(first)) <= {0}  # nothing of it is written yet
    second = stage.primary()  # the connection was lost, and is another one
    stage.turn()
    assert stage.standing(second) == []  # what it said now would be sent again
    stage.journal.write()
    assert stage.standing(second)[0] == 3
    second.send(encode(copy()))
    first.send(encode(copy()))  # from the one before nothing is taken
    stage.turn()
    stage.journal.write()
    assert stage.standing(second)[-1] == 4
    assert stage.journal.appended == 3


def test_it_hears_only_the_primary_that_the_hub_names(stage: Stage) -> None:
    other = stage.primary(incarnation=9)
    other.send(encode(m.Begin(stream="other")))
    stage.turn()
    stage.journal.write()
    assert stage.standing(other) == []
    assert not stage.journal.segments
    stage.hub.duty = Duty(term=2, primary=False, partner=9)
    again = stage.primary(incarnation=9)
    stage.journal.write()
    assert stage.standing(again)[0] == 0


def test_its_directory_is_marked_until_it_holds_the_whole_shard(stage: Stage, tmp_path: Path) -> None:
    primary = stage.primary()
    stage.journal.write()
    primary.send(encode(m.Begin(stream="one")))
    stage.turn()
    assert (tmp_path / "standby").exists()
    assert (stage.journal.clears, stage.journal.segments) == (1, 1)
    assert not stage.standby.shard.kept.is_on_disk


def test_a_lost_primary_is_told_to_the_hub(stage: Stage) -> None:
    primary = stage.primary()
    stage.journal.write()
    assert stage.standing(primary) == [0]
    primary.close()
    lost = m.LostTouch(incarnation=2, partner=PRIMARY)
    for _ in range(int(DEADLINE / 0.1)):
        stage.turn()
        if lost in stage.hub.said:
            break
    assert lost in stage.hub.said
