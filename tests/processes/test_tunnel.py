"""Tunnels over real sockets: what comes in which order, what may be lost, and what becomes of it when one end
dies."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from atoll.core.config import LinkOptions
from atoll.core.errors import RunError, UserError
from atoll.ltp.grants import Grant, Grants
from atoll.ltp.settings import LtpSettings
from atoll.net import tunnel as tunnels
from atoll.net import tunnelorder
from atoll.net.endpoint import Client, Received, Server, poll
from atoll.net.keys import make_keys
from atoll.net.ltplink import LtpLink
from atoll.net.returning import ReturningLinks, elements_in_block
from atoll.net.tunnel import Lossy, TunnelClient, TunnelServer, Wish, block_elements
from atoll.wire.datagrams import LTP_VERSION
from atoll.wire.messages import (
    VERSION,
    Hello,
    LinkLost,
    LinkOpened,
    OpenLink,
    Ready,
    Refused,
    Welcome,
    decode_untrusted,
    encode,
)
from atoll.wire.tunnel import BATCHES, Batch, TunnelEntry, encode_batch
from support.leaks import still_open

SOON = 30.0
LIMIT = 2**28
# Where no client of a server that is no more comes: it tries its port on and on, and a new one may get that.
ALONE = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"


class Proxy:
    """Datagrams to a UDP port of this machine and back, on a thread of its own, which loses some."""

    def __init__(self, port: int, loss: float = 0.0, seed: int = 1) -> None:
        self.loss, self.closed = loss, False
        self._rng = random.Random(seed)
        self._front, self._back = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        for each in (self._front, self._back):
            each.bind(("127.0.0.1", 0))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
        self._server = ("127.0.0.1", port)
        self._client: tuple[str, int] | None = None
        self.port = int(self._front.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self.closed:
            for ready in select.select([self._front, self._back], [], [], 0.05)[0]:
                data, address = ready.recvfrom(65536)
                if ready is self._front:
                    self._client = address
                if self._rng.random() >= self.loss:
                    if ready is self._front:
                        self._back.sendto(data, self._server)
                    elif self._client is not None:
                        self._front.sendto(data, self._client)

    def close(self) -> None:
        self.closed = True
        self._thread.join(SOON)
        self._front.close()
        self._back.close()


@pytest.fixture
def through_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], list[Proxy]]]:
    """Has all tunnels that are opened from then on go through proxies that lose so much."""
    made: list[Proxy] = []

    def install(loss: float) -> list[Proxy]:
        before = TunnelClient._open_link

        def opened(client: TunnelClient, told: LinkOpened) -> None:
            made.append(Proxy(told.ports[0], loss))
            before(client, msgspec.structs.replace(told, ports=[made[-1].port]))

        monkeypatch.setattr(TunnelClient, "_open_link", opened)
        return made

    yield install
    for each in made:
        each.close()


@contextmanager
def server(host: str = "127.0.0.1", **options: object) -> Iterator[TunnelServer]:
    made = TunnelServer(f"tcp://{host}:0", None, limit=LIMIT, name="shard 0", **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


@contextmanager
def client(door: Server, wish: Wish | None = None) -> Iterator[TunnelClient]:
    made = TunnelClient(door.address, None, limit=LIMIT, name="shard 0", wish=wish)
    try:
        yield made
    finally:
        made.close()


def until(done: Callable[[], bool], *ends: TunnelClient | Server, why: str = "") -> list[object]:
    """What the ends have got until `done`."""
    got: list[object] = []
    limit = time.monotonic() + SOON
    while not done():
        assert time.monotonic() < limit, why or got
        poll(ends, 0.02)
        for end in ends:
            if isinstance(end, TunnelClient):
                end.check()
            while (each := end.receive(0)) is not None:
                got.append(each)
    return got


def nothing_is_left(before: set[str], *ends: TunnelClient | Server) -> None:
    """Wait until only what was open before is: libzmq closes on a thread of its own."""
    limit = time.monotonic() + SOON
    while left := still_open() - before:
        assert time.monotonic() < limit, left
        poll(ends, 0.02)
        for end in ends:
            end.receive(0)


def take(end: TunnelClient | Server, count: int, *others: TunnelClient | Server) -> list[object]:
    """The next messages of an end."""
    got: list[object] = []
    limit = time.monotonic() + SOON
    while len(got) < count:
        assert time.monotonic() < limit, f"{len(got)} of {count}"
        poll([end, *others], 0.02)
        for other in others:
            other.receive(0)
        while len(got) < count and (each := end.receive(0)) is not None:
            got.append(each)
    return got


def connect(door: TunnelServer, end: TunnelClient) -> bytes:
    """Wait until the tunnel stands; returns the peer as the server knows it."""
    end.send(b"first")
    (received,) = take(door, 1, end)
    assert isinstance(received, Received)
    assert received.header == b"first"
    until(lambda: end.connected, end, door)
    return received.peer


def test_messages_of_all_sizes_come_in_order_both_ways_beside_a_plain_client() -> None:
    rng = np.random.default_rng(0)
    sizes = [None, 0, 1, 2**14, 2**14 + 1, 3_000_000, None, 70_000, *[None] * 500, 2_000_001]
    payloads = [None if size is None else rng.bytes(size) for size in sizes]
    with (
        server() as door,
        client(door) as end,
        Client(door.address, None, limit=LIMIT, name="plain") as plain,
    ):
        assert not end.connected
        assert end.trouble
        for number, payload in enumerate(payloads):  # the first of them before the tunnel is open
            end.send(b"%d" % number, payload)
            plain.send(b"%d" % number, payload)
        got: dict[bytes, list[Received]] = {}
        for each in take(door, 2 * len(sizes), end):
            got.setdefault(each.peer, []).append(each)
            assert door.offer(each.peer, each.header, each.payload, copy=each.header == b"3") == "sent"
        assert len(got) == 2
        for came in got.values():
            assert [each.header for each in came] == [b"%d" % number for number in range(len(sizes))]
            assert [None if each.payload is None else bytes(each.payload) for each in came] == payloads
            assert not any(each.lost for each in came)
        for back in (take(end, len(sizes), door), take(plain, len(sizes), door)):
            assert [header for header, _ in back] == [b"%d" % number for number in range(len(sizes))]
            assert [None if payload is None else bytes(payload) for _, payload in back] == payloads
        assert end.connected
        assert end.trouble == ""
        assert end.losses == 0
        (there,) = door.links()
        here = end.link
        assert here is not None
        assert here.bytes_out == there.bytes_in == here.bytes_in == there.bytes_out
        assert here.bytes_out > 5_000_000
        assert here.sent > 3000
        assert here.rate > 0


@pytest.mark.parametrize(
    ("fill", "above", "dtype", "how"),
    [
        ("zero", 0.5, "float32", "borne"),
        ("zero", 0.0, "bfloat16", "zero"),
        ("last", 0.0, "float64", "last"),
        ("rescale", 0.0, "float32", "rescaled"),
    ],
)
def test_what_is_lost_of_a_lossy_payload_comes_with_it(
    through_proxy: Callable[[float], list[Proxy]], fill: str, above: float, dtype: str, how: str
) -> None:
    settings = LtpSettings(fill=fill, fill_above=above, usable=0.5, target_loss=0.0, redundancy=False)  # type: ignore[arg-type]
    block, kind = block_elements(dtype, settings), {"bfloat16": "u2", "float64": "f8"}.get(dtype, "f4")
    rng = np.random.default_rng(2)
    blocks = 600
    values = (rng.integers(1, 2**15, blocks * block - 7)).astype(kind)  # none is 0; the last block is shorter
    high = np.arange(blocks) % 10 == 0
    through_proxy(0.05)
    with server() as door, client(door, Wish("worker 1", settings=settings)) as end:
        connect(door, end)
        lost_blocks = 0
        for iteration in range(6):
            end.send(b"push %d" % iteration, values.data, Lossy(3, iteration, dtype, high))
            end.send(b"then %d" % iteration, values.data)
            push, then = take(door, 2, end)
            assert (push.header, then.header) == (b"push %d" % iteration, b"then %d" % iteration)
            assert bytes(then.payload) == values.tobytes()
            assert then.lost is None
            came = np.frombuffer(push.payload, dtype=kind)
            if push.lost is None:
                assert np.array_equal(came, values)
                continue
            assert (push.lost.block, push.lost.how) == (
                block,
                "zero" if how == "last" and not iteration else how,
            )
            missing = (
                np.unpackbits(np.frombuffer(push.lost.missing, np.uint8), bitorder="little")[:blocks] > 0
            )
            lost_blocks += int(missing.sum())
            assert missing.any()
            assert not missing[high].any()
            assert not missing[-1]
            gone = np.repeat(missing, block)[: len(values)]
            if how in ("borne", "zero"):
                assert not came[gone].any()
            if how == "rescaled":
                scaled = ~gone & ~np.repeat(high, block)[: len(values)]
                scaled[-(len(values) % block) :] = False  # the last block is high
                assert np.allclose(came[scaled] / values[scaled], (came[scaled] / values[scaled])[0])
                assert (came[scaled] > values[scaled]).all()
            else:
                assert np.array_equal(came[~gone], values[~gone])
        assert lost_blocks > 0
        (there,) = door.links()
        until(lambda: end.link.borne + end.link.filled == lost_blocks, end, door)
        assert (there.borne if how == "borne" else there.filled) == lost_blocks
        assert (there.peer, end.link.peer) == ("worker 1", f"shard 0 at {door.address}")


def test_payloads_are_let_go_of_once_the_other_end_has_them() -> None:
    with server() as door, client(door) as end:
        peer = connect(door, end)
        mine, theirs = (np.ones(2_000_000, dtype=np.uint8) for _ in range(2))
        held = [weakref.ref(mine), weakref.ref(theirs)]
        end.send(b"up", mine.data)
        assert door.offer(peer, b"down", theirs.data, copy=False) == "sent"
        del mine, theirs
        take(door, 1)
        take(end, 1)
        until(lambda: not any(each() is not None for each in held), end, door, why="still held")


def test_what_the_server_does_not_take_waits_at_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnelorder, "WINDOW_BYTES", 2**21)
    monkeypatch.setattr(tunnelorder, "WINDOW_MESSAGES", 100)
    payload = bytes(300_000)
    with server() as door, client(door) as end:
        peer = connect(door, end)
        for number in range(50):
            end.send(b"%d" % number, payload)
        (held,) = (each.end for each in door._tunnels.values())
        until(lambda: held._inbox._next >= 7, end)  # the application at the server takes nothing
        end._tunnel.wait_sent(0.3)  # in which more would go, if it could
        assert 2**21 <= held._inbox._held <= 2**21 + 400_000
        assert held._inbox._next <= 9
        assert end._tunnel.waiting > 35
        got = take(door, 50, end)
        assert [each.header for each in got] == [b"%d" % number for number in range(50)]
        monkeypatch.setattr(tunnels, "SERVER_OUTGOING", 20)
        offered = [door.offer(peer, b"x") for _ in range(200)]
        assert 20 < offered.count("sent") < 100
        assert offered[-1] == "full"
        got = take(end, offered.count("sent"))  # who was told "full" sends again
        assert door.offer(peer, b"y") == "sent"
        assert take(end, 1, door) == [(b"y", None)]


SERVES = """
import sys
from atoll.net.endpoint import poll
from atoll.net.tunnel import TunnelServer
door = TunnelServer("tcp://127.0.0.1:0", None, limit=2**28, name="shard 0")
print(door.address, flush=True)
while True:
    poll([door], 1.0)
    while (got := door.receive(0)) is not None:
        door.offer(got.peer, got.header, got.payload, copy=False)
