"""(f) The lab's emulator: what its links do against what was asked of them, and how much one core carries.

    python benchmarks/lab.py [--quick]

Sites are network namespaces of this machine, and the programs in them see ordinary interfaces: ping measures
delays, iperf3 rates, and numbered datagrams show what was lost, overtaken or doubled. The emulator runs in a
thread of this process. Needs root, or a user namespace in which it counts as root; and Debian's iperf3 and
iputils-ping.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from atoll.lab.emulator import EmulatorCounters, fates_array
from atoll.lab.topology import LabLink, Phase, Site, Topology
from common import hindrance, options, output_folder, write_results
from support.sites import Sites, pair, phase

SIZE = 1400  # bytes of data in a datagram; 28 more on the wire
WIRE = SIZE + 28
TCP_DATA, TCP_WIRE = 1448, 1500  # of a full segment with timestamps
BATCH = 46  # datagrams of SIZE that one super-packet holds
PORT = 5000
SO_RCVBUFFORCE, SOL_UDP, UDP_SEGMENT, UDP_GRO = 33, 17, 103, 104
DISTRIBUTIONS = ("normal", "uniform", "pareto")
JITTER, JITTER_DELAY = 0.005, 0.04
NEAR = 0.004  # seconds: up to 10 ms there and back, ping shows hundredths of a millisecond
PING_GAP = 0.085  # seconds: by then the jitter's course knows nothing of what it was
QUIET_SECONDS = 1.0  # without a datagram: all have arrived

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """One quality: what was asked, what was measured, and how far off it may be."""

    name: str
    asked: float
    measured: float
    unit: str
    off: float  # in `off_unit`
    limit: float | None
    off_unit: str
    note: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.limit is None else abs(self.off) <= self.limit

    def line(self) -> str:
        verdict = "" if self.limit is None else f" (limit {self.limit:g}): {'met' if self.met else 'MISSED'}"
        note = f"; {self.note}" if self.note else ""
        return (
            f"{self.name}: asked {self.asked:.5g} {self.unit}, measured {self.measured:.5g} {self.unit}, "
            f"off by {self.off:+.3g} {self.off_unit}{verdict}{note}"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def star(*ways: Phase) -> Topology:
    """Site 0, and one more site for each of `ways`, which is the way there; back it is the same, plain."""
    sites = tuple(Site(f"s{i}", i, 1, (1.0,), f"10.77.{i}.1") for i in range(1, len(ways) + 2))
    links = []
    for site, way in enumerate(ways, start=1):
        back = replace(way, jitter=0.0, loss=0.0, reorder=0.0, duplicate=0.0, corrupt=0.0)
        links += [LabLink(0, site, (way,)), LabLink(site, 0, (back,))]
    return Topology(1, sites, tuple(links))


def health(total: EmulatorCounters, unread: int = 0) -> str:
    """What the emulator itself did to the packets of a case."""
    own = f"{total.dropped} of its own drops, {unread} unread"
    late = f"{total.lateness_mean * 1e6:.0f} us late, 99 % below {total.lateness_p99 * 1e6:.0f}"
    behind = "" if total.kept_up else f"; BEHIND for {total.behind_seconds} s"
    return f"{own}, {late}, worst {total.lateness_worst * 1e3:.2f} ms{behind}"


# -- ping: delay and jitter --------------------------------------------------------------------------------


def ping(sites: Sites, count: int, gap: float) -> list[Floats]:
    """Seconds there and back from site 0 to each other site, all measured at once."""
    others = range(1, len(sites.spaces))
    arguments = ["-n", "-c", str(count), "-i", str(gap)]
    started = [sites.start(0, ["ping", *arguments, sites.address(site)]) for site in others]
    found = []
    for process in started:
        said = process.communicate(timeout=count * gap + 60)[0]
        found.append(np.array([float(ms) / 1e3 for ms in re.findall(r"time=([\d.]+) ms", said)]))
    return found


def delay_cases(quick: bool) -> list[Case]:
    asked = (0.001, 0.02, 0.15)
    with Sites(star(*(phase(1e9, delay=delay) for delay in asked))) as sites:
        measured = ping(sites, 20 if quick else 200, 0.02)
        note = health(sites.emulator.totals())
    return [
        Case(
            f"delay, {delay * 1e3:g} ms each way, ping",
            2e3 * delay,
            float(np.mean(took)) * 1e3,
            "ms",
            float(np.quantile(np.abs(took - 2 * delay), 0.99)) * 1e3,
            1.0,
            "ms at the 99th percentile",
            note,
        )
        for delay, took in zip(asked, measured, strict=True)
    ]


def asked_jitter(distribution: str) -> Floats:
    """Many values of a distribution as the lab defines it, sorted, in standard deviations."""
    uniform = (np.arange(100_000) + 0.5) / 100_000
    if distribution == "uniform":
        values = math.sqrt(3) * (2 * uniform - 1)
    elif distribution == "pareto":  # shape 3, cut where one in 2000 lies beyond
        values = np.minimum(uniform[::-1] ** (-1 / 3), 2000 ** (1 / 3))
    else:
        values = np.sort(np.random.default_rng(0).standard_normal(1_000_000))[5::10]
    return np.asarray((values - values.mean()) / values.std(), dtype=np.float64)


def distance(measured: Floats, asked: Floats) -> float:
    """Kolmogorov and Smirnov's: the largest difference between two cumulative distributions."""
    at = np.sort(np.concatenate([measured, asked]))
    ours, theirs = (
        np.searchsorted(np.sort(values), at, "right") / len(values) for values in (measured, asked)
    )
    return float(np.abs(ours - theirs).max())


