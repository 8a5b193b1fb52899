"""Bursts of datagrams over real sockets: with segmentation offload and without, IPv4 and IPv6."""

from __future__ import annotations

import errno
import multiprocessing
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import RunError, UserError
from atoll.net import udp
from atoll.net.packetfilter import MOST_STEPS, SAMPLE, only_sessions
from atoll.net.udp import Address, Bytes, UdpPort
from support.leaks import still_open

SOON = 20.0
HOSTS = ["127.0.0.1", "::1"]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="segmentation offload is Linux's")


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ports() -> Iterator[tuple[UdpPort, UdpPort]]:
    with UdpPort(("127.0.0.1", 0)) as one, UdpPort(("127.0.0.1", 0)) as other:
        yield one, other


def frames(rows: int, size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (rows, size), dtype=np.uint8)


def take(port: UdpPort, count: int) -> list[udp.Received]:
    """The next `count` datagrams, copied."""
    until, got = time.monotonic() + SOON, 0
    taken = []
    while got < count:
        assert wait(port, select.POLLIN, until), f"{got} of {count} came"
        for each in port.receive():
            taken.append(each._replace(frames=each.frames.copy()))
            got += len(each.frames)
    assert got == count
    return taken


def wait(port: UdpPort, what: int, until: float) -> bool:
    poll = select.poll()
    poll.register(port, what)
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1e3))


def joined(taken: list[udp.Received]) -> Bytes:
    return np.concatenate([each.frames for each in taken])