"""
SPEAKS = """
import sys
from atoll.net.tunnel import TunnelClient
end = TunnelClient(sys.argv[1], None, limit=2**28, name="shard 0")
while True:
    end.send(b"x", bytes(100_000))
    end.receive(0.05)
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


def test_a_killed_server_is_a_loss_at_once() -> None:
    process = start(SERVES)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        with TunnelClient(address, None, limit=LIMIT, name="shard 0") as end:
            end.send(b"hello", bytes(100_000))
            assert [header for header, _ in take(end, 1)] == [b"hello"]
            process.send_signal(signal.SIGKILL)
            until(lambda: end.losses == 1, end)
            assert not end.connected
            assert end.trouble == "the connection was lost"  # and not that nothing came for so many seconds
            end.send(b"nobody hears")
            assert end.receive(0.01) is None
    finally:
        process.kill()
        process.communicate(timeout=SOON)


def test_clients_that_are_killed_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnels, "LOOK_SECONDS", 0.1)
    with server(ALONE) as door, client(door) as lasting:
        stays = connect(door, lasting)
        gc.collect()  # what other tests have left closes its files now
        before = still_open()
        for _ in range(2):
            processes = [start(SPEAKS, door.address) for _ in range(2)]
            until(lambda: len(door.links()) == 3, door)
            peers = set(door._tunnels) - {stays}
            for process in processes:
                process.kill()
                process.communicate(timeout=SOON)
            until(lambda: len(door.links()) == 1, door)
            assert set(door._tunnels) == {stays}
            assert all(door.offer(peer, b"x") == "gone" for peer in peers)
        assert door._link is not None
        until(lambda: len(door._link._sessions) == 1, door)
        nothing_is_left(before, door)
        lasting.send(b"still here")
        assert take(door, 1, lasting)[0].header == b"still here"


