"""The emulator: applies a topology's links to the packets between its sites.

C code (`csrc/`) handles the packets in one thread. This module packs the topology for it and unpacks its
counters. docs/notes/emulator.md explains the model.
"""

from __future__ import annotations

import importlib
import ipaddress
import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.core.errors import ConfigError, UserError
from atoll.core.units import format_bytes
from atoll.lab.topology import LabLink, Phase, Topology

_emulator: ModuleType | None = None
_missing = ""
try:
    _emulator = importlib.import_module("atoll.lab._emulator")
except ImportError as error:
    _missing = str(error)

# Equal to the constants of csrc/fates.h.
_KNOTS, _QUARTER, _CELLS, _ONE = 4096, 1024, 768, 2**16
_SHAPES = ("normal", "uniform", "pareto")
_PERIODS = 8  # standard deviations between two knots of the jitter: it hardly ever falls by 1 s/s
_PARETO_SHAPE = 3.0  # smallest whole number with a variance
_PARETO_MOST = 3.29  # bound of the underlying normal value: one in 2000 lies beyond
_LONGEST_TIME = 30 * 86400.0  # seconds: picoseconds of a whole lab must fit into 63 bits
_LONGEST_WAIT = 1e6  # seconds in a queue, for the same reason
_LARGEST_PACKET = 65575  # bytes, the largest length in an IPv6 header

# Memory: beside the packets' bytes, each run of packets has a header.
_SPARE_SECONDS = 0.05  # of the rate: packets that are due while the thread does not run
_SPARE_BYTES = 2**18
_RECORD_BYTES, _BLOCK_BYTES = 24, 96

_VERDICTS = ("", "queue", "loss", "outage")


# -- availability ------------------------------------------------------------------------------------------


def available() -> str:
    """Return an empty string, or one line that says why the emulator is missing and what to install."""
    if _emulator is not None:
        return ""
    if not sys.platform.startswith("linux"):
        return "the lab's packet emulator needs Linux"
    return (
        f"the lab's packet emulator is not built ({_missing}): install a C compiler and Python's headers "
        "(Debian: apt-get install gcc libc6-dev python3-dev), then install Atoll again "
        "(in its checkout: pip install --editable .)"
    )


def _native() -> ModuleType:
    if _emulator is None:
        raise UserError(available())
    return _emulator


# -- input of the C code -----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _tables() -> bytes:
    """Pack `struct tables` of csrc/fates.h.

    Values are rounded to 1/65536, so the last bits of a math library do not matter.
    """
    normal = NormalDist()
    knots = [normal.inv_cdf(i / _KNOTS) for i in range(1, _KNOTS)]
    cosines = [math.cos(math.pi / 2 * i / _QUARTER) for i in range(_QUARTER + 1)]
    shapes = [value for shape in _shapes() for value in shape]
    values = [-4.0, *knots, 4.0, *cosines, *shapes]
    return struct.pack(f"={len(values)}i", *(round(value * _ONE) for value in values))


@lru_cache(maxsize=1)
def _shapes() -> tuple[list[float], ...]:
    """Return each distribution's values in standard deviations, for a standard normal one from -6 to 6."""
    normal = NormalDist()
    at = [-6 + 12 * i / _CELLS for i in range(_CELLS + 1)]
    uniform = [math.sqrt(3) * (2 * normal.cdf(g) - 1) for g in at]
    return [max(-4.0, min(4.0, g)) for g in at], uniform, _pareto(at, normal)


def _pareto(at: Sequence[float], normal: NormalDist) -> list[float]:
    """Return values with mean 0 and standard deviation 1, and a cut tail."""
    raw = [normal.cdf(-min(g, _PARETO_MOST)) ** (-1 / _PARETO_SHAPE) for g in at]
    weights = [normal.cdf(b) - normal.cdf(a) for a, b in pairwise(at)]
    middles = [(a + b) / 2 for a, b in pairwise(raw)]
    mean = sum(w * x for w, x in zip(weights, middles, strict=True))
    variance = sum(w * (x - mean) ** 2 for w, x in zip(weights, middles, strict=True))
    return [(x - mean) / math.sqrt(variance) for x in raw]