def as_ping_shows(seconds: Floats) -> Floats:
    """Three digits: tenths of a millisecond from 10 ms to 100, then whole ones."""
    return np.where(seconds < 0.1, np.rint(seconds * 1e4) / 1e4, np.rint(seconds * 1e3) / 1e3)


def jitter_cases(quick: bool) -> tuple[list[Case], dict[str, Floats]]:
    """Site 0 pings a site for each distribution, and one nearby that tells what this machine adds itself."""
    ways = [phase(1e9, delay=JITTER_DELAY, jitter=JITTER, distribution=name) for name in DISTRIBUTIONS]
    count = 40 if quick else 600
    with Sites(star(*ways, phase(1e9, delay=NEAR))) as sites:
        *measured, nearby = ping(sites, count, PING_GAP)
    own = float(np.median(nearby)) - 2 * NEAR
    plain = 2 * JITTER_DELAY + own
    cases, drawn = [], {}
    for name, took in zip(DISTRIBUTIONS, measured, strict=True):
        drawn[name] = (took - plain) / JITTER
        off = distance(took, as_ping_shows(plain + JITTER * asked_jitter(name)))
        limit = 1.95 / math.sqrt(len(took))  # exceeded by chance once in a thousand times
        cases.append(
            Case(
                f"jitter, {name}, {len(took)} pings",
                JITTER * 1e3,
                float(took.std()) * 1e3,
                "ms",
                off,
                limit,
                "of the distribution",
                f"mean off by {(took.mean() - plain) * 1e3:.3f} ms; {own * 1e3:.3f} ms of this machine's own",
            )
        )
    return cases, drawn


# -- iperf3: rates -----------------------------------------------------------------------------------------


def iperf(sites: Sites, seconds: float, *arguments: str) -> dict[str, Any]:
    """iperf3 of site 0 with site 1's server; its report."""
    server = sites.start(1, ["iperf3", "-s", "-1"])
    deadline = time.monotonic() + 20
    while not listening(sites):
        if time.monotonic() > deadline:
            raise RuntimeError("iperf3 -s does not listen")
        time.sleep(0.02)
    command = ["iperf3", "-c", sites.address(1), "-J", "-t", f"{seconds:g}", *arguments]
    client = sites.start(0, command)
    report: dict[str, Any] = json.loads(client.communicate(timeout=seconds + 60)[0])
    server.communicate(timeout=20)
    if "error" in report:
        raise RuntimeError(f"{' '.join(command)}: {report['error']}")
    return report


def received(sites: Sites, seconds: float, *arguments: str) -> float:
    """Bits/s of data that site 0 receives, after the first second or two."""
    whole = iperf(sites, seconds, "-R", *arguments)["intervals"]
    later = [interval["sum"] for interval in whole[2 if seconds > 5 else 1 :]]
    return 8.0 * sum(part["bytes"] for part in later) / sum(part["seconds"] for part in later)