def test_clients_that_come_and_go_leave_no_thread_and_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnels, "LOOK_SECONDS", 0.1)

    def come_and_go(door: TunnelServer) -> None:
        with client(door) as end:
            connect(door, end)
            end.send(b"last word")
        assert take(door, 1)[0].header == b"last word"  # closing waits for it
        until(lambda: not door._tunnels, door)
        gc.collect()

    with server(ALONE) as door:
        come_and_go(door)
        before = still_open()  # with what the first one's leaves for the next
        for _ in range(3):
            come_and_go(door)
            nothing_is_left(before, door)


def test_no_udp_through_is_one_line_that_says_so(
    through_proxy: Callable[[float], list[Proxy]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnels, "NO_UDP_SECONDS", 0.5)
    through_proxy(1.0)
    with server() as door, client(door) as end:
        end.send(b"hello")
        with pytest.raises(UserError) as error:
            until(lambda: False, end, door)
    assert str(error.value) == (
        f"shard 0 at {door.address}: no datagram came back from 127.0.0.1, UDP port {end._udp_ports[0]}, "
        'within 0.5 s: let UDP through, both ways, or set link.transport = "tcp"'
    )


def test_a_way_that_closes_is_a_loss_at_both_ends(through_proxy: Callable[[float], list[Proxy]]) -> None:
    made = through_proxy(0.0)
    wish = Wish("worker 1", settings=LtpSettings(idle_seconds=1.0))
    with server() as door, client(door, wish) as end:
        peer = connect(door, end)
        made[0].loss = 1.0
        end.send(b"is not heard")
        until(lambda: end.losses == 1, end, door)
        assert "for 1 s" in end.trouble
        end.abandon()
        until(lambda: door.offer(peer, b"x") == "gone", door)


def test_the_server_says_that_a_session_is_over() -> None:
    """Though its last datagrams are lost: over the connection."""
    with server() as door, client(door) as end:
        peer = connect(door, end)
        door._tunnels[peer].end.session.fail("it has failed")
        until(lambda: end.losses == 1, end, door)
        assert "it has failed" in end.trouble
        assert door.offer(peer, b"x") == "gone"


class Links:
    """Connections that come back, to one shard that is moved."""

    def __init__(self, address: str) -> None:
        self.where, self.came = [address], []
        self.links = ReturningLinks(
            self.where,
            None,
            hello=Hello(version=VERSION, run="r", role="worker", worker=3, incarnation=4, site="paris"),
            limit=LIMIT,
            name=lambda index: f"shard {index}",
            ends=lambda index: f"shard {index} is gone for good",
            where=lambda: self.where,
            is_it=lambda index, welcome: welcome.shard == index,
            link=LinkOptions(transport="ltp"),
        )

    def look(self) -> None:
        ready = poll(self.links.clients, 0.02)
        if not ready:
            self.links.check()
        self.links.take(ready, self._handle)

    def _handle(self, index: int, header: bytes, _payload: memoryview | None) -> None:
        message = decode_untrusted(header)
        self.came.append(message)
        if isinstance(message, Welcome):
            self.links.handle_welcome(index, message)


def test_connections_that_come_back_send_again_what_has_no_answer() -> None:
    secrets = []
    payload = np.arange(100_000, dtype=np.float32)
    links: Links | None = None
    for life in range(3):
        with server() as door:
            if links is None:
                links = Links(door.address)
                links.links.send(
                    0, Ready(digest="push"), payload.data, until="a", lossy=Lossy(1, 2, "float32")
                )
            links.where[0] = door.address
            got: list[Received] = []
            limit = time.monotonic() + SOON
            while len(got) < 2:
                assert time.monotonic() < limit
                links.look()
                poll([door], 0.02)
                while (each := door.receive(0)) is not None:
                    if isinstance(decode_untrusted(each.header), Hello):
                        if got:
                            continue  # it says so each second, until it is welcome
                        door.offer(each.peer, encode(Welcome(run="r", shard=0, comes_back=True)))
                    got.append(each)
            assert [type(decode_untrusted(each.header)) for each in got] == [Hello, Ready]
            assert got[1].payload.nbytes == 400_000
            figures = links.links.figures()[0]
            assert (figures.site, door.links()[0].peer, door.links()[0].site) == (
                "paris",
                "worker 3",
                "paris",
            )
            secrets.append(next(iter(door._link._secrets)))
            assert links.links.come_back == life
    links.links.close()
    assert len(set(secrets)) == 3
    assert elements_in_block(LinkOptions(transport="ltp"), "float32") == 330


def hear(end: Client, *kinds: type) -> object:
    """The next word of these kinds; between them the server looks whether its client is there."""
    limit = time.monotonic() + SOON
    while (got := end.receive(limit - time.monotonic())) is not None:
        message = decode_untrusted(got[0])
        if isinstance(message, kinds):
            return message
    raise AssertionError(f"none of {kinds} came")


def answer(end: Client, message: object) -> object:
    end.send(encode(message))  # type: ignore[arg-type]
    return hear(end, LinkOpened, Refused)


WISH = OpenLink(
    ltp=LTP_VERSION, who="w", site="", stripes=1, datagram_bytes=1400, fill="zero", fill_above=0.03,
    usable=0.97, target_loss=0.01,
)  # fmt: skip


@contextmanager
def serving(door: TunnelServer) -> Iterator[list[Received]]:
    """Takes what comes, on a thread."""
    stop, got = threading.Event(), []

    def run() -> None:
        while not stop.is_set():
            poll([door], 0.02)
            while (each := door.receive(0)) is not None:
                got.append(each)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield got
    finally:
        stop.set()
        thread.join(SOON)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ltp": LTP_VERSION + 1}, "install the same Atoll on both"),
        ({"fill": "nothing"}, "one of zero, last, rescale"),
        ({"datagram_bytes": 10}, "datagram_bytes = 10: between"),
        ({"target_loss": 0.5}, "must not pass fill_above"),
        ({"stripes": 9}, "no message of this protocol"),
    ],
)
def test_a_wish_that_cannot_be_is_refused_in_one_line(changes: dict[str, object], why: str) -> None:
    with (
        server() as door,
        serving(door),
        Client(door.address, None, limit=LIMIT, name="shard 0") as end,
    ):
        told = answer(end, msgspec.structs.replace(WISH, **changes))
        assert isinstance(told, Refused)
        assert why in told.reason
        assert told.request == "OpenLink"