@pytest.mark.parametrize("receives", [True, False], ids=["joined", "one by one"])
@pytest.mark.parametrize("sends", [True, False], ids=["in bursts", "each alone"])
def test_a_burst_arrives_whole_and_in_order(host: str, sends: bool, receives: bool) -> None:
    burst = frames(300, 1400)
    with (
        UdpPort((host, 0), offload=sends) as sender,
        UdpPort((host, 0), offload=receives) as receiver,
    ):
        assert sender.send(burst, receiver.address) == 300
        taken = take(receiver, 300)
        assert np.array_equal(joined(taken), burst)
        assert all(each.address[:2] == sender.address[:2] for each in taken)
        assert all((each.sizes == 1400).all() and len(each.sizes) == len(each.frames) for each in taken)
        calls, bursts = (sender.count.sent_calls, receiver.count.received_calls), -(-300 // (65_000 // 1400))
        assert calls[0] == (bursts if sender.offload.sends else 300)
        assert calls[1] == (bursts if sender.offload.sends and receiver.offload.receives else 300)
        assert sender.count.sent_bytes == receiver.count.received_bytes == burst.size


@linux_only
def test_this_system_has_both_offloads() -> None:
    with UdpPort(("127.0.0.1", 0)) as port:
        assert port.offload == udp.Offload(True, True, "")


@pytest.mark.parametrize("size", [1, 99, 1015, 1400, 9000, 32_500, 32_501, 65_000, 65_507])
def test_datagrams_of_every_length(size: int, ports: tuple[UdpPort, UdpPort]) -> None:
    sender, receiver = ports
    burst = frames(70, size)
    for start in range(0, 70, 10):  # so that no buffer need hold it all
        assert sender.send(burst[start : start + 10], receiver.address) == 10
        assert np.array_equal(joined(take(receiver, 10)), burst[start : start + 10])


def test_a_call_has_at_most_64_datagrams(ports: tuple[UdpPort, UdpPort]) -> None:
    sender, receiver = ports
    sender.send(frames(129, 100), receiver.address)
    assert np.array_equal(joined(take(receiver, 129)), frames(129, 100))
    assert sender.count.sent_calls == (3 if sender.offload.sends else 129)


def test_what_came_lies_in_one_array_as_long_as_it_is_of_a_kind(ports: tuple[UdpPort, UdpPort]) -> None:
    """So that a burst is worked on in few steps. A shorter one, or another sender's, begins another array."""
    one, receiver = ports
    with UdpPort(("127.0.0.1", 0)) as other:
        sent: list[tuple[UdpPort, int, int]] = [
            *((one, 100, 1400), (one, 46, 1400), (one, 1, 300), (one, 5, 1400)),
            *((other, 20, 1400), (one, 7, 1400), (one, 3, 1399)),
        ]
        for seed, (port, rows, size) in enumerate(sent):
            port.send(frames(rows, size, seed), receiver.address)
        received = receiver.receive()
        assert [(each.frames.shape, each.address) for each in received] == [
            ((146, 1400), one.address),
            ((1, 300), one.address),
            ((5, 1400), one.address),
            ((20, 1400), other.address),
            ((7, 1400), one.address),
            ((3, 1399), one.address),
        ]
        data = b"".join(each.frames.tobytes() for each in received)
        assert data == b"".join(frames(rows, size, s).tobytes() for s, (_, rows, size) in enumerate(sent))


@linux_only
def test_a_shorter_last_datagram_that_the_kernel_joined_is_told_apart() -> None:
    """Another implementation may send a burst whose last datagram is shorter."""
    data = frames(1, 1400 * 3 + 17)[0].tobytes()
    with UdpPort(("127.0.0.1", 0)) as receiver, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        cut = (socket.IPPROTO_UDP, 103, (1400).to_bytes(2, sys.byteorder))
        for _ in range(2):
            sender.sendmsg([data], [cut], 0, receiver.address)
        received = receiver.receive()
        assert [each.frames.shape for each in received] == [(3, 1400), (1, 17)] * 2
        assert b"".join(each.frames.tobytes() for each in received) == data * 2


def until_stamped(sender: UdpPort, receiver: UdpPort) -> None:
    """The kernel begins to note when datagrams come a while after it was first asked to; until then it tells
    when they are read."""
    deadline = time.monotonic() + 60
    while True:
        sender.send(frames(1, 1400), receiver.address)
        sent = time.monotonic()
        time.sleep(0.02)
        (received,) = take(receiver, 1)
        if received.arrived < sent + 0.01:
            return
        assert time.monotonic() < deadline, "the kernel does not note when datagrams come"


@linux_only
def test_what_came_is_told_with_when_it_came_and_not_when_it_was_read(ports: tuple[UdpPort, UdpPort]) -> None:
    sender, receiver = ports
    until_stamped(sender, receiver)
    before = time.monotonic()
    sender.send(frames(100, 1400), receiver.address)
    after = time.monotonic()
    time.sleep(0.1)
    (received,) = receiver.receive()
    assert before - 0.01 < received.arrived < after + 0.01


def test_where_no_time_is_told_it_is_that_of_reading(
    monkeypatch: pytest.MonkeyPatch, ports: tuple[UdpPort, UdpPort]
) -> None:
    sender, receiver = ports
    for told in (0.0, time.time() + 100, time.time() - 100):  # none, or the clock was set meanwhile
        monkeypatch.setattr(receiver, "_told", lambda _, when=told: (0, when))
        before = time.monotonic()
        sender.send(frames(1, 1400), receiver.address)
        (received,) = take(receiver, 1)
        assert before <= received.arrived <= time.monotonic()


@linux_only
@pytest.mark.parametrize("late", [1, 2], ids=["before the other clock", "after it"])
def test_a_thread_that_is_put_off_between_two_clocks_tells_no_wrong_time(
    late: int, monkeypatch: pytest.MonkeyPatch, ports: tuple[UdpPort, UdpPort]
) -> None:
    sender, receiver = ports

    class Late:
        """As the module `time`; some time goes by before its call number `late`."""

        calls = 0

        def _put_off(self) -> None:
            if self.calls == late:
                time.sleep(0.2)
            self.calls += 1

        def monotonic(self) -> float:
            self._put_off()
            return time.monotonic()

        def time(self) -> float:
            self._put_off()
            return time.time()

    until_stamped(sender, receiver)
    before = time.monotonic()
    sender.send(frames(100, 1400), receiver.address)
    after = time.monotonic()
    monkeypatch.setattr(udp, "time", Late())
    (received,) = receiver.receive()
    assert before - 0.01 < received.arrived < after + 0.01


def test_one_receive_has_a_bound(ports: tuple[UdpPort, UdpPort]) -> None:
    """What is to be sent gets its turn though more and more comes in."""
    sender, receiver = ports
    rows = 2 * udp.ARENA_BYTES // 1400
    sender.send(frames(rows, 1400), receiver.address)
    first = sum(len(each.frames) for each in receiver.receive())
    assert 0 < first * 1400 <= udp.ARENA_BYTES
    assert not receiver.drained
    assert sum(len(each.frames) for each in take(receiver, rows - first)) == rows - first
    assert receiver.receive() == []
    assert receiver.drained


@pytest.mark.parametrize("data", [b"", b"x"], ids=["empty", "of a byte"])
def test_one_receive_has_a_bound_though_the_datagrams_have_hardly_a_byte(
    data: bytes, ports: tuple[UdpPort, UdpPort]
) -> None:
    _, receiver = ports
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for _ in range(udp.MOST_CALLS + 40):
            stranger.sendto(data, receiver.address)
        stranger.sendto(b"last", receiver.address)
    receiver.receive()
    assert receiver.count.received_calls == udp.MOST_CALLS
    assert not receiver.drained
    assert receiver.receive()[-1].frames.tobytes() == b"last"
    assert receiver.count.received_calls == udp.MOST_CALLS + 41
    assert receiver.drained


def test_rows_that_do_not_lie_side_by_side_are_sent_all_the_same(ports: tuple[UdpPort, UdpPort]) -> None:
    sender, receiver = ports
    wide = frames(50, 1500)
    assert sender.send(wide[::2, :1400], receiver.address) == 25
    assert np.array_equal(joined(take(receiver, 25)), wide[::2, :1400])


def test_empty_datagrams_are_passed_over(ports: tuple[UdpPort, UdpPort]) -> None:
    _, receiver = ports
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"", receiver.address)
        stranger.sendto(b"x", receiver.address)
        assert joined(take(receiver, 1)).tobytes() == b"x"