def _chance(probability: float) -> int:
    """Return the probability in units of 2^-63."""
    return max(-(2**63) + 1, min(round(probability * 2**63), 2**63 - 1))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _memory(phase: Phase) -> float:
    """Return the second eigenvalue of the burst chain: the correlation of one slot with the next."""
    if phase.burst <= 1 or not 0 < phase.loss < 1:
        return 0.0
    leave = 1 / phase.burst
    return 1 - leave - leave * phase.loss / (1 - phase.loss)


def _pack_phase(phase: Phase) -> bytes:
    """Pack `struct phase` of csrc/fates.h."""
    rate = max(round(phase.rate), 1)
    jitter = _nanoseconds(phase.jitter)
    return struct.pack(
        "=14q",
        _nanoseconds(phase.at),
        rate,
        _nanoseconds(phase.delay),
        jitter,
        max(_PERIODS * jitter, 1),
        _SHAPES.index(phase.distribution),
        min(phase.queue, round(rate * _LONGEST_WAIT)),
        _chance(phase.loss),
        _chance(_memory(phase)),
        _chance(phase.reorder),
        _nanoseconds(phase.reorder_by),
        _chance(phase.duplicate),
        _chance(phase.corrupt),
        phase.down,
    )


def _pack_phases(link: LabLink) -> bytes:
    return b"".join(map(_pack_phase, link.phases))


# -- fates -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fate:
    """The fate of one packet."""

    lost_by: str  # "", "queue", "loss" or "outage"
    delivered: float  # seconds since the lab's start; 0 if lost
    copies: int  # arriving copies; 0 if lost
    corrupted: bool
    overtook: bool  # arrives before an earlier packet


def fates(link: LabLink, seed: int, link_index: int, packets: Sequence[tuple[float, int]]) -> list[Fate]:
    """Return the fates of a recorded sequence of packets: (arrival in seconds, ascending; bytes).

    The live emulator uses the same C function: one seed, link index and sequence give the same fates on every
    machine. Raises UserError without the emulator, ValueError for arrivals out of order or impossible sizes.
    """
    decided = fates_array(
        link,
        seed,
        link_index,
        np.array([at for at, _ in packets], dtype=np.float64),
        np.array([size for _, size in packets], dtype=np.int64),
    )
    return [
        Fate(
            _VERDICTS[row["verdict"]],
            row["delivered"] / 1e9,
            int(row["copies"]) * (row["verdict"] == 0),
            bool(row["corrupted"]) and row["verdict"] == 0,
            bool(row["overtook"]),
        )
        for row in decided
    ]


def fates_array(
    link: LabLink,
    seed: int,
    link_index: int,
    arrivals: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.int64],
) -> npt.NDArray[Any]:
    """Return `fates` as a structured array of 64-bit integers.

    Fields: `verdict` (0 delivered, 1 lost by the queue, 2 by loss, 3 by an outage), `delivered` (ns),
    `copies`, `corrupted`, `overtook`. For a lost packet only `verdict` is meaningful.
    """
    if arrivals.shape != sizes.shape or arrivals.ndim != 1:
        raise ValueError("arrivals and sizes must be two arrays of one length")
    if len(arrivals):
        if np.any(np.diff(arrivals) < 0) or not 0 <= arrivals[0] <= arrivals[-1] <= _LONGEST_TIME:
            raise ValueError("arrivals must rise, from 0 or later, within 30 days")
        if sizes.min() < 1 or sizes.max() > _LARGEST_PACKET:
            raise ValueError(f"packets have 1 to {_LARGEST_PACKET} bytes")
    packed = np.stack([np.rint(arrivals * 1e9).astype(np.int64), sizes.astype(np.int64)], axis=1).tobytes()
    decided = _native().fates(_tables(), _pack_phases(link), seed, link_index, packed)
    names = ("verdict", "delivered", "copies", "corrupted", "overtook")
    return np.frombuffer(decided, dtype=[(name, np.int64) for name in names])


