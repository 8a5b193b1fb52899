"""Keys, servers and clients, and what strangers may send to a port."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from net_parts import (
    ANY,
    KEYS,
    LIMIT,
    OTHERS,
    SOON,
    check_until_it_raises,
    fake,
    must_receive,
    pair,
    reserved,
    serves,
    until,
)

from atoll.core.errors import RunError, UserError
from atoll.net import endpoint as endpoint_module
from atoll.net.endpoint import Client, Endpoint, Server, check_listen, poll
from atoll.net.keys import Keys, make_keys, read_keys, write_keys


@pytest.fixture(params=["plain", "keys"])
def keys(request: pytest.FixtureRequest) -> Keys | None:
    return KEYS if request.param == "keys" else None


# -- keys ----------------------------------------------------------------------------------------------------


def test_a_key_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    write_keys(path, KEYS)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_keys(path) == KEYS
    assert make_keys() != KEYS


def test_secrets_are_not_shown() -> None:
    assert KEYS.server_secret not in repr(KEYS)
    assert KEYS.client_secret not in repr(KEYS)


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    path.write_text("precious")
    with pytest.raises(UserError, match=r"run\.key: there is a file already"):
        write_keys(path, KEYS)
    link = tmp_path / "link.key"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="there is a file already"):
        write_keys(link, KEYS)
    with pytest.raises(UserError, match="cannot write the keys: No such file or directory"):
        write_keys(tmp_path / "no" / "run.key", KEYS)
    assert path.read_text() == "precious"


def good_text(tmp_path: Path) -> str:
    write_keys(tmp_path / "good.key", KEYS)
    return (tmp_path / "good.key").read_text()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda text: "", "not a key file"),
        (lambda text: "\0\xff" * 100, "not a key file"),
        (lambda text: text[: len(text) // 2], "not a key file"),
        (lambda text: "[" * 5000, "not a key file"),
        (lambda text: "{}", "not a key file"),
        (lambda text: text.replace('"atoll_keys": 1', '"atoll_keys": 2'), "a key file of version 2"),
        (lambda text: text.replace(KEYS.server_public, OTHERS.server_public), "damaged"),
        (lambda text: text.replace(KEYS.client_secret, "short"), "damaged"),
        (lambda text: text.replace(KEYS.client_secret, "é" * 40), "damaged"),
    ],
)
def test_another_file_is_no_key_file(tmp_path: Path, change: Callable[[str], str], line: str) -> None:
    path = tmp_path / "run.key"
    path.write_text(change(good_text(tmp_path)), encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(UserError, match=rf"run\.key: .*{line}") as caught:
        read_keys(path)
    assert "\n" not in str(caught.value)
    assert KEYS.client_secret not in str(caught.value)


def test_a_missing_or_open_key_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.key: cannot read the keys: No such file or directory"):
        read_keys(tmp_path / "none.key")
    with pytest.raises(UserError, match="cannot read the keys: Is a directory"):
        read_keys(tmp_path)
    path = tmp_path / "run.key"
    write_keys(path, KEYS)
    path.chmod(0o640)
    with pytest.raises(UserError, match=r"others than its owner.*chmod 600 .*run\.key"):
        read_keys(path)


# -- addresses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:0",
        "tcp://*:0",
        "tcp://10.0.0.7:5555",
        "tcp://[::]:0",
        "tcp://eth0:*",
        "tcp://128.0.0.1:0",
    ],
)
def test_without_keys_only_this_machine(address: str) -> None:
    with pytest.raises(UserError, match="so a key file is needed: make one with `atoll keys FILE`"):
        Server(address, None, limit=LIMIT, name="hub")


@pytest.mark.parametrize("address", ["tcp://10.0.0.7:5555", "tcp://example.org:5555"])
def test_a_client_sends_nothing_to_another_machine_without_keys(address: str) -> None:
    with pytest.raises(UserError, match="hub at .* is on another machine, so the run's key file is needed"):
        Client(address, None, limit=LIMIT, name="hub")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://localhost:0", "ipc"])
def test_addresses_of_this_machine(address: str, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/hub" if address == "ipc" else address
    with Server(address, None, limit=LIMIT, name="hub") as server:
        assert not server.address.endswith((":0", ":*"))
        with Client(server.address, None, limit=LIMIT, name="hub") as client:
            serves(server, client)


def test_an_address_of_internet_protocol_6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with (
        Server("tcp://[::1]:0", None, limit=LIMIT, name="hub") as server,
        Client(server.address, None, limit=LIMIT, name="hub") as client,
    ):
        serves(server, client)


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("tcp://127.0.0.1", "hub: 'tcp://127.0.0.1' is no address; write tcp://HOST:PORT or ipc://PATH"),
        ("127.0.0.1:5555", "is no address"),
        ("tcp://127.0.0.1:", "is no address"),
        ("udp://127.0.0.1:5555", "is no address"),
        ("tcp://127.0.0.1:99999", "is no address"),
        ("ipc:///no/such/folder/x", "cannot listen at ipc:///no/such/folder/x: No such file"),
        ("ipc:///tmp/" + "x" * 200, "cannot listen at"),
    ],
)
def test_addresses_that_are_none(address: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        Server(address, None, limit=LIMIT, name="hub")
    if "no address" in line:
        with pytest.raises(UserError, match=line):
            Client(address, None, limit=LIMIT, name="hub")


def test_an_address_of_another_machine() -> None:
    with pytest.raises(UserError, match=r"cannot listen at tcp://192.0.2.1:5555: no address of this machine"):
        Server("tcp://192.0.2.1:5555", KEYS, limit=LIMIT, name="hub")
    for host in ("192.0.2.1", "no-such-interface"):
        with pytest.raises(UserError, match=f"hub: cannot listen at tcp://{host}:5555: no address of this"):
            check_listen(f"tcp://{host}:5555", KEYS, "hub")


def test_two_servers_on_one_port(keys: Keys | None) -> None:
    with Server(ANY, keys, limit=LIMIT, name="hub") as server:
        with pytest.raises(UserError, match=f"hub: another process listens at {server.address} already"):
            Server(server.address, keys, limit=LIMIT, name="hub")
        with pytest.raises(UserError, match=f"hub: another process listens at {server.address} already"):
            check_listen(server.address, keys, "hub")
        with Client(server.address, keys, limit=LIMIT, name="hub") as client:
            serves(server, client)


def test_a_closed_server_frees_its_port(keys: Keys | None) -> None:
    with reserved() as address:
        for _ in range(10):  # with a connection each time
            with (
                Server(address, keys, limit=LIMIT, name="hub") as server,
                Client(server.address, keys, limit=LIMIT, name="hub") as client,
            ):
                serves(server, client)
                server.close()
                server.close()
                with socket.socket() as plain:
                    plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    plain.bind(("127.0.0.1", int(address.rsplit(":", 1)[1])))


# -- messages ------------------------------------------------------------------------------------------------


def test_header_and_payload_there_and_back(keys: Keys | None) -> None:
    values = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
    with pair(keys) as (server, client):
        client.send(b"header", values)
        received = must_receive(server)
        assert received.header == b"header"
        assert received.payload is not None
        got = np.frombuffer(received.payload, np.float32)
        np.testing.assert_array_equal(got, values.ravel())
        for copy in (True, False):
            assert server.send(received.peer, b"back", received.payload, copy=copy)
            answer = client.receive(SOON)
            assert answer is not None
            assert answer[0] == b"back"
            assert answer[1] == received.payload
        del received  # the array keeps the message's memory
        np.testing.assert_array_equal(got, values.ravel())


def test_a_copied_payload_may_change_at_once() -> None:
    with pair() as (server, client):
        client.send(b"hello")
        peer = must_receive(server).peer
        values = np.ones(500_000, np.uint8)
        for _ in range(20):
            server.send(peer, b"", values)
        values[:] = 2
        for _ in range(20):
            answer = client.receive(SOON)
            assert answer is not None
            assert answer[1] is not None
            assert np.frombuffer(answer[1], np.uint8).max() == 1


@pytest.mark.parametrize("payload", [b"", np.zeros((0, 4), np.float32), bytearray(b"x"), memoryview(b"abc")])
def test_payloads_of_every_kind(payload: bytes) -> None:
    with pair() as (server, client):
        client.send(b"", payload)
        received = must_receive(server)
        assert received.header == b""
        assert received.payload is not None
        assert received.payload.nbytes == memoryview(payload).nbytes
        assert server.send(received.peer, b"", payload)
        assert client.receive(SOON) == (b"", received.payload)


def test_a_wait_ends_in_time(keys: Keys | None) -> None:
    with pair(keys) as (server, client):
        for receive in (server.receive, client.receive):
            for timeout in (-1.0, 0.0, 0.2):
                start = time.monotonic()
                assert receive(timeout) is None
                assert max(timeout, 0) * 0.9 <= time.monotonic() - start < SOON


def test_what_is_sent_before_the_server_is_there_arrives(keys: Keys | None) -> None:
    with reserved() as address, Client(address, keys, limit=LIMIT, name="hub") as client:
        client.send(b"early")
        until(lambda: client.trouble == "nothing listens there")
        assert not client.connected
        client.check()
        with Server(address, keys, limit=LIMIT, name="hub") as server:
            assert must_receive(server).header == b"early"
            until(lambda: client.connected)
            assert client.trouble == ""
        until(lambda: not client.connected)
        assert client.losses == 1
        with Server(address, keys, limit=LIMIT, name="hub") as server:
            serves(server, client, b"again")


def test_a_machine_that_is_not_to_be_found() -> None:
    with Client("tcp://no-such-machine.invalid:5555", KEYS, limit=LIMIT, name="hub") as client:
        end = time.monotonic() + 5.0  # whoever resolves names here may take longer to say no
        while client.trouble == "not connected yet" and time.monotonic() < end:
            time.sleep(0.01)
        assert client.trouble in ("no such machine, or no way to it", "not connected yet")
        client.check()


def test_answers_to_peers_that_are_gone_or_never_were(keys: Keys | None) -> None:
    with pair(keys) as (server, client):
        serves(server, client)
        client.send(b"last")
        peer = must_receive(server).peer
        client.close()
        until(lambda: not server.send(peer, b"too late", b"x"))
        assert server.offer(peer, b"too late") == "gone"
        for stranger in (b"", b"nobody", b"x" * 255, b"x" * 1000):
            assert server.offer(stranger, b"hello", b"x") == "gone"
        with Client(server.address, keys, limit=LIMIT, name="hub") as other:
            serves(server, other)


def test_a_client_that_does_not_read_fills_its_own_queue_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "SERVER_OUTGOING", 8)
    with (
        pair() as (server, client),
        Client(server.address, None, limit=LIMIT, name="hub") as other,
    ):
        client.send(b"hello")
        peer = must_receive(server).peer
        payload = bytes(2**20)
        sent = 0
        full_since = time.monotonic()
        while time.monotonic() - full_since < 0.5:  # a queue that empties into the connection fills again
            if server.send(peer, b"chunk", payload, copy=False):
                sent, full_since = sent + 1, time.monotonic()
                assert sent < 1000
            else:
                time.sleep(0.01)
        sent += server.offer(peer, b"chunk", payload, copy=False) != "full"
        serves(server, other)
        for _ in range(sent):
            assert client.receive(SOON) == (b"chunk", payload)
        assert client.receive(0.05) is None  # nothing was torn
        until(lambda: server.offer(peer, b"more") == "sent")
        assert client.receive(SOON) == (b"more", None)


def test_a_server_that_does_not_read_lets_clients_wait_not_grow() -> None:
    """What a server holds of one client is bounded; the rest waits at the client, uncopied."""
    code = (
        "import sys\n"
        "from atoll.net.endpoint import Client\n"
        "client = Client(sys.argv[1], None, limit=2**24, name='hub')\n"
        "payload = bytes(2**20)\n"
        "for _ in range(400): client.send(b'chunk', payload)\n"
        "print('sent', flush=True)\n"
        "client.receive(60)\n"
    )
    with Server(ANY, None, limit=LIMIT, name="hub") as server:
        before = psutil.Process().memory_info().rss
        child = subprocess.Popen([sys.executable, "-c", code, server.address], stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"sent\n"
            most, grew = before, time.monotonic()
            while time.monotonic() - grew < 0.5:  # until it takes nothing more
                now = psutil.Process().memory_info().rss
                if now > most + 2**20:
                    most, grew = now, time.monotonic()
                assert now - before < 100 * 2**20
                time.sleep(0.01)
            for _ in range(400):
                last = must_receive(server)
            assert server.send(last.peer, b"done")
            assert child.wait(SOON) == 0
        finally:
            child.kill()
            child.wait()


def test_too_many_messages_for_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "CLIENT_OUTGOING", 10)
    with Client("tcp://127.0.0.1:1", None, limit=LIMIT, name="hub") as client:
        until(lambda: client.trouble == "nothing listens there")
        with pytest.raises(RunError, match="10 messages wait for hub at .*: nothing"):  # noqa: PT012
            for _ in range(1000):
                client.send(b"hello", b"x")


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pair(limit=1000) as (server, client):
        with pytest.raises(RunError, match="a message of 1001 bytes, where 1000 is the most"):
            client.send(b"hello", bytes(1001))
        serves(server, client)
        client.send(b"hello", bytes(1000))
        with pytest.raises(RunError, match="a message of 4004 bytes"):
            server.send(must_receive(server).peer, b"hello", np.zeros(1001, np.float32))


def test_poll_names_those_with_something_to_receive() -> None:
    with pair() as (server, client), pair(KEYS) as (other, other_client):
        everyone: list[Endpoint] = [server, client, other, other_client]
        start = time.monotonic()
        assert poll(everyone, 0.1) == []
        assert time.monotonic() - start >= 0.09
        assert poll([], 0.0) == []
        client.send(b"a")
        assert poll(everyone, SOON) == [server]
        assert server.send(must_receive(server).peer, b"b")
        other_client.send(b"c")
        until(lambda: poll(everyone, SOON) == [client, other])
        must_receive(other)
        assert poll(everyone, 0) == [client]


def test_a_closed_connection_says_so() -> None:
    with pair() as (server, client):
        client.close()
        client.close()
        with pytest.raises(RunError, match="hub at tcp.*: the connection is closed"):
            client.send(b"x")
        with pytest.raises(RunError, match="is closed"):
            poll([server, client], 0)


def test_a_closed_client_still_sends_what_it_held(keys: Keys | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "CLOSING_SECONDS", SOON)  # a second may be too short here
    with Server(ANY, keys, limit=LIMIT, name="hub") as server:
        for number in range(20):
            with Client(server.address, keys, limit=LIMIT, name="hub") as client:
                client.send(b"goodbye %d" % number, bytes(100_000))
            assert must_receive(server).header == b"goodbye %d" % number


def test_a_process_that_ends_still_sends_what_it_held(keys: Keys | None, tmp_path: Path) -> None:
    write_keys(tmp_path / "key", KEYS)
    code = (
        "import sys\n"
        "from atoll.net import endpoint\n"
        "from atoll.net.endpoint import Client\n"
        "from atoll.net.keys import read_keys\n"
        "endpoint.CLOSING_SECONDS = 600.0  # it must not last so long\n"
        "keys = read_keys(sys.argv[2]) if len(sys.argv) > 2 else None\n"
        "with Client(sys.argv[1], keys, limit=2**24, name='hub') as client:\n"
        "    client.send(b'goodbye', bytes(10_000_000))\n"
    )
    with Server(ANY, keys, limit=LIMIT, name="hub") as server:
        extra = [str(tmp_path / "key")] if keys else []
        subprocess.run([sys.executable, "-c", code, server.address, *extra], check=True, timeout=SOON)
        assert must_receive(server).header == b"goodbye"


KEEPING = """
import os, sys, time
from atoll.net.endpoint import Client, Server

