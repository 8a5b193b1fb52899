"""Connections of strangers at a server's port: bounded, in all and for each address; the oldest go first."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from atoll.core.descriptors import files_in, opened
from atoll.net import endpoint, strangers
from atoll.net.endpoint import Client, Server
from atoll.net.keys import Keys, make_keys, write_keys

LIMIT = 2**20  # bytes of a message
DEADLINE = 10.0  # seconds
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


class Crowd:
    """Strangers that connect to a server, and say what they are told to."""

    def __init__(self, server: Server) -> None:
        self._place = ("127.0.0.1", int(server.address.rpartition(":")[2]))
        self.links: list[socket.socket] = []

    def come(self, count: int, says: bytes = b"", host: str = "127.0.0.1") -> list[socket.socket]:
        new = [socket.create_connection(self._place, DEADLINE, (host, 0)) for _ in range(count)]
        for link in new:
            with contextlib.suppress(OSError):
                link.sendall(says)
            link.setblocking(False)
        self.links += new
        return new

    def close(self) -> None:
        for link in self.links:
            link.close()


def is_closed(link: socket.socket) -> bool:
    """Whether the server has closed it; what it says first is read."""
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        while link.recv(4096):
            pass
        return True
    return link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0 or _is_reset(link)


def _is_reset(link: socket.socket) -> bool:
    try:
        return link.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """A process that may have 48 connections, of which 42 may be strangers', and 36 of one address."""
    monkeypatch.setattr(strangers, "raise_descriptor_limit", lambda: 48 + 32 + 64)
    monkeypatch.setattr(strangers, "_COUNT_SECONDS", math.inf)  # the crowd's descriptors are of this process
    monkeypatch.setattr(strangers, "_FLOOD_RATE", math.inf)
    return 42


@pytest.fixture(params=[True, False], ids=["keys", "no keys"])
def keys(request: pytest.FixtureRequest) -> Keys | None:
    return make_keys() if request.param else None


@pytest.fixture
def server(few: int, keys: Keys | None) -> Iterator[Server]:
    with Server("tcp://127.0.0.1:0", keys, limit=LIMIT, name="shard 0") as made:
        yield made


@pytest.fixture
def crowd(server: Server) -> Iterator[Crowd]:
    made = Crowd(server)
    yield made
    made.close()


def joins(server: Server, keys: Keys | None) -> float:
    """The seconds until a new client's message is there."""
    began = time.monotonic()
    with Client(server.address, keys, limit=LIMIT, name="shard 0") as client:
        client.send(b"hello")
        received = server.receive(DEADLINE)
        assert received is not None
        assert received.header == b"hello"
    return time.monotonic() - began


@pytest.mark.parametrize(
    "says", [b"\xff", GREETING[:40], GREETING], ids=["a byte", "half a greeting", "a greeting"]
)
def test_strangers_are_bounded_and_a_client_comes_in(
    server: Server, crowd: Crowd, keys: Keys | None, says: bytes, few: int
) -> None:
    watch = server._strangers
    assert watch is not None
    for _ in range(4):
        crowd.come(60, says)
        assert joins(server, keys) < 5.0
        until(lambda: watch.strangers <= few, "no bound is kept")
    until(lambda: sum(map(is_closed, crowd.links)) >= 240 - few, "those beyond the bound are not closed")


def test_silent_strangers_take_no_place(server: Server, crowd: Crowd, keys: Keys | None, few: int) -> None:
    watch = server._strangers
    assert watch is not None
    crowd.come(2 * few)
    assert joins(server, keys) < 5.0
    assert watch.strangers <= 1  # at most the client that has just gone
    assert not any(map(is_closed, crowd.links))
    assert server.take_report() == ""


def test_the_oldest_go_first_and_a_line_tells_from_where(server: Server, crowd: Crowd) -> None:
    first = crowd.come(30, b"\xff")
    last = crowd.come(40, b"\xff")
    until(lambda: all(map(is_closed, first[:10])), "the oldest are there")
    assert not any(map(is_closed, last[-10:]))
    line = server.take_report()
    assert "127.0.0.1" in line
    assert "\n" not in line
    assert server.take_report() == ""  # at once, nothing new is told


def test_an_address_that_floods_does_not_shut_another_out(server: Server, crowd: Crowd) -> None:
    other = crowd.come(5, b"\xff", host="127.0.0.2")
    crowd.come(61, b"\xff")
    watch = server._strangers
    assert watch is not None
    until(lambda: watch._closed["127.0.0.1"] == 25, "it has no bound of its own")
    assert not any(map(is_closed, other))


