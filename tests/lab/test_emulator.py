"""The emulator alive: real sockets of two sites, whose packets go through it over TUN devices.

How fast and how exact it is, is benchmarks/lab.py's to say, and that of the tests marked `exact`, for a quiet
machine; for the others, limits are wide enough for a busy one.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.lab.emulator import LinkCounters, available
from atoll.lab.namespaces import find_way
from support.sites import Sites, pair, phase

INSIDE = "ATOLL_TEST_INSIDE"  # set where an ordinary user's tests run, in a user namespace
DEADLINE = 60.0
PORT = 5000
SO_RCVBUFFORCE, SOL_UDP, UDP_SEGMENT = 33, 17, 103


def impossible() -> str:
    """Why there can be no sites here, or nothing."""
    try:
        find_way()
    except UserError as error:
        return str(error)
    return available()


WHY_NOT = impossible()
ORDINARY = os.geteuid() != 0
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "possible")
exact = pytest.mark.soak  # to a millisecond or a few per cent: for a machine with nothing else to do
needs_root = pytest.mark.skipif(ORDINARY, reason="runs within test_all_this_works_for_an_ordinary_user")


# -- what the tests do -------------------------------------------------------------------------------------


def echo(sites: Sites, count: int, gap: float = 0.0, size: int = 100) -> list[float]:
    """Seconds that each datagram took from site a to b and back; those that are lost are left out."""
    here, there = (sites.socket(site, socket.SOCK_DGRAM, PORT) for site in (0, 1))
    with here, there:
        there.settimeout(DEADLINE)
        here.settimeout(1.0)
        took = []
        for number in range(count):
            here.sendto(struct.pack("=qd", number, time.perf_counter()).ljust(size), (sites.address(1), PORT))
            data, back = there.recvfrom(2048)
            there.sendto(data, back)
            sent = struct.unpack_from("=qd", here.recv(2048))[1]
            took.append(time.perf_counter() - sent)
            time.sleep(gap)
    return took


def transfer(sites: Sites, data: bytes, congestion: str = "cubic") -> tuple[bytes, float]:
    """Send `data` over TCP from site a to b: what arrived, and the bytes per second of its later half."""
    arrived, times = bytearray(), []

    def receive() -> None:
        connection = listener.accept()[0]
        connection.settimeout(DEADLINE)
        with connection:
            while got := connection.recv(1 << 18):
                arrived.extend(got)
                times.append((time.perf_counter(), len(arrived)))

    listener = sites.socket(1, socket.SOCK_STREAM, PORT)
    with listener, sites.socket(0, socket.SOCK_STREAM) as sender, ThreadPoolExecutor(1) as threads:
        listener.settimeout(DEADLINE)
        listener.listen()
        received = threads.submit(receive)
        sender.settimeout(DEADLINE)
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        sender.connect((sites.address(1), PORT))
        sender.sendall(data)
        sender.shutdown(socket.SHUT_WR)
        received.result(DEADLINE)
    # A line through them: what waited for a packet that had to be sent again comes all at once.
    later = [(at, count) for at, count in times if count >= len(data) // 2]
    slope = statistics.linear_regression(*zip(*later, strict=True)).slope
    return bytes(arrived), slope


def waiting(receiver: socket.socket) -> list[bytes]:
    """The datagrams that have arrived."""
    found = []
    while True:
        try:
            found.append(receiver.recv(2048, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return found


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE:g} s: {what}"
        time.sleep(0.002)


def settled(sites: Sites) -> list[LinkCounters]:
    """The counters, once nothing is on its way."""

    def all_gone() -> bool:
        return all(
            link.delivered_packets + link.dropped + link.lost_queue_packets + link.lost_loss_packets
            + link.lost_outage_packets == link.offered_packets + link.duplicated
            for link in sites.emulator.counters()
        )  # fmt: skip

    until(all_gone, "all packets delivered or lost")
    return sites.emulator.counters()


# -- delay, rate -------------------------------------------------------------------------------------------


@exact
@needs_root
@pytest.mark.parametrize("delay", [0.0, 0.005, 0.05])
def test_a_datagram_takes_the_delay(delay: float) -> None:
    with Sites(pair([phase(1e9, delay=delay)])) as sites:
        took = echo(sites, 20)
    assert min(took) >= 2 * delay
    assert statistics.median(took) < 2 * delay + 0.001


@exact
@needs_root
def test_each_way_has_its_own_delay() -> None:
    topology = pair([phase(1e9, delay=0.04)], [phase(1e9, delay=0.01)])
    with Sites(topology) as sites:
        assert statistics.median(echo(sites, 10)) == pytest.approx(0.05, abs=0.001)


@exact
@needs_root
@pytest.mark.parametrize("rate", [10e6, 100e6])
def test_tcp_gets_the_rate(rate: float) -> None:
    data = os.urandom(round(rate / 8 * 2))
    with Sites(pair([phase(rate, delay=0.005, queue=round(rate / 8 * 0.05))])) as sites:
        arrived, speed = transfer(sites, data)
        forward = settled(sites)[0]
    assert arrived == data
    # 1448 of 1500 bytes are data: TCP with timestamps.
    assert speed == pytest.approx(rate / 8 * 1448 / 1500, rel=0.02)
    assert forward.busy_seconds == pytest.approx(forward.offered_bytes / (rate / 8), rel=0.05)


@needs_root
def test_udp_gets_the_rate_and_the_queue_drops_the_rest() -> None:
    count, size, rate = 4000, 1000, 10e6
    with Sites(pair([phase(rate, queue=20_000)])) as sites:
        here, there = (sites.socket(site, socket.SOCK_DGRAM, PORT) for site in (0, 1))
        with here, there:
            there.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 2**24)
            begun = time.perf_counter()
            for _ in range(count):
                here.sendto(bytes(size), (sites.address(1), PORT))
            spent = time.perf_counter() - begun
            forward = settled(sites)[0]
    assert forward.offered_packets == count
    assert forward.offered_bytes == count * (size + 28)
    most = (20_000 + spent * rate / 8) / (size + 28) + 2
    assert 19 <= forward.delivered_packets <= most
    assert forward.lost_queue_packets == count - forward.delivered_packets
    assert forward.max_queue_delay <= 20_000 / (rate / 8)


# -- what the stream must survive --------------------------------------------------------------------------

FAULTS = {
    "nothing": {},
    "loss": {"loss": 0.01, "burst": 3.0},
    "reordering": {"reorder": 0.05, "reorder_by": 0.003},
    "duplication": {"duplicate": 0.05},
    "damage": {"corrupt": 0.01},
    "all": {
        "loss": 0.01, "burst": 3.0, "reorder": 0.02, "duplicate": 0.02, "corrupt": 0.01, "jitter": 0.001,
        "distribution": "pareto",
    },
}  # fmt: skip


@needs_root
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_stream_survives(fault: str) -> None:
    """TCP with segmentation offload on both ends: super-packets are cut, thinned, and put together again."""
    data = os.urandom(20_000_000)
    with Sites(pair([phase(400e6, delay=0.002, **FAULTS[fault])])) as sites:
        arrived, _ = transfer(sites, data, congestion="bbr" if "bbr" in congestions() else "cubic")
        forward, back = settled(sites)
        total = sites.emulator.totals()
    assert hashlib.sha256(arrived).digest() == hashlib.sha256(data).digest()
    assert (total.malformed, total.unrouted, total.dropped) == (0, 0, 0)
    assert total.reads < 0.9 * (forward.offered_packets + back.offered_packets)  # super-packets came in
    for count, name in (
        (forward.lost_loss_packets, "loss"),
        (forward.reordered, "reorder"),
        (forward.duplicated, "duplicate"),
        (forward.corrupted, "corrupt"),
    ):
        asked, burst = FAULTS[fault].get(name, 0.0), FAULTS[fault].get("burst", 1.0)
        # Losses come in bursts: of packets back to back, 2 * burst - 1 count as one draw.
        draws = forward.offered_packets / (2 * burst - 1 if name == "loss" else 1)
        spread = math.sqrt(asked * (1 - asked) / draws)
        assert count / forward.offered_packets == pytest.approx(asked, abs=4.5 * spread), name


def congestions() -> str:
    return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii")


@needs_root
def test_a_super_packet_arrives_with_fewer_writes_than_packets() -> None:
    with Sites(pair([phase(10e9, queue=2**24)])) as sites:
        transfer(sites, os.urandom(50_000_000))
        forward, total = settled(sites)[0], sites.emulator.totals()
    assert forward.offered_packets >= 50_000_000 / 1448
    assert total.writes < total.packets / 2


@needs_root
@pytest.mark.parametrize("grouped", [True, False])
def test_datagrams_of_a_super_packet_are_lost_one_by_one(grouped: bool) -> None:
    """UDP segmentation offload: a drop takes a datagram, and the others arrive whole and in order."""
    count, size, each = 200, 1000, 40
    with Sites(pair([phase(1e9, delay=0.001, loss=0.1)])) as sites:
        here, there = (sites.socket(site, socket.SOCK_DGRAM, PORT) for site in (0, 1))
        with here, there:
            there.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 2**26)
            if grouped:
                here.setsockopt(SOL_UDP, UDP_SEGMENT, size)
            sent = [number.to_bytes(4, "big") + os.urandom(size - 4) for number in range(count * each)]
            for start in range(0, len(sent), each):
                batch = sent[start : start + each]
                for data in [b"".join(batch)] if grouped else batch:
                    here.sendto(data, (sites.address(1), PORT))
                offered = start + each
                until(lambda offered=offered: sites.emulator.counters()[0].offered_packets >= offered, "sent")  # type: ignore[misc]
            forward = settled(sites)[0]
            got = waiting(there)
        total = sites.emulator.totals()
    assert got == [sent[int.from_bytes(data[:4], "big")] for data in got]
    numbers = [int.from_bytes(data[:4], "big") for data in got]
    assert numbers == sorted(set(numbers))
    assert len(got) == count * each - forward.lost_loss_packets
    assert 0.08 < forward.lost_loss_packets / (count * each) < 0.12
    runs = sum(1 for before, after in pairwise(numbers) if after - before > each)
    assert runs == 0  # never a whole super-packet
    assert (total.reads < count * each / 10) == grouped


@needs_root
def test_damaged_datagrams_do_not_arrive_and_copies_do() -> None:
    count = 2000
    with Sites(pair([phase(1e9, duplicate=0.1, corrupt=0.1)])) as sites:
        here, there = (sites.socket(site, socket.SOCK_DGRAM, PORT) for site in (0, 1))
        with here, there:
            there.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 2**24)
            sent = [os.urandom(500) for _ in range(count)]
            for number, data in enumerate(sent, start=1):
                here.sendto(data, (sites.address(1), PORT))
                until(lambda n=number: sites.emulator.counters()[0].offered_packets >= n, "sent")  # type: ignore[misc]
            forward = settled(sites)[0]
            got = waiting(there)
    assert set(got) <= set(sent)
    assert len(set(got)) == count - forward.corrupted
    assert 0.07 * count < forward.corrupted < 0.13 * count
    assert 0.07 * count < forward.duplicated < 0.13 * count
    assert forward.delivered_packets == count + forward.duplicated


@needs_root
def test_what_is_no_tcp_or_udp_arrives_as_it_is() -> None:
    """An echo request of ping, and a datagram so large that it travels as fragments."""
    with Sites(pair([phase(1e9, delay=0.001)])) as sites:
        here, there = (sites.socket(site, socket.SOCK_DGRAM, PORT) for site in (0, 1))
        with here, there:
            there.settimeout(DEADLINE)
            large = os.urandom(9000)
            here.sendto(large, (sites.address(1), PORT))
            assert there.recv(10_000) == large
        raw = sites.inside(0, lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
        with raw:
            raw.settimeout(DEADLINE)
            body = struct.pack("!HH", 7, 1) + b"is there anybody"
            words = struct.unpack("!12H", struct.pack("!HH", 0x0800, 0) + body)
            checksum = 0xFFFF - sum(words) % 0xFFFF
            raw.sendto(struct.pack("!HH", 0x0800, checksum) + body, (sites.address(1), 0))
            answer = raw.recv(2048)
            assert answer[20] == 0  # an echo reply
            assert answer[24:] == body
        forward, total = settled(sites)[0], sites.emulator.totals()
    assert forward.offered_packets == 7 + 1
    assert (total.malformed, total.unrouted) == (0, 0)


# -- outages, routes, ends ---------------------------------------------------------------------------------


@exact
@needs_root
def test_an_outage_begins_and_ends_on_time() -> None:
    """Datagrams each millisecond, from the emulator's start on, from which phases count."""
    whole = phase(100e6, delay=0.01)
    phases = [whole, replace(whole, at=1.0, down=True), replace(whole, at=1.5)]
    with Sites(pair(phases)) as sites:
        until(lambda: sites.emulator.totals().started > 0, "the emulator's start")
        begun = sites.emulator.totals().started
        here, there = (sites.socket(site, socket.SOCK_DGRAM, PORT) for site in (0, 1))
        sent: list[float] = []
        arrived: set[int] = set()
        with here, there:
            while not sent or sent[-1] < 2.0:
                sent.append(time.monotonic() - begun)
                here.sendto(struct.pack("=q", len(sent) - 1), (sites.address(1), PORT))
                time.sleep(0.001)
                arrived.update(struct.unpack("=q", data)[0] for data in waiting(there))
            forward = settled(sites)[0]
            arrived.update(struct.unpack("=q", data)[0] for data in waiting(there))
    fates = [(at, number in arrived) for number, at in enumerate(sent)]
    before = {came for at, came in fates if at < 0.98}
    within = {came for at, came in fates if 1.02 < at < 1.48}
    after = {came for at, came in fates if at > 1.52}
    assert (before, within, after) == ({True}, {False}, {True})
    assert forward.lost_outage_packets == len(sent) - len(arrived)