# -- counters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkCounters:
    """Counters of one direction of a link. Bytes are those of IP packets on the wire."""

    source: int  # sites, from 0
    target: int
    offered_packets: int
    offered_bytes: int
    delivered_packets: int  # copies included
    delivered_bytes: int
    lost_queue_packets: int
    lost_queue_bytes: int
    lost_loss_packets: int
    lost_loss_bytes: int
    lost_outage_packets: int
    lost_outage_bytes: int
    duplicated: int  # packets that arrived twice
    corrupted: int
    reordered: int  # packets that overtook another
    busy_seconds: float  # in which the wire was sending
    mean_queue_delay: float  # seconds
    max_queue_delay: float
    dropped: int  # packets lost by the emulator itself: no room, or a failed write


@dataclass(frozen=True)
class EmulatorCounters:
    """Performance of the emulator itself. Lateness is the time from a packet's due time to its write."""

    seconds: float  # of running
    cpu_seconds: float
    packets: int  # written to the wire
    reads: int  # system calls
    writes: int
    lateness_mean: float  # seconds
    lateness_p99: float
    lateness_worst: float
    late_packets: int  # late by more than 1 ms
    dropped: int  # packets lost by the emulator itself, on all links
    malformed: int  # unreadable packets
    unrouted: int  # packets for an address that no link leads to
    behind_seconds: int  # in which it dropped packets, or more than 1 % were late by more than 1 ms
    realtime: bool  # runs before all ordinary processes (SCHED_FIFO)
    locked: bool  # its memory is locked
    started: float = 0.0  # seconds of CLOCK_MONOTONIC at its start, from which phases count; 0 before

    @property
    def kept_up(self) -> bool:
        return self.behind_seconds == 0 and self.dropped == 0

    def notes(self) -> list[str]:
        """Return a line for each privilege that the emulator lacks."""
        lines = []
        if not self.realtime:
            lines.append(
                "the emulator has no real-time priority: packets are late beside loaded cores "
                "(run as root, or let this user have it: ulimit -r 40)"
            )
        if not self.locked:
            lines.append("the emulator's memory is not locked: it may be swapped out (ulimit -l unlimited)")
        return lines


# The order of csrc/loop.h and csrc/links.h.
_TOTALS = (
    "started", "now", "cpu", "written", "lateness", "lateness_most", "late", "behind", "malformed",
    "unrouted", "writes", "reads", "realtime", "locked",
)  # fmt: skip
_HISTOGRAM = 8 * 40
_PER_LINK = 18