def test_who_belongs_here_stays_whoever_comes(server: Server, crowd: Crowd, keys: Keys | None) -> None:
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(Client(server.address, keys, limit=LIMIT, name="shard 0")) for _ in range(20)
        ]
        for client in clients:
            client.send(b"hello")
        peers = [server.receive(DEADLINE) for _ in clients]
        assert all(peers)
        for _ in range(5):
            crowd.come(60, b"\xff")
        until(lambda: sum(map(is_closed, crowd.links)) > 100, "nobody was closed")
        assert [client.losses for client in clients] == [0] * len(clients)
        for peer in peers:
            assert peer is not None
            assert server.send(peer.peer, b"still")
        assert all(client.receive(DEADLINE) == (b"still", None) for client in clients)


def test_a_port_full_of_those_who_belong_there_is_told_of(few: int) -> None:
    keys = make_keys()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server("tcp://127.0.0.1:0", keys, limit=LIMIT, name="hub"))
        watch = server._strangers
        assert watch is not None
        watch._limit = 64  # as if this process had no more: 16 connections, the least
        for _ in range(24):
            client = stack.enter_context(Client(server.address, keys, limit=LIMIT, name="hub"))
            client.send(b"hello")
            server.receive(0.2)
        lines: list[str] = []
        until(lambda: lines.append(server.take_report()) or "full" in lines[-1], "nothing is told")
        assert "127.0.0.1" in lines[-1]
        assert "ulimit -n" in lines[-1]
        until(lambda: watch.connections <= 16, "more are there than can be")


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
HELLO = b"\x04\xc8\x05HELLO\x01" + bytes(193)
WRONG = {
    "garbage": bytes(range(256)),
    "a byte": b"\xff",
    "half a greeting": GREETING[:40],
    "half a handshake": GREETING + HELLO,
}


@pytest.fixture
def screened(monkeypatch: pytest.MonkeyPatch, keys: Keys | None) -> Iterator[tuple[Server, Crowd]]:
    """A server with a small table of half-open connections, and a crowd that has flooded it."""
    monkeypatch.setattr(endpoint, "_BACKLOG", 16)
    monkeypatch.setattr(strangers, "_FLOOD_RATE", 1.0)  # which this process reaches on a busy machine too
    with Server("tcp://127.0.0.1:0", keys, limit=LIMIT, name="shard 0") as server:
        crowd = Crowd(server)
        lines: list[str] = []

        def floods() -> bool:
            crowd.come(20, WRONG["garbage"])
            lines.append(server.take_report())
            return "flooded" in lines[-1]

        until(floods, "the flood was not noticed")
        assert "\n" not in lines[-1]
        yield server, crowd
        crowd.close()


@linux_only
@pytest.mark.parametrize("says", WRONG)
def test_in_a_flood_the_kernel_drops_what_begins_otherwise(
    screened: tuple[Server, Crowd], keys: Keys | None, says: str
) -> None:
    server, crowd = screened
    wrong = crowd.come(60, WRONG[says])  # more than the table of half-open connections has room for
    silent = crowd.come(30)
    assert joins(server, keys) < 5.0
    assert not any(map(is_closed, wrong + silent))  # as libzmq would have done


@linux_only
def test_who_comes_in_a_flood_stays_and_is_heard(screened: tuple[Server, Crowd], keys: Keys | None) -> None:
    server, crowd = screened
    with Client(server.address, keys, limit=LIMIT, name="shard 0") as client:
        for number in range(20):
            client.send(b"%d" % number, bytes(100_000))
            received = server.receive(DEADLINE)
            assert received is not None
            assert received.header == b"%d" % number
            assert server.send(received.peer, b"heard %d" % number, bytes(100_000))
            answer = client.receive(DEADLINE)
            assert answer is not None
            assert answer[0] == b"heard %d" % number
            crowd.come(5, WRONG["garbage"])
        assert client.losses == 0