def test_a_server_that_takes_no_tunnels_is_heard_to_say_so() -> None:
    with Server("tcp://127.0.0.1:0", None, limit=LIMIT, name="hub") as door, client(door) as end:
        end.send(b"waits")
        (wish,) = take(door, 1, end)
        assert isinstance(decode_untrusted(wish.header), OpenLink)
        door.send(wish.peer, encode(Refused(reason="nothing known", request="OpenLink")))
        ((header, _),) = take(end, 1)
        assert decode_untrusted(header) == Refused(reason="nothing known", request="OpenLink")


def test_a_port_that_is_taken_is_told_at_the_start() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(UserError, match=f"shard 0: .*{taken.getsockname()[1]}"):
            TunnelServer(
                "tcp://127.0.0.1:0", None, limit=LIMIT, name="shard 0", udp_port=taken.getsockname()[1]
            )


def test_a_server_that_cannot_be_leaves_nothing_open() -> None:
    with server(), socket.socket() as taken, socket.socket(type=socket.SOCK_DGRAM) as udp:
        taken.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        busy, port = f"tcp://127.0.0.1:{taken.getsockname()[1]}", udp.getsockname()[1]
        before = still_open()
        for address, udp_port in ((busy, 0), ("tcp://192.0.2.1:0", 0), ("tcp://127.0.0.1:0", port)):
            with pytest.raises(UserError):
                TunnelServer(address, None, limit=LIMIT, name="shard 0", udp_port=udp_port)
        nothing_is_left(before)