def visit(server, size):
    with Client(server.address, None, limit=2**24, name="hub") as client:
        client.send(b"x", bytes(size))
        assert server.receive(60.0) is not None

def settles_at(most):
    end = time.monotonic() + 60.0
    while (held := len(os.listdir("/proc/self/fd"))) > most:
        assert time.monotonic() < end, f"{held} descriptors, where {most} are the most"
        time.sleep(0.01)

with Server("tcp://127.0.0.1:0", None, limit=2**24, name="hub") as server:
    idle = len(os.listdir("/proc/self/fd"))
    visit(server, 2**16 - 1)
    settles_at(idle)
    for _ in range(20):
        visit(server, 2**16)
        settles_at(idle + 7)
"""


def test_connections_that_come_and_go_leave_no_descriptors() -> None:
    """But for those of pyzmq's keeper of payloads that are sent without a copy, 64 KiB or more: once."""
    subprocess.run([sys.executable, "-c", KEEPING], check=True, timeout=3 * SOON)


@pytest.mark.parametrize("how", ["open", "closed", "reply", "thread", "silent"])
def test_a_process_that_ends_with_unsent_messages_does_not_crash(how: str) -> None:
    """Messages without a copy must not be sent from memory that is no more."""
    code = """
import socket, sys, threading
from atoll.net.endpoint import Client, Server

how = sys.argv[1]
server = Server("tcp://127.0.0.1:0", None, limit=2**24, name="hub")
silent = socket.create_server(("127.0.0.1", 0))
address = server.address if how != "silent" else f"tcp://127.0.0.1:{silent.getsockname()[1]}"
client = Client(address, None, limit=2**24, name="hub")
for _ in range(50):
    client.send(b"h", bytearray(2**21))
if how == "reply":
    peer = server.receive(60).peer
    for _ in range(50):
        server.send(peer, b"h", bytearray(2**21), copy=False)
if how == "thread":
    beating = Client(address, None, limit=2**24, name="hub")
    ready = threading.Event()
    threading.Thread(target=lambda: (ready.set(), beating.receive(60)), daemon=True).start()
    ready.wait()
if how in ("closed", "thread"):
    client.close()
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, timeout=SOON)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_connections_of_its_own(keys: Keys | None) -> None:
    with pair(keys) as (server, client):
        serves(server, client)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with suppress(RunError):
                    client.send(b"from the child")
                    os._exit(2)
                assert client.trouble is not None
                client.close()
                server.close()
                with pair(keys) as (mine, friend):
                    serves(mine, friend)
                with Client(server.address, keys, limit=LIMIT, name="hub") as upwards:
                    upwards.send(b"from the child")
                    assert upwards.receive(SOON) == (b"welcome", None)
                status = 0
            finally:
                os._exit(status)
        received = must_receive(server)
        assert received.header == b"from the child"
        assert server.send(received.peer, b"welcome")
        until(lambda: os.waitpid(child, os.WNOHANG) == (child, 0))
        serves(server, client)


# -- who may come in -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server_keys", "client_keys", "line"),
    [
        (KEYS, OTHERS, "refuses this key"),
        (
            KEYS,
            Keys(KEYS.server_public, "", OTHERS.client_public, OTHERS.client_secret),
            "refuses this key",
        ),
        (KEYS, None, "wants a key: give the run's key file"),
        (None, KEYS, "takes no key: it was started without"),
    ],
    ids=["another file", "another client", "no key", "needless key"],
)
def test_a_wrong_key_is_named_soon(server_keys: Keys | None, client_keys: Keys | None, line: str) -> None:
    with (
        Server(ANY, server_keys, limit=LIMIT, name="hub") as server,
        Client(server.address, client_keys, limit=LIMIT, name="shard 1") as client,
    ):
        with suppress(UserError):  # it may be told before it sends
            client.send(b"let me in", b"x")
        assert check_until_it_raises(client) == f"shard 1 at {server.address} {line}"
        assert not client.connected
        with suppress(UserError):
            client.send(b"let me in!")
        assert server.receive(0.3) is None
        with Client(server.address, server_keys, limit=LIMIT, name="hub") as good:
            serves(server, good)
            good.check()


@pytest.mark.parametrize(
    ("server_keys", "line"),
    [(OTHERS, "refuses this key"), (None, "takes no key: it was started without")],
    ids=["other keys", "no keys"],
)
def test_who_hung_up_without_a_word_is_asked_why(server_keys: Keys | None, line: str) -> None:
    with (
        Server(ANY, server_keys, limit=LIMIT, name="hub") as server,
        Client(server.address, KEYS, limit=LIMIT, name="hub") as client,
    ):
        client._probe(hung_up=True)
        with pytest.raises(UserError, match=line):
            client.check()


def test_servers_of_two_runs_in_one_process_keep_their_own_keys() -> None:
    mixed = Keys(OTHERS.server_public, "", KEYS.client_public, KEYS.client_secret)
    with pair(KEYS) as (server, client), pair(OTHERS) as (other, other_client):
        serves(server, client)
        serves(other, other_client)
        with Client(other.address, mixed, limit=LIMIT, name="other") as stranger:
            assert "refuses this key" in check_until_it_raises(stranger)


def _greet(text: bytes) -> Callable[[socket.socket], object]:
    return lambda link: (link.sendall(text), time.sleep(SOON))


def _answer_http(link: socket.socket) -> None:
    while b"\n" not in link.recv(1000):
        pass
    link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    link.close()


@pytest.mark.parametrize("talk", [_greet(b"SSH-2.0-OpenSSH_9.6\r\n"), _answer_http], ids=["ssh", "http"])
def test_a_server_of_something_else(talk: Callable[[socket.socket], object], keys: Keys | None) -> None:
    with fake(talk) as address, Client(address, keys, limit=LIMIT, name="hub") as client:
        assert check_until_it_raises(client) == f"hub at {address} speaks no Atoll"


def test_a_tunnel_to_nothing_is_waited_for(keys: Keys | None) -> None:
    """It takes connections and closes them; the server behind it may yet come."""
    with (
        fake(lambda link: (link.recv(1), link.close())) as address,
        Client(address, keys, limit=LIMIT, name="hub") as client,
    ):
        until(lambda: client.trouble == "it takes connections and closes them at once")
        client.check()


def _forward(source: socket.socket, target: socket.socket, delay: float) -> None:
    with suppress(OSError):
        while data := source.recv(4096):
            time.sleep(delay)
            target.sendall(data)


def test_a_server_far_away_is_no_refusal() -> None:
    """A handshake that takes longer than what is patient with strangers: across a continent or two."""

    def talk(link: socket.socket) -> None:
        host, port = server.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), SOON) as beyond:
            beyond.settimeout(None)
            threading.Thread(target=_forward, args=(beyond, link, 0.3), daemon=True).start()
            _forward(link, beyond, 0.3)

    def connected() -> bool:
        client.check()
        return client.connected

    with (
        Server(ANY, KEYS, limit=LIMIT, name="hub") as server,
        fake(talk) as address,
        Client(address, KEYS, limit=LIMIT, name="hub") as client,
    ):
        until(connected)


def test_a_silent_server_is_waited_for(keys: Keys | None) -> None:
    with (
        fake(lambda link: time.sleep(SOON)) as address,
        Client(address, keys, limit=LIMIT, name="hub") as client,
    ):
        until(lambda: client.trouble == "it takes connections and answers nothing")
        client.check()


# -- what strangers send -------------------------------------------------------------------------------------


def _raw(server: Server, *pieces: bytes, wait: float = 0.0) -> None:
    """Write bytes to the server's port as they are."""
    host, port = server.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), SOON) as link, suppress(OSError):
        for piece in pieces:
            link.sendall(piece)
            time.sleep(wait)


NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
NULL_READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
NULL_READY = NULL_READY[:1] + bytes([len(NULL_READY) - 2]) + NULL_READY[2:]


def test_garbage_on_the_port_disturbs_nobody(keys: Keys | None) -> None:
    noise = random.Random(3)
    with pair(keys) as (server, client):
        serves(server, client)
        before = psutil.Process().memory_info().rss
        for _ in range(50):
            _raw(server, noise.randbytes(noise.choice([1, 10, 64, 1000, 100_000])))
            _raw(server, NULL_GREETING, NULL_READY, noise.randbytes(200))
            _raw(server, NULL_GREETING + noise.randbytes(100))
            _raw(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            while (received := server.receive(0)) is not None:
                server.send(received.peer, b"?")  # bytes that happen to be frames: for the parser above
        serves(server, client, noise=True)
        assert psutil.Process().memory_info().rss - before < 50 * 2**20


def test_a_frame_that_claims_to_be_huge_is_cut_off() -> None:
    with pair() as (server, client):
        before = psutil.Process().memory_info().rss
        for size in (LIMIT + 1, 2**40, 2**63 - 1, 2**64 - 1):
            frame = b"\x02" + size.to_bytes(8, "big")
            _raw(server, NULL_GREETING + NULL_READY, frame + bytes(1000), wait=0.02)
        serves(server, client)
        assert psutil.Process().memory_info().rss - before < 20 * 2**20


def test_a_client_with_larger_frames_loses_its_connection_only(keys: Keys | None) -> None:
    with (
        Server(ANY, keys, limit=1000, name="hub") as server,
        Client(server.address, keys, limit=LIMIT, name="hub") as large,
        Client(server.address, keys, limit=1000, name="hub") as client,
    ):
        serves(server, large)
        serves(server, client)
        large.send(b"h", bytes(2_000_000))
        until(lambda: large.losses == 1)
        assert server.receive(0.1) is None
        serves(server, client)
        serves(server, large)  # it comes again


@contextmanager
def stranger(server: Server) -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ client that sends whatever it likes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as link:
        link.linger = 0
        link.connect(server.address)
        yield link


def test_messages_of_any_number_of_frames() -> None:
    noise = random.Random(5)
    with pair() as (server, client), stranger(server) as odd:
        good = 0
        counts = [noise.choice([1, 2, 2, 3, 4, 10, 5000]) for _ in range(300)]
        for count in counts:
            odd.send_multipart([noise.randbytes(noise.randrange(50)) for _ in range(count)])
        expected = sum(count <= 2 for count in counts)
        while good < expected:
            received = must_receive(server)
            assert (received.payload is not None) in (True, False)
            good += 1
        until(lambda: server.receive(0.01) is None and server.dropped == len(counts) - expected)
        serves(server, client)


def test_a_header_over_the_limit_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "HEADER_BYTES", 100)
    with pair() as (server, client):
        client.send(bytes(101), b"x")
        client.send(bytes(100), b"x")
        assert len(must_receive(server).header) == 100
        assert server.dropped == 1
        serves(server, client)


