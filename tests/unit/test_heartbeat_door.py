"""The socket between a launcher and its workers: what comes in at it, and that nobody waits there."""

from __future__ import annotations

import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from atoll.core.config import LAUNCHER_VARIABLE, SOCKETS_VARIABLE
from atoll.net import heartbeats
from atoll.net.heartbeats import HeartbeatDoor, HeartbeatLine, Launcher, launcher_from_environment
from atoll.wire.messages import Beat, ToLauncher

SAID = ToLauncher("r", 3, 1.5, Beat(7, iteration=2))


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
        yield Path(folder) / "door"


@pytest.fixture
def door(path: Path) -> Iterator[HeartbeatDoor]:
    door = HeartbeatDoor(path)
    yield door
    door.close()
    door.close()
    assert not path.exists()


def linked(path: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(str(path))
    return link


def taken(door: HeartbeatDoor) -> list[tuple[int, ToLauncher]]:
    """What there is, with the connections that had to be let in first."""
    return [each for _ in range(2) for each in door.take()]


def test_what_a_worker_says_is_heard_and_confirmed(path: Path, door: HeartbeatDoor) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with HeartbeatLine(str(path)) as line:
        assert line.confirmed() == 0
        assert not line.send(SAID)  # it is not open
        assert line.open()
        assert line.send(SAID)
        [(source, said)] = taken(door)
        assert said == SAID
        door.confirm(source, 3)
        door.confirm(source, 2)
        assert line.confirmed() == 3
        assert line.confirmed() == 0


def test_a_launcher_that_reads_nothing_is_not_waited_for(path: Path, door: HeartbeatDoor) -> None:
    with HeartbeatLine(str(path)) as line:
        assert line.open()
        sent = 0
        while line.send(SAID):
            sent += 1
            assert sent < 10**6
        heard = taken(door)
        while more := door.take():
            heard += more
        assert len(heard) == sent
        assert line.send(SAID)


def test_a_launcher_that_is_gone_is_looked_for_again_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("atoll.net.heartbeats.time.monotonic", lambda: now[0])
    with HeartbeatLine(str(path)) as line:
        assert not line.open()
        door = HeartbeatDoor(path)
        assert not line.open()  # a moment later
        now[0] += 1.1
        assert line.open()
        door.close()
        assert line.confirmed() == 0
        assert not line.send(SAID)
        assert not line.open()
        door = HeartbeatDoor(path)
        now[0] += 1.1
        assert line.open()
        assert line.send(SAID)
        assert [said for _, said in taken(door)] == [SAID]
        door.close()


NONSENSE = {
    "bytes": b"\xc1\xff",
    "nothing": b"\0",
    "text": msgspec.msgpack.encode("text"),
    "too few": msgspec.msgpack.encode(["r", 3]),
    "negative": msgspec.msgpack.encode(["r", -3, 1.5, [7]]),
    "other types": msgspec.msgpack.encode(["r", 3, "now", [7]]),
    "no beat": msgspec.msgpack.encode(["r", 3, 1.5, 7]),
    "long name": msgspec.msgpack.encode(["r" * 300, 3, 1.5, [7]]),
    "too long": msgspec.msgpack.encode(["r", 3, 1.5, [7, *[0] * 9000]]),
    "deep": b"\x91" * 1500,
}


@pytest.mark.parametrize("packet", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_not_heard_and_harms_nobody(path: Path, door: HeartbeatDoor, packet: bytes) -> None:
    with linked(path) as link, HeartbeatLine(str(path)) as line:
        link.send(packet)
        assert line.open()
        assert line.send(SAID)
        link.send(msgspec.msgpack.encode(SAID))
        assert [said for _, said in taken(door)] == [SAID, SAID]


def test_many_connections_push_out_the_oldest(
    path: Path, door: HeartbeatDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "_MOST_LINES", 4)
    links = [linked(path) for _ in range(20)]
    door.take()
    before = len(list(Path("/proc/self/fd").iterdir()))
    more = [linked(path) for _ in range(20)]
    door.take()
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 20
    with HeartbeatLine(str(path)) as line:
        assert line.open()
        assert line.send(SAID)
        assert [said for _, said in taken(door)] == [SAID]
    for link in [*links, *more]:
        link.close()


def test_without_descriptors_those_who_wait_are_let_in_later(
    path: Path, door: HeartbeatDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("atoll.net.heartbeats.time.monotonic", lambda: now[0])

    class Full:
        """A listener of a process without descriptors."""

        def __init__(self, listener: socket.socket) -> None:
            self.listener, self.fileno = listener, listener.fileno

        def accept(self) -> None:
            raise OSError(24, "Too many open files")

        def close(self) -> None:
            self.listener.close()

    listener = door._listener
    with HeartbeatLine(str(path)) as line:
        assert line.open()
        assert line.send(SAID)
        door._listener = Full(listener)  # type: ignore[assignment]
        assert taken(door) == []
        door._listener = listener
        assert taken(door) == []  # it does not try again and again
        now[0] += 1.1
        assert [said for _, said in [*taken(door), *taken(door)]] == [SAID]


def test_who_hangs_up_is_forgotten(path: Path, door: HeartbeatDoor) -> None:
    with linked(path) as link:
        link.send(msgspec.msgpack.encode(SAID))
        [(source, _)] = taken(door)
    door.confirm(source, 1)
    assert taken(door) == []
    door.confirm(source, 1)
    assert door._lines == {}


def test_a_worker_knows_its_launcher_by_its_environment() -> None:
    assert launcher_from_environment({}) is None
    assert launcher_from_environment({SOCKETS_VARIABLE: "/tmp/x"}) is None
    assert launcher_from_environment({LAUNCHER_VARIABLE: "l"}) is None
    both = {SOCKETS_VARIABLE: "/tmp/x", LAUNCHER_VARIABLE: "l"}
    assert launcher_from_environment(both) == Launcher("l", "/tmp/x/heartbeats")
