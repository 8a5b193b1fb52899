"""The emulator: what the links of a topology do to the packets between its sites.

The work on each packet is done in C (`csrc/`), by one thread. This module packs a topology for it, and gives
names to what it counts. docs/notes/emulator.md tells how links are modelled, and why so.
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
from atoll.lab.topology import Link, Phase, Topology

_emulator: ModuleType | None = None
_missing = ""
try:
    _emulator = importlib.import_module("atoll.lab._emulator")
except ImportError as error:
    _missing = str(error)

# As csrc/fates.h has them.
_KNOTS, _QUARTER, _CELLS, _ONE = 4096, 1024, 768, 2**16
_SHAPES = ("normal", "uniform", "pareto")
_PERIODS = 8  # standard deviations between two knots of the jitter's course: so it hardly ever falls by 1 s/s
_PARETO_SHAPE = 3.0  # the smallest whole number with a variance
_PARETO_MOST = 3.29  # of the normal value that it is made from: cut where one in 2000 lies beyond
_LONGEST_TIME = 30 * 86400.0  # seconds: picoseconds of a whole lab must fit into 63 bits
_LONGEST_WAIT = 1e6  # seconds in a queue, likewise
_LARGEST_PACKET = 65575  # bytes: what IPv6 can state

# Memory: beside the bytes themselves, each run of packets has a header of its own.
_SPARE_SECONDS = 0.05  # of packets that are due, while the thread does not run
_SPARE_BYTES = 2**18
_RECORD_BYTES, _BLOCK_BYTES = 24, 96

_VERDICTS = ("", "queue", "loss", "outage")


# -- whether it is there -----------------------------------------------------------------------------------


def available() -> str:
    """Empty, or one line: what is missing for the emulator, and what to install."""
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


# -- what C is given ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _tables() -> bytes:
    """csrc/fates.h: `struct tables`. Rounded to 1/65536, so that libraries' last bits make no difference."""
    normal = NormalDist()
    knots = [normal.inv_cdf(i / _KNOTS) for i in range(1, _KNOTS)]
    cosines = [math.cos(math.pi / 2 * i / _QUARTER) for i in range(_QUARTER + 1)]
    shapes = [value for shape in _shapes() for value in shape]
    values = [-4.0, *knots, 4.0, *cosines, *shapes]
    return struct.pack(f"={len(values)}i", *(round(value * _ONE) for value in values))


@lru_cache(maxsize=1)
def _shapes() -> tuple[list[float], ...]:
    """For each distribution its value in standard deviations, where a standard normal one is -6 to 6."""
    normal = NormalDist()
    at = [-6 + 12 * i / _CELLS for i in range(_CELLS + 1)]
    uniform = [math.sqrt(3) * (2 * normal.cdf(g) - 1) for g in at]
    return [max(-4.0, min(4.0, g)) for g in at], uniform, _pareto(at, normal)


def _pareto(at: Sequence[float], normal: NormalDist) -> list[float]:
    """Mean 0 and standard deviation 1; its tail is cut."""
    raw = [normal.cdf(-min(g, _PARETO_MOST)) ** (-1 / _PARETO_SHAPE) for g in at]
    weights = [normal.cdf(b) - normal.cdf(a) for a, b in pairwise(at)]
    middles = [(a + b) / 2 for a, b in pairwise(raw)]
    mean = sum(w * x for w, x in zip(weights, middles, strict=True))
    variance = sum(w * (x - mean) ** 2 for w, x in zip(weights, middles, strict=True))
    return [(x - mean) / math.sqrt(variance) for x in raw]


def _chance(probability: float) -> int:
    """In units of 2^-63."""
    return max(-(2**63) + 1, min(round(probability * 2**63), 2**63 - 1))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _memory(phase: Phase) -> float:
    """The burst chain's second eigenvalue: of two states, what is left after a slot of where it was."""
    if phase.burst <= 1 or not 0 < phase.loss < 1:
        return 0.0
    leave = 1 / phase.burst
    return 1 - leave - leave * phase.loss / (1 - phase.loss)


def _pack_phase(phase: Phase) -> bytes:
    """csrc/fates.h: `struct phase`."""
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


def _pack_phases(link: Link) -> bytes:
    return b"".join(map(_pack_phase, link.phases))


# -- fates -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fate:
    """What becomes of one packet."""

    lost_by: str  # "", "queue", "loss" or "outage"
    delivered: float  # seconds since the lab's start; 0 if it is lost
    copies: int  # that arrive: 0 if it is lost
    corrupted: bool
    overtook: bool  # it arrives before one that left before it