def test_nonsense_without_a_pause_leaves_time_for_other_work() -> None:
    with pair() as (server, client), stranger(server) as odd:
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                with suppress(zmq.Again):
                    odd.send_multipart([b"", b"", b""], zmq.NOBLOCK)

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            until(lambda: server.receive(0.1) is None and server.dropped > 0)
            client.send(b"a", b"payload")
            until(lambda: getattr(server.receive(0.1), "header", b"") == b"a")
        finally:
            stop.set()
            thread.join(SOON)


def test_a_client_drops_what_is_no_answer() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with Client(f"tcp://127.0.0.1:{port}", None, limit=LIMIT, name="hub") as client:
            client.send(b"hello")
            peer = router.recv_multipart()[0]
            router.send_multipart([peer, b"1", b"2", b"3"])
            router.send_multipart([peer, b"1", b"2"])
            assert client.receive(SOON) == (b"1", b"2")
            assert client.dropped == 1


def test_half_open_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "_HANDSHAKE_SECONDS", 0.2)
    with Server(ANY, KEYS, limit=LIMIT, name="hub") as server:
        port = int(server.address.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), SOON) as link:
            link.sendall(NULL_GREETING[:20])
            end = time.monotonic() + SOON
            with suppress(ConnectionResetError):
                while link.recv(100):
                    assert time.monotonic() < end


# -- speed ---------------------------------------------------------------------------------------------------


def test_a_hundred_megabytes_take_a_fraction_of_a_second(keys: Keys | None) -> None:
    """No figure for the benchmarks: it only tells a mistake of a factor of ten."""
    piece = np.ones(2**20, np.float32)
    with pair(keys) as (server, client):
        serves(server, client)
        start = time.process_time()  # of this process, which is both sides
        for _ in range(25):
            client.send(b"chunk", piece)
        for _ in range(25):
            payload = must_receive(server).payload
            assert payload is not None
            assert payload.nbytes == piece.nbytes
        assert time.process_time() - start < 5.0


def test_a_client_that_nobody_looks_at_stops_no_other_of_its_process() -> None:
    """What libzmq tells of its tries to connect waits to be read; it must not wait for room there."""
    tries: list[socket.socket] = []

    def hang_up(link: socket.socket) -> None:
        tries.append(link)
        link.close()

    with (
        fake(hang_up) as address,
        pair() as (server, other),
        Client(address, None, limit=LIMIT, name="hub", reconnect=(0.001, 0.001)) as client,
    ):
        until(lambda: len(tries) > 800)
        serves(server, other)
        assert client.trouble