def batch_of(*entries: TunnelEntry, first: int = 0, taken: int = 0) -> np.ndarray:
    return np.frombuffer(encode_batch(Batch(first=first, taken=taken, entries=list(entries))), dtype=np.uint8)


@pytest.mark.parametrize(
    ("chunk", "content", "why"),
    [
        (BATCHES, np.zeros(10, dtype=np.uint8), "no batch of messages"),
        (BATCHES, batch_of(TunnelEntry(b"h"), first=5000), "message 5000"),
        (BATCHES, np.frombuffer(msgspec.msgpack.encode([0, 0, [[b""]] * 500_000]), np.uint8), "<= 1024"),
        (BATCHES, batch_of(taken=1), "1 messages were taken, of 0"),
        (BATCHES, batch_of(TunnelEntry(b"h", apart=True, size=LIMIT + 1)), "is the most"),
        (7, np.zeros(10, dtype=np.float32), "message 99999"),
    ],
)
def test_who_breaks_the_rules_loses_the_tunnel_and_no_one_else(
    chunk: int,
    content: np.ndarray,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tunnels, "LOOK_SECONDS", 0.1)
    with (
        server() as door,
        client(door) as good,
        Client(door.address, None, limit=LIMIT, name="shard 0") as bad,
    ):
        connect(door, good)
        with serving(door) as got, LtpLink("127.0.0.1", name="bad") as link:
            opened = answer(bad, WISH)
            assert isinstance(opened, LinkOpened)
            session = link.open(
                opened.session, opened.secret, [("127.0.0.1", opened.ports[0])], True, settings=LtpSettings()
            )
            session.send(chunk, 99999, content, reliable=True)
            assert why in hear(bad, LinkLost).reason  # type: ignore[attr-defined]
            good.send(b"goes on")
            limit = time.monotonic() + SOON
            while not got:
                assert time.monotonic() < limit
                time.sleep(0.01)
            assert [each.header for each in got] == [b"goes on"]


