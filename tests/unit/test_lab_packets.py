"""How the emulator cuts super-packets, damages packets, and bears what is malformed.

In place of TUN devices it is given sockets, which carry the same bytes: a virtio header and an IP packet. So
no privilege is needed, and every byte that comes out can be compared.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from types import TracebackType

import pytest

from atoll.lab.emulator import Emulator, available, fates
from atoll.lab.topology import LabLink, Phase, Site, Topology

pytestmark = pytest.mark.skipif(bool(available()), reason=available() or "built")

DEADLINE = 20.0
VNET = struct.Struct("=BBHHHH")  # flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
TCPV4, TCPV6, UDP_L4, ECN = 1, 4, 5, 0x80
FIN, PSH, ACK, CWR = 0x01, 0x08, 0x10, 0x80
TCP, UDP = 6, 17
PLAIN = Phase(
    at=0.0, rate=125e6, delay=0.0, jitter=0.0, distribution="normal", queue=2**20, loss=0.0, burst=1.0,
    reorder=0.0, reorder_by=0.0, duplicate=0.0, corrupt=0.0, down=False,
)  # fmt: skip
TWICE = replace(PLAIN, duplicate=1.0)  # what has copies is written by itself

V4, V6 = ("10.77.1.1", "10.77.2.1"), ("fd77::1", "fd77::2")


# -- packets, made and read without the emulator's help ----------------------------------------------------


def ones(data: bytes) -> int:
    """The ones' complement sum of RFC 1071."""
    total = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def pseudo(ends: Sequence[str], protocol: int, length: int) -> int:
    return ones(b"".join(ip_address(end).packed for end in ends) + struct.pack("!II", protocol, length))