def listening(sites: Sites) -> bool:
    tables = sites.inside(
        1, lambda: [Path(f"/proc/thread-self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    )
    return any(re.search(r":1451 \S+ 0A ", table) for table in tables)  # 5201


def rate_cases(quick: bool) -> list[Case]:
    cases = []
    for megabits in (10, 100, 1000):
        rate = megabits * 1e6
        seconds = 3.0 if quick else 12.0
        topology = pair([phase(rate, delay=0.005, queue=max(round(rate / 8 * 0.02), 2**16))])
        with Sites(topology) as sites:
            got = received(sites, seconds, "-C", "cubic") * TCP_WIRE / TCP_DATA
            cases.append(rate_case("TCP", rate, got, sites))
        with Sites(topology) as sites:
            offered = f"{1.1 * rate * SIZE / WIRE:.0f}"
            got = received(sites, seconds, "-u", "-b", offered, "-l", str(SIZE), "-w", "4M") * WIRE / SIZE
            cases.append(rate_case("UDP", rate, got, sites))
    return cases


def rate_case(what: str, rate: float, measured: float, sites: Sites) -> Case:
    unread = sites.unread(0) + sites.unread(1)
    full, overrun = sites.emulator.counters()[1].lost_queue_packets, sites.overrun(0)
    off = 100 * (measured / rate - 1)
    note = f"{full} packets found the queue full and {overrun} the receiver's socket"
    note += f"; {health(sites.emulator.totals(), unread)}"
    return Case(
        f"rate, {what} at {rate / 1e6:g} Mbit/s, iperf3",
        rate / 1e6,
        measured / 1e6,
        "Mbit/s",
        off,
        2.0,
        "%",
        note,
    )


# -- numbered datagrams: loss, order, copies ---------------------------------------------------------------


def blast(sites: Sites, source: int, target: int, count: int, rate: float, ahead: float = 0.0) -> None:
    """Send `count` numbered datagrams in super-packets, at `rate` (bits/s on the wire), `ahead` s early."""
    block = np.zeros((BATCH, SIZE // 8), dtype=np.int64)
    each = BATCH * WIRE * 8 / rate
    with sites.socket(source, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(SOL_UDP, UDP_SEGMENT, SIZE)
        begun = time.perf_counter() - ahead
        for number in range(0, count, BATCH):
            block[:, 0] = np.arange(number, number + BATCH)
            sender.sendto(block, (sites.address(target), PORT))
            left = begun + number / BATCH * each - time.perf_counter()
            if left > 0:
                time.sleep(left)


class Collector:
    """Receives numbered datagrams at a site, in a thread, while entered; then has `numbers`, as they came."""

    def __init__(self, sites: Sites, site: int) -> None:
        self._socket = sites.socket(site, socket.SOCK_DGRAM, PORT)
        self._socket.setsockopt(SOL_UDP, UDP_GRO, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 2**27)
        self._found: list[Numbers] = []
        self._thread = threading.Thread(target=self._receive)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.join(120)
        self._socket.close()
        self.numbers = np.concatenate(self._found) if self._found else np.zeros(0, dtype=np.int64)

    def _receive(self) -> None:
        buffer = np.zeros(2**16, dtype=np.uint8)
        self._socket.settimeout(30)
        while True:
            try:
                got = self._socket.recv_into(buffer)
            except TimeoutError:
                return
            if not self._found:
                self._socket.settimeout(QUIET_SECONDS)
            self._found.append(buffer[:got].reshape(-1, SIZE)[:, :8].copy().view(np.int64).ravel())


def collect(way: Phase, count: int) -> tuple[Numbers, str]:
    """The numbers that arrive of `count` datagrams over a link whose wire is never idle, and a note."""
    for _ in range(3):
        with Sites(pair([way], [phase(1e9)])) as sites:
            with Collector(sites, 1) as collector:
                blast(sites, 0, 1, count, way.rate * 8, ahead=0.02)
            if not sites.overrun(1):
                return collector.numbers, health(sites.emulator.totals(), sites.unread(0))
    raise RuntimeError("the receiver was too slow three times; leave the machine alone meanwhile")


def binomial(name: str, happened: int, of: int, share: float, note: str, correlation: float = 1.0) -> Case:
    """A count against its probability, in standard deviations; `correlation` widens the variance."""
    deviations = (happened - of * share) / math.sqrt(of * share * (1 - share) * correlation)
    return Case(name, 100 * share, 100 * happened / of, "%", deviations, 3.0, "standard deviations", note)


def runs(missing: npt.NDArray[np.bool_]) -> Numbers:
    """The lengths of the runs of lost datagrams."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], missing.astype(np.int8), [0]])))
    return (edges[1::2] - edges[::2]).astype(np.int64)


def fault_cases(quick: bool) -> tuple[list[Case], Numbers]:
    count = (20_000 if quick else 1_000_000) // BATCH * BATCH
    clean = phase(5e8, delay=0.01, queue=2**25)
    cases = []
    for loss, burst in ((0.01, 1.0), (0.03, 8.0)):
        numbers, note = collect(replace(clean, loss=loss, burst=burst), count)
        missing = np.ones(count, dtype=np.bool_)
        missing[numbers] = False
        memory = 1 - 1 / burst - loss / (1 - loss) / burst if burst > 1 else 0.0
        wider = (1 + memory) / (1 - memory)
        kind = f"in bursts of {burst:g}" if burst > 1 else "independent"
        cases.append(binomial(f"loss, {kind}", int(missing.sum()), count, loss, note, wider))
        lengths = runs(missing)
        mean, model = float(lengths.mean()), burst if burst > 1 else 1 / (1 - loss)
        off = 100 * (mean / model - 1)
        cases.append(Case(f"mean burst, {kind}", model, mean, "packets", off, 5.0, "%"))
    numbers, note = collect(replace(clean, reorder=0.01, reorder_by=0.001, duplicate=0.005), count)
    _, first = np.unique(numbers, return_index=True)
    cases.append(binomial("duplication", len(numbers) - len(first), count, 0.005, note))
    order = numbers[np.sort(first)]
    later = np.minimum.accumulate(order[::-1])[::-1]  # the least number from here on
    cases.append(binomial("reordering", int((order[:-1] > later[1:]).sum()), count, 0.01, note))
    numbers, note = collect(replace(clean, corrupt=0.002), count)
    cases.append(binomial("damage, refused by the receiver", count - len(numbers), count, 0.002, note))
    return cases, lengths


def outage_cases() -> list[Case]:
    """A datagram each millisecond: when the first is lost, and when the first arrives again."""
    whole, delay = phase(1e8, delay=0.01), 0.01
    phases = [whole, replace(whole, at=2.0, down=True), replace(whole, at=3.0)]
    arrived: list[float] = []
    with Sites(pair(phases)) as sites:
        here, there = (sites.socket(site, socket.SOCK_DGRAM, PORT) for site in (0, 1))
        done = threading.Event()

        def send() -> None:
            while not done.is_set():
                here.sendto(b"x", (sites.address(1), PORT))
                time.sleep(0.001)

        sender = threading.Thread(target=send)
        with here, there:
            there.settimeout(20)
            sender.start()
            while not arrived or arrived[-1] < 4.0:
                there.recv(100)
                arrived.append(time.monotonic() - sites.emulator.totals().started)
            done.set()
            sender.join()
        note = health(sites.emulator.totals())
    last, first = max(pairwise(arrived), key=lambda two: two[1] - two[0])
    return [
        Case(
            f"outage's {name}",
            1e3 * (at + delay),
            1e3 * got,
            "ms",
            1e3 * (got - at - delay),
            20.0,
            "ms",
            note,
        )
        for name, at, got in (("begin", 2.0, last), ("end", 3.0, first))
    ]


# -- capacity ----------------------------------------------------------------------------------------------


def capacity_cases(quick: bool) -> list[Case]:
    """1 Gbit/s of 1,400-byte datagrams each way; the link could take ten times as much."""
    seconds = 2.0 if quick else 10.0
    wide = [phase(10e9, delay=0.02, queue=2**26)]
    with Sites(pair(wide)) as sites:
        with Collector(sites, 0), Collector(sites, 1):
            count = round(seconds * 1e9 / 8 / WIRE) // BATCH * BATCH
            senders = [threading.Thread(target=blast, args=(sites, a, 1 - a, count, 1e9)) for a in (0, 1)]
            begun = time.perf_counter()
            for thread in senders:
                thread.start()
            for thread in senders:
                thread.join()
            spent = time.perf_counter() - begun
        cases = carried("super-packets", sites, spent)
    with Sites(pair(wide)) as sites:
        offered = f"{1e9 * SIZE / WIRE:.0f}"
        end = iperf(sites, seconds, "-u", "-b", offered, "-l", str(SIZE), "-w", "4M", "--bidir")["end"]
        time.sleep(QUIET_SECONDS)  # all have arrived
        cases += carried("one by one, iperf3", sites, end["sum_sent"]["seconds"])
    return cases


def carried(what: str, sites: Sites, seconds: float) -> list[Case]:
    """What came to the links in `seconds`, and what of it they did not deliver, though they lose nothing."""
    unread = sites.unread(0) + sites.unread(1)
    overrun = sites.overrun(0) + sites.overrun(1)
    sites.stop()
    total, links = sites.emulator.totals(), sites.emulator.counters()
    sent = sum(link.offered_packets for link in links) + unread
    lost = sent - sum(link.delivered_packets for link in links)
    rate = 8 * sum(link.offered_bytes for link in links) / seconds / 1e9
    per_core = total.packets / total.cpu_seconds
    whole = per_core * WIRE * 8 / 1e9
    note = f"{total.cpu_seconds / seconds:.0%} of a core; {health(total, unread)}"
    slow = f"of {sent}; {overrun} more found their receiver's socket full"
    name = f"capacity, {what}"
    return [
        Case(f"{name}: offered, both ways", 2.0, rate, "Gbit/s", 100 * (rate / 2 - 1), None, "%", note),
        Case(f"{name}: lost unasked", 0, lost, "packets", lost, 0, "packets", slow),
        Case(
            f"{name}: a whole core's", 2.0, whole, "Gbit/s", 100 * (whole / 2 - 1), None, "%",
            f"{per_core / 1e3:.0f} thousand packets/s",
        ),
    ]  # fmt: skip


def decision_case() -> Case:
    """How long the decision on a packet's fate takes by itself."""
    bad = phase(
        1e9, jitter=0.002, loss=0.03, burst=8.0, reorder=0.01, duplicate=0.01, corrupt=0.01, delay=0.1
    )
    count = 1_000_000
    times, sizes = np.arange(count) * 12e-6, np.full(count, 1428)
    best = min(timed(lambda: fates_array(LabLink(0, 1, (bad,)), 1, 0, times, sizes)) for _ in range(5))
    return Case("the decision on a packet, with its copy to Python", 0, best / count * 1e9, "ns", 0, None, "")


def timed(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


# -- all of it ---------------------------------------------------------------------------------------------


def draw(cases: Sequence[Case], jitters: dict[str, Floats], lengths: Numbers, path: Path) -> None:
    """Jitter's distributions, the bursts' lengths, and how far off the rest is of what it may be."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for name, color in zip(DISTRIBUTIONS, ("#2b6ca3", "#c23b22", "#5a9a4a"), strict=True):
        asked, measured = asked_jitter(name), np.sort(jitters[name])
        left.plot(
            asked * JITTER * 1e3, np.linspace(0, 1, len(asked)), color=color, linewidth=1, linestyle="--"
        )
        left.plot(
            measured * JITTER * 1e3, np.linspace(0, 1, len(measured)), color=color, linewidth=1.5, label=name
        )
    left.set(xlim=(-15, 20), xlabel="jitter, ms", title="Jitter of 5 ms: measured by ping (dashed: asked)")
    left.legend(frameon=False)
    longest = int(lengths.max())
    seen = np.bincount(lengths, minlength=longest + 1)[1:] / len(lengths)
    at = np.arange(1, longest + 1)
    middle.bar(at, seen, color="#9db7d1", label="measured")
    middle.plot(at, (1 - 1 / 8) ** (at - 1) / 8, color="#c23b22", linewidth=1.5, label="asked")
    middle.set(xlim=(0, 50), xlabel="lost packets in a row", title="Loss of 3 % in bursts of 8")
    middle.legend(frameon=False)
    shown = [case for case in cases if case.limit]
    right.barh(range(len(shown)), [abs(case.off) / (case.limit or 1) for case in shown], color="#2b6ca3")
    right.axvline(1, color="#c23b22", linewidth=1.5)
    right.set_yticks(range(len(shown)), [case.name for case in shown], fontsize=7)
    right.invert_yaxis()
    right.set(title="Off by, of what is allowed (red)")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def lacking() -> str:
    """Why this cannot run here; empty if it can."""
    missing = [name for name in ("iperf3", "ping") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)} (Debian: apt-get install iperf3 iputils-ping)"
    return hindrance()


def main() -> int:
    args = options(__doc__).parse_args()
    reason = lacking()
    if reason:
        print(f"left out: {reason}")
        return 0
    with contextlib.suppress(PermissionError):  # iperf3 and ping inherit it: other work disturbs them less
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    cases: list[Case] = []

    def show(more: Sequence[Case]) -> None:
        cases.extend(more)
        for case in more:
            print(case.line(), flush=True)

    show(delay_cases(args.quick))
    jitter, jitters = jitter_cases(args.quick)
    show(jitter)
    show(rate_cases(args.quick))
    faults, lengths = fault_cases(args.quick)
    show(faults)
    show(outage_cases())
    show(capacity_cases(args.quick))
    show([decision_case()])
    folder = output_folder(args)
    path = write_results("lab", folder, [case.to_json() for case in cases], args.quick)
    draw(cases, jitters, lengths, path.with_suffix(".png"))
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