@linux_only
def test_after_a_while_everything_is_let_through_again(
    monkeypatch: pytest.MonkeyPatch, keys: Keys | None
) -> None:
    monkeypatch.setattr(strangers, "_SCREEN_SECONDS", 0.3)
    monkeypatch.setattr(strangers, "_FLOOD_RATE", 1.0)
    with Server("tcp://127.0.0.1:0", keys, limit=LIMIT, name="shard 0") as server:
        crowd = Crowd(server)
        until(lambda: crowd.come(20, WRONG["garbage"]) and "flooded" in server.take_report(), "not noticed")
        screen = server._strangers._screen  # type: ignore[union-attr]
        until(lambda: not screen._until, "it does not end")
        crowd.close()
        crowd.links.clear()
        until(
            lambda: any(map(is_closed, crowd.come(2, WRONG["garbage"]) and crowd.links)),
            "it is dropped still",
        )
        assert joins(server, keys) < 5.0
        crowd.close()


def test_clients_that_come_and_go_are_no_flood(monkeypatch: pytest.MonkeyPatch, keys: Keys | None) -> None:
    monkeypatch.setattr(strangers, "_FLOOD_RATE", 0.0)
    with Server("tcp://127.0.0.1:0", keys, limit=LIMIT, name="shard 0") as server:
        watch = server._strangers
        assert watch is not None
        for _ in range(5):
            joins(server, keys)
        until(lambda: not watch.connections, "they are there still")
        counted = watch._screen._counted_at
        until(lambda: watch._screen._counted_at > counted, "nothing is counted")
        assert server.take_report() == ""


RESERVING = """
import contextlib, os, resource
from atoll.core.descriptors import Reserve, files_in, opened
def nothing():
    return os.open(os.devnull, os.O_RDONLY)
def is_full():
    try:
        os.close(nothing())
    except OSError as error:
        return "Too many open files" in str(error)
reserve = Reserve(4)
highest = max(int(each) for each in os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, highest + 8))
assert not is_full()
with contextlib.suppress(OSError):
    while True:
        nothing()
assert is_full()
opened(nothing)
assert is_full(), "the rest of the reserve is not held again"
assert files_in("/proc/self", "statu?") == ["status"]
reserve.close()
assert not is_full()
"""


def test_a_file_takes_a_reserved_place() -> None:
    # In a process of its own: threads of other tests may close a file meanwhile.
    subprocess.run([sys.executable, "-c", RESERVING], check=True, timeout=DEADLINE * 6)


def test_another_error_is_raised_at_once_and_a_full_table_after_the_time() -> None:
    calls = []

    def fail(number: int) -> None:
        calls.append(number)
        raise OSError(number, os.strerror(number))

    with pytest.raises(FileNotFoundError):
        opened(lambda: fail(errno.ENOENT))
    assert len(calls) == 1
    with pytest.raises(OSError, match="Too many open files"):
        opened(lambda: fail(errno.EMFILE), 0.05)
    assert len(calls) > 3
    assert files_in("/no/such/folder", "*") == []


HELD = """
import sys, time
from atoll.core.descriptors import opened
from atoll.net.endpoint import Server
from atoll.net.keys import read_keys
server = Server("tcp://127.0.0.1:0", read_keys(sys.argv[1]), limit=2**20, name="shard 0")
print(server.address, flush=True)
files = 0
until = time.monotonic() + 30
while time.monotonic() < until:
    received = server.receive(0.02)
    with opened(lambda: open(sys.argv[1] + ".probe", "wb")):
        files += 1
    if received is not None and received.header == b"end":
        break
    if received is not None:
        server.send(received.peer, b"heard")
print(files, flush=True)
server.close()
"""


def test_a_process_with_few_descriptors_opens_its_files_in_a_flood(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    keys, path = make_keys(), tmp_path_factory.mktemp("keys") / "run.key"
    write_keys(path, keys)
    command = f'ulimit -n 96; exec "{sys.executable}" -c "$0" "$1"'
    with subprocess.Popen(
        ["bash", "-c", command, HELD, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        place = ("127.0.0.1", int(address.rpartition(":")[2]))
        links: list[socket.socket] = []
        try:
            worst = 0.0
            for _ in range(8):
                links += [socket.create_connection(place, DEADLINE) for _ in range(100)]
                for link in links[-100:]:
                    with contextlib.suppress(OSError):  # it is closed already
                        link.sendall(b"\xff")
                began = time.monotonic()
                with Client(address, keys, limit=LIMIT, name="shard 0") as client:
                    client.send(b"hello")
                    assert client.receive(DEADLINE) == (b"heard", None)
                worst = max(worst, time.monotonic() - began)
            with Client(address, keys, limit=LIMIT, name="shard 0") as client:
                client.send(b"end")
                assert int(process.stdout.readline()) > 8  # each was opened, or it would have ended
            assert worst < 5.0
        finally:
            for link in links:
                link.close()
            process.kill()