@needs_root
def test_only_linked_sites_reach_each_other() -> None:
    both = pair([phase(1e9)])
    with Sites(replace(both, links=both.links[:1])) as sites:
        there = sites.socket(1, socket.SOCK_DGRAM, PORT)
        with there, sites.socket(0, socket.SOCK_DGRAM, PORT) as here:
            there.settimeout(DEADLINE)
            here.sendto(b"there", (sites.address(1), PORT))
            assert there.recv(100) == b"there"
            there.sendto(b"back", (sites.address(0), PORT))
            there.sendto(b"nowhere", ("10.77.9.9", PORT))
            until(lambda: sites.emulator.totals().unrouted == 2, "both counted")
            here.setblocking(False)
            with pytest.raises(BlockingIOError):
                here.recv(100)


@needs_root
def test_an_emulator_that_cannot_write_says_so() -> None:
    """A site whose device is gone down takes nothing: the emulator counts what it lost, and goes on."""
    with Sites(pair([phase(1e9)])) as sites:
        sites.inside(1, lambda: subprocess.run(["ip", "link", "set", "wan0", "down"], check=True))
        with sites.socket(0, socket.SOCK_DGRAM, PORT) as here:
            here.sendto(b"x", (sites.address(1), PORT))
            until(lambda: sites.emulator.totals().dropped == 1, "the packet counted")
            until(lambda: sites.emulator.totals().behind_seconds == 1, "the second counted")
        assert not sites.emulator.totals().kept_up
        assert sites.emulator.counters()[0].dropped == 1


@needs_root
def test_it_ends_when_it_is_told_to() -> None:
    sites = Sites(pair([phase(1e9)]))
    with sites:
        echo(sites, 3)
        begun = time.monotonic()
        sites.stop()
        assert time.monotonic() - begun < 1
        total = sites.emulator.totals()
        assert total.packets == 6
        assert total.late_packets <= total.packets
        assert 0 < total.lateness_mean <= total.lateness_worst
        assert total.lateness_p99 <= total.lateness_worst * 1.2
        assert 0 < total.cpu_seconds < total.seconds
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.skipif(bool(os.environ.get(INSIDE)), reason="runs already in a user namespace")
def test_all_this_works_for_an_ordinary_user() -> None:
    """The tests above again, in a user namespace, where root here is nobody outside."""
    command = find_way()
    if "--user" not in command:
        command += ["--user", "--map-root-user"]
    chosen = ["-k", "survives or takes_the_delay or outage"] if not ORDINARY else []
    done = subprocess.run(
        [*command, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, *chosen],
        env={**os.environ, INSIDE: "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