def test_a_port_of_all_addresses_takes_both_kinds() -> None:
    with UdpPort(("::", 0)) as receiver:
        for host in HOSTS:
            with UdpPort((host, 0)) as sender:
                sender.send(frames(3, 100), (host, receiver.address[1]))
                (got,) = take(receiver, 3)
                assert np.array_equal(got.frames, frames(3, 100))
                assert receiver.send(got.frames, got.address) == 3  # and answers where it came from
                assert np.array_equal(joined(take(sender, 3)), frames(3, 100))


# -- what goes wrong ---------------------------------------------------------------------------------------


class Refusing:
    """A socket that refuses calls: `refuses` says by which error, given whether the call has a burst."""

    def __init__(self, port: UdpPort, refuses: Callable[[bool], int]) -> None:
        self._real, self._refuses = port._socket, refuses
        port._socket = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def sendmsg(self, *arguments: Any) -> int:
        self._check(True)
        return self._real.sendmsg(*arguments)

    def sendto(self, *arguments: Any) -> int:
        self._check(False)
        return self._real.sendto(*arguments)

    def _check(self, burst: bool) -> None:
        if number := self._refuses(burst):
            raise OSError(number, os.strerror(number))


@linux_only
@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.ENOPROTOOPT, errno.EOPNOTSUPP])
def test_where_offload_is_refused_each_datagram_goes_alone_and_it_says_so(
    number: int, ports: tuple[UdpPort, UdpPort]
) -> None:
    sender, receiver = ports
    Refusing(sender, lambda burst: number if burst else 0)
    assert sender.send(frames(100, 1400), receiver.address) == 100
    assert np.array_equal(joined(take(receiver, 100)), frames(100, 1400))
    assert not sender.offload.sends
    assert sender.offload.receives
    expected = f"sending in bursts to 127.0.0.1:{receiver.address[1]}: {os.strerror(number)}"
    assert sender.offload.reason == expected
    assert sender.count.sent_calls == 100