def packet(
    ends: Sequence[str], protocol: int, payload: bytes, flags: int = ACK, options: bytes = b""
) -> bytes:
    """A packet as the kernel gives it to a device that completes checksums."""
    if protocol == TCP:
        head = struct.pack("!HHIIBBHHH", 1000, 2000, 77, 88, (5 + len(options) // 4) << 4, flags, 500, 0, 0)
        head, place = head + options, 16
    else:
        head, place = struct.pack("!HHHH", 1000, 2000, 8 + len(payload), 0), 6
    length = len(head) + len(payload)
    head = head[:place] + struct.pack("!H", pseudo(ends, protocol, length)) + head[place + 2 :]
    source, target = (ip_address(end).packed for end in ends)
    if len(source) == 16:
        return struct.pack("!IHBB", 0x60000000, length, protocol, 64) + source + target + head + payload
    ip = struct.pack("!BBHHHBBH", 0x45, 2, 20 + length, 500, 0x4000, 64, protocol, 0) + source + target
    return ip[:10] + struct.pack("!H", 0xFFFF ^ ones(ip)) + ip[12:] + head + payload


def header(ends: Sequence[str], protocol: int, size: int = 0, options: int = 0, ecn: int = 0) -> bytes:
    """The virtio header in front of `packet`; `size` is that of a segment, or 0."""
    ip = 20 if "." in ends[0] else 40
    kind = 0 if not size else UDP_L4 if protocol == UDP else (TCPV4 if ip == 20 else TCPV6) | ecn
    whole = ip + (8 if protocol == UDP else 20 + options)
    return VNET.pack(1, kind, whole if size else 0, size, ip, 6 if protocol == UDP else 16)


@dataclass(frozen=True)
class Read:
    """A packet that came out, taken apart, its checksum completed as the receiving kernel would."""

    gso: int
    size: int
    identification: int
    sequence: int
    flags: int
    payload: bytes
    good: bool  # the checksums, of IP as well


def read(data: bytes) -> Read:
    flags, gso, _, size, start, offset = VNET.unpack_from(data)
    data = data[VNET.size :]
    six = data[0] >> 4 == 6
    ip, stated = (
        (40, 40 + int.from_bytes(data[4:6], "big")) if six else (20, int.from_bytes(data[2:4], "big"))
    )
    assert stated == len(data)
    ends = [
        str(ip_address(end)) for end in ((data[8:24], data[24:40]) if six else (data[12:16], data[16:20]))
    ]
    protocol = data[6] if six else data[9]
    good = six or ones(data[:20]) == 0xFFFF
    if flags & 1:
        assert (start, offset) == (ip, 6 if protocol == UDP else 16)
        stored = int.from_bytes(data[start + offset : start + offset + 2], "big")
        good &= stored == pseudo(ends, protocol, len(data) - ip)
    else:
        good &= ones(struct.pack("!H", pseudo(ends, protocol, len(data) - ip)) + data[ip:]) == 0xFFFF
    identification = 0 if six else int.from_bytes(data[4:6], "big")
    if protocol == UDP:
        assert int.from_bytes(data[ip + 4 : ip + 6], "big") == len(data) - ip
        return Read(gso, size, identification, 0, 0, data[ip + 8 :], good)
    sequence, _, length, tcp_flags = struct.unpack_from("!IIBB", data, ip + 4)
    return Read(gso, size, identification, sequence, tcp_flags, data[ip + length // 16 * 4 :], good)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Rig:
    """An emulator of two sites and one link, while entered."""

    def __init__(self, *phases: Phase, ends: Sequence[str] = V4) -> None:
        sites = tuple(
            Site(name, i, 1, (1.0,), end) for i, (name, end) in enumerate(zip("ab", ends, strict=True), 1)
        )
        self.topology = Topology(3, sites, (LabLink(0, 1, phases),))

    def __enter__(self) -> Rig:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        self.ours, self.theirs = zip(*pairs, strict=True)
        for end in self.theirs:
            end.setblocking(False)
        self.ours[1].settimeout(DEADLINE)
        self.emulator = Emulator(self.topology, [end.fileno() for end in self.theirs])
        stop, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(stop,))
        self._thread.start()
        until(lambda: self.emulator.totals().started > 0)
        return self

    def _run(self, stop: int) -> None:
        self.emulator.run(stop)
        os.close(stop)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._stop)
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        for end in (*self.ours, *self.theirs):
            end.close()

    def send(self, data: bytes) -> None:
        self.ours[0].send(data)

    def receive(self, count: int) -> list[Read]:
        return [read(self.ours[1].recv(70_000)) for _ in range(count)]


# -- cutting and joining -----------------------------------------------------------------------------------

SEGMENT = 1000


@pytest.mark.parametrize("ends", [V4, V6], ids=["v4", "v6"])
@pytest.mark.parametrize("options", [0, 12])
def test_a_tcp_super_packet_is_cut_as_the_wire_would(ends: Sequence[str], options: int) -> None:
    payload = os.urandom(SEGMENT * 4 + 100)
    made = packet(ends, TCP, payload, ACK | PSH | FIN | CWR, b"\1" * options)
    with Rig(TWICE, ends=ends) as rig:
        rig.send(header(ends, TCP, SEGMENT, options, ECN) + made)
        got = rig.receive(10)[::2]
        counted = rig.emulator.counters()[0]
    assert all(one.good and one.gso == 0 for one in got)
    assert b"".join(one.payload for one in got) == payload
    assert [len(one.payload) for one in got] == [SEGMENT] * 4 + [100]
    assert [one.sequence for one in got] == [77 + SEGMENT * i for i in range(5)]
    assert [one.flags for one in got] == [ACK | CWR, ACK, ACK, ACK, ACK | PSH | FIN]
    assert [one.identification for one in got] == ([500 + i for i in range(5)] if ends is V4 else [0] * 5)
    assert (counted.offered_packets, counted.duplicated) == (5, 5)
    assert counted.offered_bytes == len(payload) + 5 * (len(made) - len(payload))


@pytest.mark.parametrize("ends", [V4, V6], ids=["v4", "v6"])
def test_a_udp_super_packet_is_cut_as_the_wire_would(ends: Sequence[str]) -> None:
    payload = os.urandom(SEGMENT * 3 + 1)
    with Rig(TWICE, ends=ends) as rig:
        rig.send(header(ends, UDP, SEGMENT) + packet(ends, UDP, payload))
        got = rig.receive(8)[::2]
    assert all(one.good and one.gso == 0 for one in got)
    assert [one.payload for one in got] == [payload[i : i + SEGMENT] for i in range(0, len(payload), SEGMENT)]


@pytest.mark.parametrize(("ends", "kind"), [(V4, TCPV4), (V6, TCPV6)], ids=["v4", "v6"])
def test_what_survives_goes_together_again(ends: Sequence[str], kind: int) -> None:
    """All are due within microseconds; each run between two losses comes as one packet, or nearly so."""
    payload, many = os.urandom(SEGMENT * 40), replace(PLAIN, rate=12.5e9, delay=0.05, loss=0.3, burst=4.0)
    with Rig(many, ends=ends) as rig:
        rig.send(header(ends, TCP, SEGMENT, 0, ECN) + packet(ends, TCP, payload, ACK | PSH | CWR))
        asked = fates(rig.topology.links[0], 3, 0, [(0.0, SEGMENT + 40)] * 40)
        kept = [i for i, fate in enumerate(asked) if not fate.lost_by]
        got: list[Read] = []
        while sum(len(one.payload) for one in got) < len(kept) * SEGMENT:
            got += rig.receive(1)
    runs = sum(1 for i in kept if i - 1 not in kept)
    assert 3 < runs < len(kept) < 40
    assert runs <= len(got) <= runs + 2
    assert all(one.good for one in got)
    for one in got:
        at = one.sequence - 77
        assert one.payload == payload[at : at + len(one.payload)]
        assert set(range(at // SEGMENT, (at + len(one.payload)) // SEGMENT)) <= set(kept)
        assert bool(one.flags & CWR) == (at == 0)
        assert bool(one.flags & PSH) == (at + len(one.payload) == len(payload))
        if len(one.payload) > SEGMENT:
            assert (one.gso, one.size) == (kind | ECN * (at == 0), SEGMENT)
    assert any(one.gso for one in got)


def test_datagrams_of_one_flow_that_are_due_together_go_together() -> None:
    got: list[Read] = []
    for _ in range(20):  # beside other work each may be sent when the one before has gone
        if any(one.gso for one in got):
            break
        got = _datagrams_of_one_flow()
    assert any(one.gso == UDP_L4 and one.size == SEGMENT for one in got)


def _datagrams_of_one_flow() -> list[Read]:
    with Rig(replace(PLAIN, rate=12.5e9, delay=0.05)) as rig:
        sent = [os.urandom(SEGMENT) for _ in range(20)]
        for data in sent:
            rig.send(header(V4, UDP) + packet(V4, UDP, data))
        got: list[Read] = []
        while sum(len(one.payload) for one in got) < 20 * SEGMENT:
            got += rig.receive(1)
    assert b"".join(one.payload for one in got) == b"".join(sent)
    assert all(one.good for one in got)
    return got


def test_a_damaged_packet_fails_its_checksum_by_one_bit() -> None:
    payload = os.urandom(SEGMENT * 30)
    for protocol in (TCP, UDP):
        with Rig(replace(PLAIN, corrupt=1.0)) as rig:
            rig.send(header(V4, protocol, SEGMENT) + packet(V4, protocol, payload))
            got = rig.receive(30)
        assert not any(one.good for one in got)
        whole = b"".join(one.payload for one in got)
        flipped = [bin(a ^ b).count("1") for a, b in zip(whole, payload, strict=True)]
        assert [sum(flipped[i : i + SEGMENT]) for i in range(0, len(flipped), SEGMENT)] == [1] * 30


def test_copies_are_whole_packets() -> None:
    payload = os.urandom(SEGMENT * 5)
    with Rig(replace(PLAIN, duplicate=1.0)) as rig:
        rig.send(header(V4, TCP, SEGMENT) + packet(V4, TCP, payload))
        got = rig.receive(10)
    assert all(one.good and one.gso == 0 for one in got)
    assert [one.sequence for one in got] == [77 + SEGMENT * (i // 2) for i in range(10)]


def test_overtaking_packets_come_first() -> None:
    slow = replace(PLAIN, delay=0.5)
    with Rig(slow, replace(slow, at=0.3, reorder=1.0, reorder_by=0.4)) as rig:
        rig.send(header(V4, TCP) + packet(V4, TCP, b"first"))
        until(lambda: rig.emulator.counters()[0].offered_packets == 1)
        until(lambda: time.monotonic() > rig.emulator.totals().started + 0.3)
        rig.send(header(V4, TCP) + packet(V4, TCP, b"second"))
        assert [one.payload for one in rig.receive(2)] == [b"second", b"first"]
        assert rig.emulator.counters()[0].reordered == 1


# -- what is malformed -------------------------------------------------------------------------------------

GOOD = header(V4, TCP, SEGMENT) + packet(V4, TCP, bytes(SEGMENT * 3))


def changed(at: int, *values: int) -> bytes:
    return GOOD[:at] + bytes(values) + GOOD[at + len(values) :]


MALFORMED = {
    "nothing": b"",
    "half a virtio header": GOOD[:5],
    "no packet": GOOD[:10],
    "half an IP header": GOOD[:20],
    "IP version 5": changed(10, 0x55),
    "an IP header that is too short": changed(10, 0x44),
    "an IP header beyond the end": changed(10, 0x4F)[: 10 + 40],
    "a length beyond the end": GOOD[:-1],
    "a length within the header": changed(12, 0, 19),
    "TCP beyond the end": changed(10 + 20 + 12, 0xF0)[: 10 + 2] + b"\0\x28" + changed(42, 0xF0)[14:50],
    "a TCP header that is too short": changed(10 + 20 + 12, 0x40),
    "a checksum before TCP": changed(6, 4, 0),
    "a checksum beyond the end": changed(6, 0xFF, 0xFF),
    "a checksum elsewhere": changed(8, 4, 0),
    "segments of nothing": changed(4, 0, 0),
    "segments without a checksum": changed(0, 0),
    "UDP's segments of TCP": changed(1, UDP_L4),
    "IPv6's segments of IPv4": changed(1, TCPV6),
    "an unknown kind of segments": changed(1, 3),
    "segments of a byte": changed(4, 1, 0),
    "segments of a fragment": changed(10 + 6, 0x20, 0),
}


@pytest.mark.parametrize("what", list(MALFORMED))
def test_what_is_malformed_is_counted_and_nothing_else(what: str) -> None:
    with Rig(PLAIN) as rig:
        if MALFORMED[what]:
            rig.send(MALFORMED[what])
        else:
            rig.ours[0].sendmsg([b""])
        rig.send(GOOD)
        assert b"".join(one.payload for one in rig.receive(1))
        total = rig.emulator.totals()
    assert total.malformed == 1
    assert rig.emulator.counters()[0].offered_packets == 3


def test_random_bytes_do_no_harm() -> None:
    """Good packets with random bytes in them, and random lengths; the emulator goes on."""
    generator = random.Random(11)
    starts = [
        header(ends, protocol, size) + packet(ends, protocol, bytes(SEGMENT * 3))
        for ends in (V4, V6)
        for protocol in (TCP, UDP)
        for size in (0, SEGMENT)
    ]
    faults = replace(PLAIN, rate=12.5e9, loss=0.2, duplicate=0.2, corrupt=0.2, reorder=0.2, reorder_by=1e-5)
    drained = threading.Event()
    with Rig(faults) as rig:

        def drain() -> None:
            while not drained.is_set():
                try:
                    rig.ours[1].recv(70_000)
                except TimeoutError:
                    return

        rig.ours[1].settimeout(1.0)
        reader = threading.Thread(target=drain)
        reader.start()
        for _ in range(20_000):
            data = bytearray(generator.choice(starts))
            for _ in range(generator.randrange(4)):
                data[generator.randrange(90)] = generator.choice((0, 1, 0xFF, generator.randrange(256)))
            rig.send(
                bytes(data[: generator.choice((len(data), generator.randrange(len(data) + 1)))]) or b"\0"
            )
        drained.set()
        reader.join()
        until(lambda: rig.emulator.totals().reads == 20_000)
        total = rig.emulator.totals()
    assert total.malformed > 1000
    assert total.unrouted > 1000  # IPv6 and changed addresses
    assert rig.emulator.counters()[0].delivered_packets > 1000
