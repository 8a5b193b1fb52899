"""(k) The transport's engine: how much a core at each end carries, beside iperf3's UDP and TCP.

    python benchmarks/udp.py [--quick] [--rounds N]

Two processes on one machine, each on a core of its own, over loopback, with datagrams of 1,400 bytes. Ours
does the whole work of a data plane: the sender cuts a transfer's values into datagrams, writes headers and
slices and seals; the receiver reads headers, checks the replay window, opens, checks every field, and
scatters the elements into the transfer's memory. It is in Python, by whole arrays; only the seal is a call
for each datagram.

"With sessions" is the whole transport (two links, a session, rate control, acknowledgements): transfers of
20 MB, a fifth of their blocks of high priority, two under way at any time. For 1 Gb/s the receiver grants
that.

"Flat out" is self-clocked: the receiver tells now and then how much has come, and no more than a few MB are
on their way, so that nothing is lost; what counts is what was received. "At 1 Gb/s" is paced in bursts of at
most 2 ms, and tells which share of a core each end takes. iperf3 sends as fast as it can (its UDP has no
such clock, so some is lost, and what was received counts), and at 1 Gb/s. All take turns, in a new random
order each round.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from atoll.ltp.events import Arrived, Delivered, Lost, Opened
from atoll.ltp.replay import ReplayWindow
from atoll.net.ltplink import LtpLink
from atoll.net.seals import SECRET_BYTES, Opener, Sealer
from atoll.net.udp import Address, Bytes, UdpPort
from atoll.wire.datagrams import (
    DATAGRAM_BYTES,
    HEADER,
    NO_GROUP,
    NOT_SAID,
    SEAL_BYTES,
    SLICE,
    Datagrams,
    Element,
    Kind,
    headers_untrusted,
    payload_bytes,
    split_untrusted,
    write_headers,
)
from common import options, output_folder, write_results

ROUNDS = 5
SECONDS, QUICK_SECONDS = 3.0, 0.5  # of each run
PACED = 1e9  # bits per second
TRANSFER_BYTES = 20_000_000
BURST_SECONDS = 0.002
MOST_ON_THE_WAY = 3 * 2**20  # bytes; below the receive buffer
BURST_ROWS = 450  # flat out: ten system calls
WAIT_SECONDS = 10.0  # for the other end
WARM_SECONDS = 1.0  # in which a session learns the path's rate
RUN_SECONDS = 60.0  # for a run of sessions, at most
SEALED = {"sealed": 1.2, "unsealed": 5.0}  # Gb/s, in Python: the targets
SESSION = 7
SECRET = bytes(range(SECRET_BYTES))
TARGETS = {f"ours{how}, {sealed}": gbps for how in ("", " with sessions") for sealed, gbps in SEALED.items()}


@dataclass(frozen=True)
class Outcome:
    """One run. Gb/s are of whole datagrams (iperf3: of their payload, which is as long), as received."""

    contestant: str
    paced: bool
    gbps: float
    lost: float  # share of what was sent
    sender: float  # cores that it took
    receiver: float
    why: str = ""  # what else is to be known

    @property
    def per_core(self) -> float:
        """Gb/s for each core that the busier end took: what other work on the machine moves little."""
        return self.gbps / max(self.sender, self.receiver, 1e-9)


# -- ours --------------------------------------------------------------------------------------------------


class Cutter:
    """Cuts a transfer into bursts, again and again: headers, slices and elements by whole arrays."""

    def __init__(self, values: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        payload = payload_bytes(DATAGRAM_BYTES)
        self.blocks = values.view(np.uint8).reshape(-1, payload)
        self.elements = payload // values.itemsize
        self._frames = np.zeros(
            (BURST_ROWS, HEADER.itemsize + SLICE.itemsize + payload + SEAL_BYTES), np.uint8
        )
        self._at = self._number = self._iteration = 0

    @property
    def size(self) -> int:
        return self._frames.shape[1]

    def burst(self, most: int) -> Bytes:
        """The next datagrams, at most so many; good until the next burst."""
        rows = min(most, len(self._frames), len(self.blocks) - self._at)
        frames = self._frames[:rows]
        write_headers(frames, Kind.DATA, 0, 0, SESSION, self._number)
        batch = Datagrams(Kind.DATA, frames[:, :-SEAL_BYTES])
        index = np.arange(self._at, self._at + rows)
        slices = batch.slices
        fields = {"transfer": self._iteration, "chunk": 3, "iteration": self._iteration, "highs": 0}
        fields |= {"blocks": len(self.blocks), "group": NO_GROUP, "place": 0, "data": 0, "parity": 0}
        fields |= {"element": Element.FLOAT32, "flags": 0, "scale": 1.0, "count": self.elements}
        for name, value in (fields | {"nonzero": NOT_SAID, "reserved": 0}).items():
            slices[name] = value
        slices["index"] = index
        slices["offset"] = index * self.elements
        batch.elements[:] = self.blocks[self._at : self._at + rows]
        self._number += rows
        self._at = (self._at + rows) % len(self.blocks)
        self._iteration += self._at == 0
        return frames


class Scatterer:
    """Opens and checks what came, and puts it where it belongs in the transfer's memory."""

    def __init__(self, opener: Opener, like: Bytes) -> None:
        self.memory = np.zeros_like(like)
        self.present = np.zeros(len(like), np.bool_)
        self.came = 0
        self.drops: Counter[str] = Counter()
        self._window = ReplayWindow()
        self._opener = opener

    def handle(self, frames: Bytes, sizes: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        for flow in headers_untrusted(frames, sizes, self.drops):
            if (
                not self._window.fresh(flow.numbers).all()
                or not self._opener.open(flow.frames, flow.sizes).all()
            ):
                raise SystemExit("a datagram came twice, or with a broken seal")
            self._window.mark(flow.numbers)
            for batch in split_untrusted(flow.frames, flow.sizes, self.drops):
                index = batch.slices["index"]
                first = int(index[0])
                if int(index[-1]) - first == len(index) - 1 and (np.diff(index) == 1).all():
                    where: Any = slice(first, first + len(index))  # in order: no list of places is needed
                else:
                    where = index
                self.memory[where] = batch.elements
                self.present[where] = True
                self.came += len(batch)


def values() -> np.ndarray[Any, np.dtype[np.float32]]:
    payload = payload_bytes(DATAGRAM_BYTES)
    blocks = TRANSFER_BYTES // payload
    return np.random.default_rng(0).standard_normal(blocks * payload // 4, dtype=np.float32)


def send(pipe: Connection, core: int, sealed: bool, rate: float, seconds: float) -> None:
    """A process: sends for so long at `rate` bits per second (0: flat out)."""
    os.sched_setaffinity(0, {core})
    sealer = Sealer(SECRET, client=True, stripe=0, seal=sealed)
    cutter = Cutter(values())
    with UdpPort(("127.0.0.1", 0)) as port:
        address: Address = pipe.recv()
        poll = select.poll()
        poll.register(port, select.POLLIN)
        sent = credited = 0
        begin, spent = time.perf_counter(), time.process_time()
        while (now := time.perf_counter()) < begin + seconds:
            due = BURST_ROWS
            if rate:
                due = int((now - begin) * rate / 8 / cutter.size) - sent
                most = int(rate * BURST_SECONDS / 8 / cutter.size)
                if due < most // 2:
                    time.sleep((most - due) * cutter.size * 8 / rate)
                    continue
                due = min(due, most)
            elif (sent + due - credited) * cutter.size > MOST_ON_THE_WAY:
                if not poll.poll(WAIT_SECONDS * 1e3):
                    raise SystemExit(f"waited {WAIT_SECONDS:g} s for the receiver's word on what came")
                for word in port.receive():
                    credited = max(credited, int(word.frames.view(np.uint64).max()))
                continue
            frames = cutter.burst(due)
            sealer.seal(frames)
            sent += send_all(port, frames, address)
        wall, spent = time.perf_counter() - begin, time.process_time() - spent
        pipe.send((sent, spent / wall, port.offload.reason))


def send_all(port: UdpPort, frames: Bytes, address: Address) -> int:
    sent, until = port.send(frames, address), time.monotonic() + WAIT_SECONDS
    while sent < len(frames):
        poll = select.poll()
        poll.register(port, select.POLLOUT)
        if time.monotonic() > until or not poll.poll(WAIT_SECONDS * 1e3):
            raise SystemExit(f"waited {WAIT_SECONDS:g} s for room to send")
        sent += port.send(frames[sent:], address)
    return sent


def receive(pipe: Connection, core: int, sealed: bool, tells: bool) -> None:
    """A process: receives until it is told that all is sent; `tells`: how much came, now and then."""
    os.sched_setaffinity(0, {core})
    opener = Opener(SECRET, client=False, stripe=0, seal=sealed)
    right = values().view(np.uint8).reshape(-1, payload_bytes(DATAGRAM_BYTES))
    scatterer = Scatterer(opener, right)
    with UdpPort(("127.0.0.1", 0)) as port:
        pipe.send(port.address)
        poll = select.poll()
        poll.register(port, select.POLLIN)
        begin = end = spent_from = spent = 0.0
        while True:
            if not poll.poll(100):
                if pipe.poll(0):
                    break
                continue
            if not begin:
                begin, spent_from = time.perf_counter(), time.process_time()
            address: Address = ()
            for frames, sizes, address, _ in port.receive():  # noqa: B007
                scatterer.handle(frames, sizes)
            if tells and address:
                port.send(np.array([[scatterer.came]], np.uint64).view(np.uint8), address)
            end, spent = time.perf_counter(), time.process_time() - spent_from
        good = np.array_equal(scatterer.memory[scatterer.present], right[scatterer.present])
        if not good or not scatterer.came or scatterer.drops:
            raise SystemExit(f"what came is not what was sent: {scatterer.drops}")
        size = port.count.received_bytes / max(1, port.count.received)
        pipe.send((scatterer.came, scatterer.came * size * 8 / (end - begin), spent / (end - begin)))


def ours(name: str, sealed: bool, rate: float, seconds: float, cores: tuple[int, int]) -> Outcome:
    context = multiprocessing.get_context("fork")  # what is imported here (torch) need not be again
    (from_sender, to_sender), (from_receiver, to_receiver) = context.Pipe(), context.Pipe()
    sender = context.Process(target=send, args=(to_sender, cores[0], sealed, rate, seconds))
    receiver = context.Process(target=receive, args=(to_receiver, cores[1], sealed, not rate))
    sender.start()
    receiver.start()
    try:
        from_sender.send(heard(from_receiver, receiver, seconds))
        sent, sender_share, why = heard(from_sender, sender, seconds)
        from_receiver.send("that was all")
        came, bits, receiver_share = heard(from_receiver, receiver, seconds)
        for each in (sender, receiver):
            each.join(WAIT_SECONDS)
    finally:
        for each in (sender, receiver):
            each.kill()
    return Outcome(name, bool(rate), bits / 1e9, 1 - came / sent, sender_share, receiver_share, why)


def heard(pipe: Connection, process: Any, seconds: float) -> Any:
    if not pipe.poll(seconds + 2 * WAIT_SECONDS):
        raise SystemExit(f"waited {seconds + 2 * WAIT_SECONDS:g} s for {process.name}")
    return pipe.recv()


# -- ours, with sessions -----------------------------------------------------------------------------------


def send_transfers(pipe: Connection, core: int, sealed: bool) -> None:
    """A process: always has two transfers under way, until it is told to end."""
    os.sched_setaffinity(0, {core})
    sent = values()
    high = np.zeros(len(sent) * sent.itemsize // payload_bytes(DATAGRAM_BYTES), np.bool_)
    high[::5] = True
    with LtpLink("127.0.0.1", name="sender") as link:
        session = link.open(SESSION, SECRET, pipe.recv(), True, seal=sealed)
        iteration = under_way = 0
        begin, spent = time.perf_counter() + WARM_SECONDS, 0.0
        until = begin + RUN_SECONDS
        while not pipe.poll(0):
            if not spent and time.perf_counter() >= begin:
                begin, spent = time.perf_counter(), time.process_time()
            while under_way < 2:
                session.send(3, iteration, sent, high=high)
                iteration, under_way = iteration + 1, under_way + 1
            for event in session.events(WAIT_SECONDS):
                under_way -= isinstance(event, Delivered)
                if isinstance(event, Lost) or time.perf_counter() > until:
                    raise SystemExit(f"the transfers do not end: {event.reason}")
        share = (time.process_time() - spent) / (time.perf_counter() - begin)
        status = session.status().session
        pipe.send((status.lost / max(1, status.sent), share, link.offload))


def receive_transfers(pipe: Connection, core: int, sealed: bool, rate: float, seconds: float) -> None:
    """A process: takes transfers, measures for so long once they run, and grants `rate` bits per second
    (0: it grants nothing)."""
    os.sched_setaffinity(0, {core})
    right = values()
    with LtpLink("127.0.0.1", name="receiver") as link:
        session = link.open(SESSION, SECRET, None, False, seal=sealed)
        pipe.send(link.addresses)
        warm_until = time.perf_counter() + WARM_SECONDS
        begin = spent = 0.0
        while not begin or time.perf_counter() < begin + seconds:
            for event in session.events(WAIT_SECONDS):
                if isinstance(event, Opened) and rate:
                    session.grant(rate / 8, RUN_SECONDS)
                elif isinstance(event, Lost):
                    raise SystemExit(event.reason)
                elif isinstance(event, Arrived) and not begin and time.perf_counter() > warm_until:
                    begin, spent = time.perf_counter(), time.process_time()
                    bytes_before = link.counts()["received_bytes"]
                    if not np.array_equal(event.values[:1000], right[:1000]):
                        raise SystemExit("what came is not what was sent")
        wall, spent = time.perf_counter() - begin, time.process_time() - spent
        pipe.send(((link.counts()["received_bytes"] - bytes_before) * 8 / wall, spent / wall))
        heard(pipe, multiprocessing.parent_process(), RUN_SECONDS)


def sessions(name: str, sealed: bool, rate: float, seconds: float, cores: tuple[int, int]) -> Outcome:
    context = multiprocessing.get_context("fork")
    (from_sender, to_sender), (from_receiver, to_receiver) = context.Pipe(), context.Pipe()
    sender = context.Process(target=send_transfers, args=(to_sender, cores[0], sealed))
    receiver = context.Process(target=receive_transfers, args=(to_receiver, cores[1], sealed, rate, seconds))
    sender.start()
    receiver.start()
    try:
        from_sender.send(heard(from_receiver, receiver, seconds))
        bits, receiver_share = heard(from_receiver, receiver, RUN_SECONDS)
        from_sender.send("end")
        lost, sender_share, why = heard(from_sender, sender, seconds)
        from_receiver.send("end")
        for each in (sender, receiver):
            each.join(WAIT_SECONDS)
    finally:
        for each in (sender, receiver):
            each.kill()
    return Outcome(name, bool(rate), bits / 1e9, lost, sender_share, receiver_share, why)


# -- iperf3 ------------------------------------------------------------------------------------------------


def iperf3(name: str, udp: bool, rate: float, seconds: float, cores: tuple[int, int]) -> Outcome:
    """A server for one test, and a client; as many bytes a write as ours has a datagram. TCP may cut as it
    likes, with segments of at most so many bytes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = str(free.getsockname()[1])
    server = subprocess.Popen(
        ["iperf3", "--server", "--one-off", "--port", number, "--affinity", str(cores[1]), "--forceflush"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            if server.poll() is not None:
                raise SystemExit("iperf3's server ended")
        asked = ["iperf3", "--client", "127.0.0.1", "--port", number, "--affinity", str(cores[0]), "--json"]
        asked += ["--time", str(max(1, round(seconds))), "--bitrate", str(int(rate))]
        asked += ["--udp", "--length", str(DATAGRAM_BYTES)] if udp else ["--set-mss", str(DATAGRAM_BYTES)]
        ended = subprocess.run(
            asked, capture_output=True, text=True, timeout=seconds + 2 * WAIT_SECONDS, check=False
        )
        told = json.loads(ended.stdout)
        if "error" in told:
            raise SystemExit(f"iperf3: {told['error']}")
    finally:
        server.kill()
        server.communicate(timeout=WAIT_SECONDS)
    end = told["end"]
    took = end["cpu_utilization_percent"]
    # Before 3.11 UDP's sum_received has no bytes: what was sent, less what was lost.
    whole = end["sum"] if udp else end["sum_received"]
    lost = end["sum"]["lost_packets"] / max(1, end["sum"]["packets"]) if udp else 0.0
    return Outcome(
        contestant=name,
        paced=bool(rate),
        gbps=whole["bytes"] * (1 - lost) * 8 / whole["seconds"] / 1e9,
        lost=lost,
        sender=took["host_total"] / 100,
        receiver=took["remote_total"] / 100,
        why="" if udp else f"{end['sender_tcp_congestion']}, segments of at most {DATAGRAM_BYTES} bytes",
    )


# -- together ----------------------------------------------------------------------------------------------


def contestants(seconds: float, cores: tuple[int, int]) -> dict[tuple[str, bool], Any]:
    """By name and whether it is paced: what makes one run."""
    found: dict[tuple[str, bool], Any] = {}
    for paced in (False, True):
        rate = PACED if paced else 0.0
        for how, sealed in (("sealed", True), ("unsealed", False)):
            for name, run in ((f"ours, {how}", ours), (f"ours with sessions, {how}", sessions)):
                found[name, paced] = lambda n=name, s=sealed, r=rate, f=run: f(n, s, r, seconds, cores)
        if shutil.which("iperf3"):
            for name, udp in (("iperf3 UDP", True), ("iperf3 TCP", False)):
                found[name, paced] = lambda n=name, u=udp, r=rate: iperf3(n, u, r, seconds, cores)
    return found


def cases(outcomes: Mapping[tuple[str, bool], Sequence[Outcome]]) -> list[dict[str, Any]]:
    found = []
    for (name, paced), runs in outcomes.items():
        rates = [run.gbps for run in runs]
        target = None if paced else TARGETS.get(name)
        found.append(
            {
                "name": name,
                "paced": paced,
                "gbps": {"median": median(rates), "least": min(rates), "most": max(rates)},
                "lost": median(run.lost for run in runs),
                "sender": median(run.sender for run in runs),
                "receiver": median(run.receiver for run in runs),
                "per_core": median(run.per_core for run in runs),
                "why": runs[-1].why,
                "target": target,
                "met": None if target is None else median(rates) >= target,
                "each": [asdict(run) for run in runs],
            }
        )
    return found


def line(case: Mapping[str, Any]) -> str:
    rates = case["gbps"]
    verdict = ""
    if case["target"]:
        verdict = f"; target {case['target']:g}: {'met' if case['met'] else 'MISSED'}"
    return (
        f"{case['name']}, {'at 1 Gb/s' if case['paced'] else 'flat out'}: {rates['median']:.2f} Gb/s "
        f"({rates['least']:.2f} to {rates['most']:.2f}), lost {case['lost']:.2%}; of a core the sender "
        f"{case['sender']:.0%}, the receiver {case['receiver']:.0%}, so {case['per_core']:.2f} Gb/s a core"
        f"{verdict}" + (f" ({case['why']})" if case["why"] else "")
    )


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Left: Gb/s flat out, with each run and the target. Right: the share of a core at 1 Gb/s."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    flat = [case for case in reversed(found) if not case["paced"]]
    paced = [case for case in reversed(found) if case["paced"]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 1.3 + 0.5 * len(flat)), layout="constrained")
    for row, case in enumerate(flat):
        colour = "#2a9d8f" if case["name"].startswith("ours") else "#2b6ca3"
        left.barh(row, case["gbps"]["median"], color=colour, height=0.5, alpha=0.5)
        rates = [each["gbps"] for each in case["each"]]
        left.scatter(rates, [row] * len(rates), s=14, color=colour, zorder=3)
        if case["target"]:
            left.vlines(case["target"], row - 0.32, row + 0.32, color="#c23b22", linewidth=1.5, zorder=4)
    left.set_yticks(range(len(flat)), [case["name"] for case in flat])
    left.set_xlabel("Gb/s flat out, a core at each end\n(red: target)")
    for row, case in enumerate(paced):
        right.barh(row + 0.15, case["sender"] * 100, color="#e9a23b", height=0.28)
        right.barh(row - 0.15, case["receiver"] * 100, color="#9d5c8f", height=0.28)
    right.set_yticks(range(len(paced)), [case["name"] for case in paced])
    right.set_xlabel("% of a core at 1 Gb/s\n(above: sender, below: receiver)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, help=f"rounds of runs (default: {ROUNDS}; with --quick, 1)")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this needs two cores, one for each end")
    if not shutil.which("iperf3"):
        print("iperf3 is not installed: there is nothing beside ours", flush=True)
    order, start = random.Random(1), time.monotonic()
    runs = contestants(QUICK_SECONDS if args.quick else SECONDS, (cores[0], cores[1]))
    outcomes: dict[tuple[str, bool], list[Outcome]] = {each: [] for each in runs}
    for _ in range(args.rounds or (1 if args.quick else ROUNDS)):
        for each in order.sample(list(runs), len(runs)):
            outcomes[each].append(runs[each]())
    found = cases(outcomes)
    for case in found:
        print(line(case), flush=True)
    path = write_results("udp", output_folder(args), found, args.quick)
    draw(found, path.with_suffix(".png"))
    print(f"in {time.monotonic() - start:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