def test_a_system_without_offload_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udp, "_UDP_SEGMENT", 250)
    monkeypatch.setattr(udp, "_UDP_GRO", 251)
    with UdpPort(("127.0.0.1", 0)) as port:
        assert (port.offload.sends, port.offload.receives) == (False, False)
        lacking = os.strerror(errno.ENOPROTOOPT)
        assert port.offload.reason == f"no UDP_SEGMENT: {lacking}; no UDP_GRO: {lacking}"
    monkeypatch.setattr(udp, "_IS_LINUX", False)
    monkeypatch.setattr(sys, "platform", "plan9")
    with UdpPort(("127.0.0.1", 0)) as port, UdpPort(("127.0.0.1", 0)) as other:
        assert port.offload == udp.Offload(False, False, "plan9 has none")
        port.send(frames(10, 1400), other.address)
        assert np.array_equal(joined(take(other, 10)), frames(10, 1400))


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM])
def test_where_there_is_no_room_the_rest_is_left_to_the_caller(
    number: int, ports: tuple[UdpPort, UdpPort]
) -> None:
    sender, receiver = ports
    calls = iter([0, 0, number])
    Refusing(sender, lambda _: next(calls, 0))
    burst = frames(300, 1400)
    sent = sender.send(burst, receiver.address)
    assert sent == (2 * (65_000 // 1400) if sender.offload.sends else 2)
    assert sender.count.full == 1
    assert sender.send(burst[sent:], receiver.address) == 300 - sent
    assert np.array_equal(joined(take(receiver, 300)), burst)


def test_what_is_too_large_for_the_way_is_lost_and_named(ports: tuple[UdpPort, UdpPort]) -> None:
    sender, receiver = ports
    assert sender.send(frames(2, 65_508), receiver.address) == 2
    assert sender.count.too_large == 2
    assert sender.trouble == (
        f"datagrams of 65508 bytes are too large for the way to 127.0.0.1:{receiver.address[1]}, "
        "which takes 65507 at most"
    )
    assert sender.send(frames(2, 1400), receiver.address) == 2
    take(receiver, 2)


@linux_only
def test_a_burst_too_large_for_the_way_is_no_reason_to_give_offload_up(
    monkeypatch: pytest.MonkeyPatch, ports: tuple[UdpPort, UdpPort]
) -> None:
    """Before Linux 6.14 it is EINVAL that says so, as of a burst that cannot be cut at all."""
    sender, receiver = ports
    monkeypatch.setattr(udp, "_most_bytes", lambda *_: 1252)
    Refusing(sender, lambda burst: errno.EINVAL if burst else errno.EMSGSIZE)
    assert sender.send(frames(10, 1400), receiver.address) == 10
    assert sender.count.too_large == 10
    assert sender.offload.sends
    assert "which takes 1252 at most" in sender.trouble


@linux_only
def test_nobody_listens_there(ports: tuple[UdpPort, UdpPort]) -> None:
    """The network's word about an earlier datagram: a loss like any other, in sending and in receiving."""
    sender, friend = ports
    with UdpPort(("127.0.0.1", 0)) as gone:
        nowhere = gone.address
    sender._socket.connect(nowhere)  # then the kernel tells
    assert sender.send(frames(1, 100), nowhere) == 1
    assert sender.send(frames(3, 100), nowhere) == 3
    assert sender.count.refused == 1
    assert sender.trouble == f"127.0.0.1:{nowhere[1]}: Connection refused"
    sender.send(frames(1, 100), nowhere)
    assert sender.receive() == []
    assert sender.count.refused >= 2
    assert sender.send(frames(3, 100), friend.address) == 3
    take(friend, 3)


def test_an_error_of_our_own_making_is_raised(ports: tuple[UdpPort, UdpPort]) -> None:
    sender, receiver = ports
    Refusing(sender, lambda _: errno.EBADF)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        sender.send(frames(10, 1400), receiver.address)


@linux_only
def test_what_the_kernel_dropped_is_counted() -> None:
    with UdpPort(("127.0.0.1", 0), 2**16) as receiver, UdpPort(("127.0.0.1", 0), offload=False) as sender:
        sender.send(frames(1000, 1400), receiver.address)
        came = 0
        while received := receiver.receive():
            came += sum(len(each.frames) for each in received)
        assert 0 < came < 1000
        sender.send(frames(1, 1400), receiver.address)  # it carries the count
        take(receiver, 1)
        assert receiver.count.dropped == 1000 - came


def test_the_buffer_that_the_kernel_gave_is_said() -> None:
    with UdpPort(("127.0.0.1", 0)) as port:
        if os.geteuid() == 0 and sys.platform == "linux":
            assert port.receive_buffer == udp.BUFFER_BYTES
        assert port.receive_buffer > 0
    with UdpPort(("127.0.0.1", 0), 2**17) as port:
        assert port.receive_buffer == 2**17


@linux_only
def test_without_the_right_to_pass_the_bound_it_takes_what_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ordinary(socket.socket):
        def setsockopt(self, *arguments: Any) -> None:
            if arguments[1] in (udp._SO_RCVBUFFORCE, udp._SO_SNDBUFFORCE):
                raise PermissionError(errno.EPERM, "")
            super().setsockopt(*arguments)

    monkeypatch.setattr(udp.sockets, "socket", Ordinary)
    most = int(Path("/proc/sys/net/core/rmem_max").read_text(encoding="ascii"))
    with UdpPort(("127.0.0.1", 0), 2**30) as port:
        assert port.receive_buffer == most


def test_addresses_that_are_none() -> None:
    with UdpPort(("127.0.0.1", 0)) as port:
        number = port.address[1]
        with pytest.raises(UserError, match=f"another process has UDP port 127.0.0.1:{number} already"):
            UdpPort(("127.0.0.1", number))
    with pytest.raises(UserError, match=r"cannot open UDP port 192.0.2.1:0: no address of this machine"):
        UdpPort(("192.0.2.1", 0))
    for number in (-1, 65536):
        with pytest.raises(UserError, match=f"port {number} of 127.0.0.1: between 0 and 65535"):
            UdpPort(("127.0.0.1", number))


def test_a_host_of_which_no_name_server_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(udp.sockets, "getaddrinfo", unknown)
    with pytest.raises(UserError, match="no address of 'nowhere', port 1: .*Name or service not known"):
        UdpPort(("nowhere", 1))


@linux_only
def test_nothing_is_left_open() -> None:
    before = still_open()
    for _ in range(20):
        with UdpPort(("127.0.0.1", 0)) as port:
            port.send(frames(10, 1400), port.address)
        with pytest.raises(RunError, match="it is closed"):
            port.receive()
        port.close()
        with pytest.raises(UserError):
            UdpPort(("192.0.2.1", 0))
    assert not still_open() - before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_cannot_use_its_parents_port(ports: tuple[UdpPort, UdpPort]) -> None:
    sender, receiver = ports
    child = os.fork()
    if child == 0:
        status = 1
        try:
            sender.send(frames(1, 10), receiver.address)
        except RunError as error:
            status = 0 if "a forked process cannot use its parent's" in str(error) else 2
        finally:
            os._exit(status)
    until, ended = time.monotonic() + SOON, (0, 1)
    while ended[0] == 0:
        assert time.monotonic() < until
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.005)
    assert ended == (child, 0)
    assert sender.send(frames(1, 10), receiver.address) == 1
    take(receiver, 1)


# -- between two processes ---------------------------------------------------------------------------------


def _echo(pipe: Connection) -> None:
    """Sends back whatever comes, until it is told to end."""
    with UdpPort(("127.0.0.1", 0)) as port:
        pipe.send(port.address)
        while not pipe.poll(0):
            if wait(port, select.POLLIN, time.monotonic() + 0.05):
                for each in port.receive():
                    _send_all(port, each.frames, each.address)


def _send_all(port: UdpPort, burst: Bytes, address: Address) -> None:
    until = time.monotonic() + SOON
    while len(burst := burst[port.send(burst, address) :]):
        assert wait(port, select.POLLOUT, until)


def test_two_processes_exchange_20_megabytes() -> None:
    """In bursts of 100 datagrams, each sent when the last one is back: nothing is lost."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_echo, args=(there,), daemon=True)
    process.start()
    try:
        assert here.poll(SOON)
        address = here.recv()
        with UdpPort(("127.0.0.1", 0)) as port:
            for number in range(143):
                burst = frames(100, 1400, number)
                _send_all(port, burst, address)
                assert np.array_equal(joined(take(port, 100)), burst)
        here.send("end")
        process.join(SOON)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join(SOON)


@linux_only
@pytest.mark.parametrize("count", [0, 1, 3, 200])
def test_the_kernel_takes_only_what_it_is_told_to(host: str, count: int) -> None:
    words = [(1000 + each).to_bytes(4, "little") for each in range(count)]
    with UdpPort((host, 0)) as port, socket.socket(port.family, socket.SOCK_DGRAM) as sender:
        assert port.take_only(only_sessions(1, 17, 4, words))
        for bad in (
            b"",
            b"\1",
            b"\1\0\0\0" + bytes(4),
            b"\2\0\0\0" + (1000).to_bytes(4, "little") + bytes(20),
        ):
            sender.sendto(bad, port.address)
        sender.sendto(b"\1\0\0\0" + (999).to_bytes(4, "little") + bytes(2000), port.address)
        good = [b"\1\0\0\0" + word + bytes(9 + each) for each, word in enumerate(words)]
        for each in good:
            sender.sendto(each, port.address)
        if good:
            assert [bytes(row) for got in take(port, count) for row in got.frames] == good
        assert port.receive() == []
        assert port.take_only(only_sessions(1, 4, 0, [b"\1\0\0\0"]))  # in place of what was asked for before
        sender.sendto(b"\1\0\0\0", port.address)
        take(port, 1)


@linux_only
def test_more_words_than_a_filter_holds_are_refused() -> None:
    with UdpPort(("127.0.0.1", 0)) as port:
        words = [each.to_bytes(4, "big") for each in range(MOST_STEPS // 2)]
        assert not port.take_only(only_sessions(1, 17, 4, words))


@linux_only
def test_the_kernel_takes_a_known_session_only_from_its_address(host: str) -> None:
    word = b"\7\0\0\0"
    with (
        UdpPort((host, 0)) as port,
        socket.socket(port.family, socket.SOCK_DGRAM) as friend,
        socket.socket(port.family, socket.SOCK_DGRAM) as other,
    ):
        for sender in (friend, other):
            sender.bind((host, 0))
        sources = [("127.0.0.9", 7), ("::9", 7), friend.getsockname()[:2]]
        assert port.take_only(only_sessions(1, 17, 4, [b"\6\0\0\0"], [b"\5\0\0\0", word], sources))
        datagram = b"\1\0\0\0" + word + bytes(20)
        for _ in range(10 * SAMPLE):
            other.sendto(datagram, port.address)
        let_in = sum(len(got.frames) for got in port.receive())
        assert 0 < let_in < 5 * SAMPLE  # one in SAMPLE: 10 of 640
        for _ in range(50):
            friend.sendto(datagram, port.address)
        take(port, 50)
        other.sendto(b"\1\0\0\0" + b"\6\0\0\0" + bytes(20), port.address)  # a session that nobody has
        take(port, 1)