def fates(link: Link, seed: int, link_index: int, packets: Sequence[tuple[float, int]]) -> list[Fate]:
    """What a link does to a recorded sequence: each packet's arrival (seconds, rising) and bytes.

    The function that decides is the live emulator's own; the same seed, place of the link in the topology
    and packets give the same fates, on every machine. Raises UserError without the emulator, ValueError for
    packets that are out of order or no packets.
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
    link: Link,
    seed: int,
    link_index: int,
    arrivals: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.int64],
) -> npt.NDArray[Any]:
    """`fates` for many packets: arrays in, and a structured array of 64-bit integers out.

    Fields: `verdict` (0 delivered, 1 lost by the queue, 2 by loss, 3 by an outage), `delivered` (ns),
    `copies`, `corrupted`, `overtook`; only the first means anything for a packet that is lost.
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
    """What one direction of a link has done so far. Bytes are those of IP packets, as on the wire."""

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
    duplicated: int  # packets that arrive twice
    corrupted: int
    reordered: int  # packets that overtake another
    busy_seconds: float  # that the wire was sending
    mean_queue_delay: float  # seconds
    max_queue_delay: float
    dropped: int  # packets that the emulator itself lost: no room for them, or a write that failed


@dataclass(frozen=True)
class EmulatorCounters:
    """How well the emulator itself did so far. Lateness is when a packet was written after it was due."""

    seconds: float  # that it has run
    cpu_seconds: float
    packets: int  # written, as the wire carries them
    reads: int  # system calls
    writes: int
    lateness_mean: float  # seconds
    lateness_p99: float
    lateness_worst: float
    late_packets: int  # by more than 1 ms
    dropped: int  # packets lost by the emulator itself, all links together
    malformed: int  # packets that it could not read
    unrouted: int  # packets for an address that no link leads to
    behind_seconds: int  # in which it dropped packets, or more than 1 % were late by more than 1 ms
    realtime: bool  # whether it runs before all ordinary processes (SCHED_FIFO)
    locked: bool  # whether its memory is locked
    started: float = 0.0  # seconds of CLOCK_MONOTONIC: when it began, from where phases count; 0 before

    @property
    def kept_up(self) -> bool:
        return self.behind_seconds == 0 and self.dropped == 0

    def notes(self) -> list[str]:
        """What it was not allowed, one line each."""
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
    """Seconds that `share` of the packets are not above; to an eighth, the width of a bucket."""
    wanted, seen = share * sum(histogram), 0
    for bucket, count in enumerate(histogram):
        seen += count
        if seen >= wanted and seen:
            upper = bucket + 1 if bucket < 8 else (8 + bucket % 8 + 1) << (bucket // 8 - 1)
            return upper / 1e9
    return 0.0


# -- the emulator ------------------------------------------------------------------------------------------


class Emulator:
    """The links of a topology, alive between the TUN devices of its sites.

    `tuns` holds each site's TUN, in order: non-blocking, without packet information, with a virtio header of
    10 bytes. Offloads may be on. Raises UserError where the emulator is missing, ConfigError where the
    packets on their way would need more than `memory` bytes (by default half of what is free).
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
        """Carry packets until the file descriptor `stop` is readable. Once; phases count from here.

        Other Python threads go on meanwhile. Asks for real-time priority for the calling thread, and for
        locked memory of the process, and gives both back at the end.
        """
        _native().run(self._running, stop)

    def counters(self) -> list[LinkCounters]:
        """Each link's, in the topology's order; from any thread, also while it runs."""
        values = self._values()[len(_TOTALS) + _HISTOGRAM :]
        return [
            _link_counters(link, values[i * _PER_LINK : (i + 1) * _PER_LINK])
            for i, link in enumerate(self._links)
        ]

    def totals(self) -> EmulatorCounters:
        """The emulator's own; from any thread, also while it runs."""
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


def _link_counters(link: Link, values: Sequence[int]) -> LinkCounters:
    *counts, busy, delay, most, overflowed, unwritten = values
    crossed = counts[0] - counts[4]  # all but those that found the queue full
    seconds = [busy / 1e12, delay / max(crossed, 1) / 1e9, most / 1e9]
    fields: list[Any] = [link.source, link.target, *counts, *seconds, overflowed + unwritten]
    return LinkCounters(*fields)


def _address(text: str) -> bytes:
    """IPv4 as IPv6 has it, ::ffff:a.b.c.d."""
    address = ipaddress.ip_address(text)
    return address.packed if address.version == 6 else b"\0" * 10 + b"\xff\xff" + address.packed


# -- memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Room:
    """What a link may hold of packets in its queue and on their way."""

    records: int  # packets
    ring: int  # bytes

    @property
    def bytes(self) -> int:
        return self.ring + self.records * _RECORD_BYTES


def _room(link: Link) -> _Room:
    tops = {name: max(shape) for name, shape in zip(_SHAPES, _shapes(), strict=True)}
    rate = max(phase.rate for phase in link.phases)
    delay = max(phase.delay + tops[phase.distribution] * phase.jitter for phase in link.phases)
    queue = max(min(phase.queue, phase.rate * _LONGEST_WAIT) for phase in link.phases)
    held = math.ceil(queue + rate * (delay + _SPARE_SECONDS)) + _SPARE_BYTES
    # Slow links may be full of the smallest packets; fast ones cannot, by the work that each makes.
    records = min(held // 20, held // 256 + 2**16)
    return _Room(records, held + records * _BLOCK_BYTES)


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