def _lateness_at(histogram: Sequence[int], share: float) -> float:
    """Return the seconds that `share` of the packets do not exceed, to one eighth (a bucket's width)."""
    wanted, seen = share * sum(histogram), 0
    for bucket, count in enumerate(histogram):
        seen += count
        if seen >= wanted and seen:
            upper = bucket + 1 if bucket < 8 else (8 + bucket % 8 + 1) << (bucket // 8 - 1)
            return upper / 1e9
    return 0.0


# -- the emulator ------------------------------------------------------------------------------------------


class Emulator:
    """The links of a topology, live between the TUN devices of its sites.

    Args:
            tuns: each site's TUN, in order: non-blocking, without packet information, with a virtio header of
            10 bytes. Offloads may be on.
        memory: bytes for packets in queues and in flight; by default half of the free memory.

    Raises:
        UserError: the emulator is missing.
        ConfigError: the links need more memory.
    """

    def __init__(self, topology: Topology, tuns: Sequence[int], memory: int | None = None) -> None:
        native = _native()
        if len(tuns) != len(topology.sites):
            raise ValueError(f"{len(tuns)} TUN devices for {len(topology.sites)} sites")
        self._links = topology.links
        rooms = [_room(link) for link in topology.links]
        _check_memory(topology, rooms, _free_memory() // 2 if memory is None else memory)
        sites = b"".join(
            struct.pack("=q16s", tun, _address(site.address))
            for tun, site in zip(tuns, topology.sites, strict=True)
        )
        links = b"".join(
            struct.pack("=5q", link.source, link.target, len(link.phases), room.records, room.ring)
            for link, room in zip(topology.links, rooms, strict=True)
        )
        phases = b"".join(map(_pack_phases, topology.links))
        self._running = native.create(topology.seed, _tables(), sites, links, phases)

    def run(self, stop: int) -> None:
        """Carry packets until the file descriptor `stop` is readable. Call it once; phases count from here.

        Releases the GIL. Asks for real-time priority of the calling thread and for locked memory of the
        process, and gives both back at the end.
        """
        _native().run(self._running, stop)

    def counters(self) -> list[LinkCounters]:
        """Return each link's counters, in the topology's order; callable from any thread while it runs."""
        values = self._values()[len(_TOTALS) + _HISTOGRAM :]
        return [
            _link_counters(link, values[i * _PER_LINK : (i + 1) * _PER_LINK])
            for i, link in enumerate(self._links)
        ]

    def totals(self) -> EmulatorCounters:
        """Return the emulator's own counters; callable from any thread while it runs."""
        values = self._values()
        total = dict(zip(_TOTALS, values, strict=False))
        histogram = values[len(_TOTALS) : len(_TOTALS) + _HISTOGRAM]
        return EmulatorCounters(
            seconds=total["now"] / 1e9,
            cpu_seconds=total["cpu"] / 1e9,
            packets=total["written"],
            reads=total["reads"],
            writes=total["writes"],
            lateness_mean=total["lateness"] / max(total["written"], 1) / 1e9,
            lateness_p99=_lateness_at(histogram, 0.99),
            lateness_worst=total["lateness_most"] / 1e9,
            late_packets=total["late"],
            dropped=sum(link.dropped for link in self.counters()),
            malformed=total["malformed"],
            unrouted=total["unrouted"],
            behind_seconds=total["behind"],
            realtime=bool(total["realtime"]),
            locked=bool(total["locked"]),
            started=total["started"] / 1e9,
        )

    def _values(self) -> tuple[int, ...]:
        packed = _native().counters(self._running)
        return struct.unpack(f"={len(packed) // 8}q", packed)


def _link_counters(link: LabLink, values: Sequence[int]) -> LinkCounters:
    *counts, busy, delay, most, overflowed, unwritten = values
    crossed = counts[0] - counts[4]  # packets that did not find the queue full
    seconds = [busy / 1e12, delay / max(crossed, 1) / 1e9, most / 1e9]
    fields: list[Any] = [link.source, link.target, *counts, *seconds, overflowed + unwritten]
    return LinkCounters(*fields)


def _address(text: str) -> bytes:
    """Pack an address as IPv6; an IPv4 address becomes ::ffff:a.b.c.d."""
    address = ipaddress.ip_address(text)
    return address.packed if address.version == 6 else b"\0" * 10 + b"\xff\xff" + address.packed


# -- memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Room:
    """Room for a link's packets, queued and in flight."""

    records: int  # packets
    ring: int  # bytes

    @property
    def bytes(self) -> int:
        return self.ring + self.records * _RECORD_BYTES


def _room(link: LabLink) -> _Room:
    tops = {name: max(shape) for name, shape in zip(_SHAPES, _shapes(), strict=True)}
    rate = max(phase.rate for phase in link.phases)
    delay = max(phase.delay + tops[phase.distribution] * phase.jitter for phase in link.phases)
    queue = max(min(phase.queue, phase.rate * _LONGEST_WAIT) for phase in link.phases)
    bytes_held = math.ceil(queue + rate * (delay + _SPARE_SECONDS)) + _SPARE_BYTES
    # Slow links may be full of the smallest packets; on fast ones the work for each packet prevents that.
    records = min(bytes_held // 20, bytes_held // 256 + 2**16)
    return _Room(records, bytes_held + records * _BLOCK_BYTES)


def _check_memory(topology: Topology, rooms: Sequence[_Room], limit: int) -> None:
    total = sum(room.bytes for room in rooms)
    if total <= limit:
        return
    room, link = max(zip(rooms, topology.links, strict=True), key=lambda pair: pair[0].bytes)
    names = " -> ".join(topology.sites[end].name for end in (link.source, link.target))
    raise ConfigError(
        f"the packets on their way would need {format_bytes(total)} of memory, and {format_bytes(limit)} can "
        f"be had; the most ({format_bytes(room.bytes)}) goes to the link {names}: give it a lower rate, "
        "delay, jitter or queue"
    )


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise UserError("/proc/meminfo does not say how much memory is free")