def test_who_opens_another_tunnel_loses_the_first() -> None:
    with (
        server() as door,
        serving(door),
        Client(door.address, None, limit=LIMIT, name="shard 0") as end,
    ):
        first, second = answer(end, WISH), answer(end, WISH)
        assert isinstance(first, LinkOpened)
        assert isinstance(second, LinkOpened)
        assert first.secret != second.secret
        assert set(door._link._sessions) == {second.session}


def test_a_server_with_keys_takes_tunnels_of_those_who_have_them() -> None:
    keys = make_keys()
    with TunnelServer("tcp://127.0.0.1:0", keys, limit=LIMIT, name="shard 0") as door:
        with TunnelClient(door.address, keys, limit=LIMIT, name="shard 0") as end:
            connect(door, end)
        with (
            TunnelClient(door.address, make_keys(), limit=LIMIT, name="shard 0") as stranger,
            pytest.raises(UserError, match="refuses this key"),
        ):
            until(lambda: False, stranger, door)
    with pytest.raises(UserError, match="key file"):
        TunnelClient("tcp://10.1.2.3:4567", None, limit=LIMIT, name="shard 0")


def test_a_link_is_shared_out_among_sites_whatever_the_number_of_their_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rate, given = 20e6, []
    poll_grants = Grants.poll_grants

    def noted(grants: Grants, now: float) -> list[Grant]:
        made = poll_grants(grants, now)
        given.extend((now, each.session, each.rate, now + each.seconds) for each in made)
        return made

    monkeypatch.setattr(Grants, "poll_grants", noted)
    payload = np.ones(2_000_000, dtype=np.float32)
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(server(link_rate=rate))
        ends = [
            stack.enter_context(client(door, Wish(f"worker {number}", site="oslo" if number else "paris")))
            for number in range(4)
        ]
        peers = [connect(door, end) for end in ends]
        for end in ends:
            for _ in range(10):
                end.send(b"push", payload.data, Lossy(0, 0, "float32"))
        numbers = [door._tunnels[peer].end.session.number for peer in peers]
        shares = [0.475 * rate] + [0.475 / 3 * rate] * 3

        def all_have_their_share() -> bool:
            latest = {session: rate for _, session, rate, _ in given}
            return [latest.get(number) for number in numbers] == pytest.approx(shares)

        until(all_have_their_share, door, *ends)
        for end in ends:
            end.abandon()
    for now, _, _, _ in given:
        held: dict[int, float] = {}
        for at, session, each, over in given:
            if at <= now < over:
                held[session] = max(each, held.get(session, 0.0))
        assert sum(held.values()) <= rate


def test_stripes_are_ports_of_their_own() -> None:
    with server() as door, client(door, Wish("w", stripes=3)) as end:
        connect(door, end)
        end.send(b"big", bytes(3_000_000))
        take(door, 1, end)
        assert all(port.count.received > 100 for port in door._link._ports)
        with client(door) as other:
            connect(door, other)
            assert len(other._udp_ports) == 1


def test_a_forked_process_has_no_part_in_its_parents_tunnel() -> None:
    with server() as door, client(door) as end:
        connect(door, end)
        child = os.fork()
        if not child:
            status = 1
            try:
                try:
                    end.send(b"x")
                except RunError:
                    end.close()
                    door.close()
                    status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        end.send(b"goes on")
        assert take(door, 1, end)[0].header == b"goes on"


@pytest.mark.parametrize(
    ("lossy", "why"),
    [
        (Lossy(1, 2, "int8"), "a lossy payload of int8: one of float32"),
        (Lossy(2**32 - 1, 2, "float32"), "chunks are from 0"),
        (Lossy(1, 2, "float64"), "a multiple of 8"),
        (Lossy(1, 2, "float32", np.ones(3, dtype=np.bool_)), "of shape"),
    ],
)
def test_what_cannot_be_sent_lossy_is_an_error_where_it_is_sent(lossy: Lossy, why: str) -> None:
    with server() as door, client(door) as end, pytest.raises(UserError, match=why):
        end.send(b"push", np.ones(10_001, dtype=np.float32).data, lossy)
