"""(v) Many at one place: a shard with up to 64 workers, and up to 16 nodes without a server.

    python benchmarks/many.py [--quick] [--only shard|peers]

**A shard.** Hub and shard are processes of their own. A model of 1.05 MB is prepared by a real session;
then 1 to 64 workers that are only connections, all in one process, push a gradient under `asp` and pull
the parameters, each as fast as it is answered. Measured are contributions a second, the time from a push
to its parameters, and the shard's seconds on the processor for each.

**Nodes.** Each node is a worker and its CPU side, on loopback; all have a model of 2.1 MB, and step as
fast as they can under `peers` with `stale_max` 4. Measured are the seconds of a step and the bytes that a
node sends for each. Sixteen nodes on two cores wait for the cores: their time is this machine's.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import atoll
from atoll.core.config import Config, Run, Sync
from atoll.core.events import NodeSeen
from atoll.net.endpoint import Client, poll
from atoll.net.requests import ask
from atoll.observe.journal import JournalReader
from atoll.observe.rundir import DIRECTORY_VARIABLE
from atoll.train.api.place import Place
from atoll.wire.messages import (
    VERSION,
    Arrive,
    Commit,
    Committed,
    Goodbye,
    Heartbeat,
    Hello,
    Parameters,
    Push,
    Refused,
    Shards,
    Welcome,
    WhereAreShards,
    decode_untrusted,
    encode,
)
from common import options, output_folder, write_results
from server import Address, Servers
from support.pool import WorkerPool
from support.served import RUN

WORKERS, QUICK_WORKERS = (1, 2, 4, 8, 16, 32, 64), (1, 4)
NODES, QUICK_NODES = (2, 4, 8, 16), (2, 3)
ALIGNED = 16  # elements: each parameter begins at a multiple of 64 bytes
WIDTH = 14_565  # of the shard's model: 16 to WIDTH to 1
SECONDS, QUICK_SECONDS = 8.0, 2.0
STEPS, QUICK_STEPS, WARM_UP = 30, 6, 5
NODE_WIDTH = 512  # of the nodes' model: 512 to NODE_WIDTH to 512
DEADLINE = 300.0
BEAT = 0.25
HYPERPARAMETERS = [
    {
        "lr": 1e-4,
        "momentum": 0,
        "dampening": 0,
        "weight_decay": 0,
        "nesterov": False,
        "maximize": False,
        "foreach": None,
        "differentiable": False,
        "fused": None,
    }
]


def cpu_of(process: int) -> dict[str, float]:
    """The seconds on the processor so far of the process's own thread, of ZeroMQ's, and of all others."""
    found = {"own": 0.0, "zeromq": 0.0, "others": 0.0}
    for task in Path(f"/proc/{process}/task").iterdir():
        raw = (task / "stat").read_text()
        fields = raw.rpartition(")")[2].split()
        name = "own" if task.name == str(process) else "zeromq" if "(ZMQbg" in raw else "others"
        found[name] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


# -- one shard ---------------------------------------------------------------------------------------------


class Pusher:
    """A worker that is only connections."""

    def __init__(self, address: Address, shard: str, number: int, count: int) -> None:
        self._hub = Client(address.hub, None, limit=2**20, name="hub")
        hello = Hello(version=VERSION, run=RUN, role="worker", token=f"pusher {number} of {count}")
        welcome, _ = ask(self._hub, hello, Welcome, DEADLINE, "a rank")
        self._incarnation = welcome.incarnation
        self.link = Client(shard, None, limit=2**28, name="shard 0")
        hello = Hello(
            version=VERSION, run=RUN, role="worker", worker=welcome.worker, incarnation=self._incarnation
        )
        ask(self.link, hello, Welcome, DEADLINE, "the shard's welcome")
        self.link.send(encode(Arrive(incarnation=self._incarnation)))
        self.link.send(encode(self._commit(2**40)))  # refused, with the number of the next one
        self._next: int | None = None
        self._sent = 0.0
        self._committed = self._got = False
        self.waits: list[float] = []

    def _commit(self, iteration: int) -> Commit:
        return Commit(
            incarnation=self._incarnation,
            iteration=iteration,
            weight=1.0,
            samples=1.0,
            hyperparameters=HYPERPARAMETERS,
        )

    @property
    def is_ready(self) -> bool:
        return self._next is not None

    def push(self, gradient: Any) -> None:
        assert self._next is not None
        self._sent, self._committed, self._got = time.monotonic(), False, False
        push = Push(
            incarnation=self._incarnation,
            iteration=self._next,
            chunk=0,
            chunks_in_all=1,
            present=b"\1" * 4,
            pull=True,
        )
        self.link.send(encode(push), gradient)
        self.link.send(encode(self._commit(self._next)))

    def take(self) -> bool:
        """Take what the shard has sent; whether the contribution is through, with its parameters."""
        while (received := self.link.receive(0)) is not None:
            message = decode_untrusted(received[0])
            if isinstance(message, Refused):
                _, found, number = message.reason.partition("its next is ")
                if self._next is not None or not found:
                    raise SystemExit(f"the shard refuses: {message.reason}")
                self._next = int("".join(filter(str.isdigit, number.split()[0])))
            elif isinstance(message, Committed):
                self._committed = self._committed or message.iteration == self._next
            elif isinstance(message, Parameters):
                self._got = True
        if not (self._committed and self._got and self._sent):
            return False
        assert self._next is not None
        self.waits.append(time.monotonic() - self._sent)
        self._next, self._sent = self._next + 1, 0.0
        return True

    def beat(self) -> None:
        self._hub.send(encode(Heartbeat(run=RUN, incarnation=self._incarnation)))

    def close(self) -> None:
        self._hub.send(encode(Goodbye(incarnation=self._incarnation)))
        self._hub.close()
        self.link.close()


def measure_shard(counts: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """So many workers at one shard, one number after another."""
    found = []
    with Servers(1, 1) as address, address.joined(0, server_settings()) as session:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        session.prepare(model, optimizer)
        model(torch.zeros(1, 16)).sum().backward()
        optimizer.step()
        with Client(address.hub, None, limit=2**20, name="hub") as link:
            hello = Hello(version=VERSION, run=RUN, role="guest")
            ask(link, hello, Welcome, DEADLINE, "a welcome")
            shard = ask(link, WhereAreShards(), Shards, DEADLINE, "the shard")[0].addresses[0]
        elements = sum(-(-each.numel() // ALIGNED) * ALIGNED for each in model.parameters())
        gradient = np.full(elements, 1e-9, np.float32).data
        for count in counts:
            pushers = [Pusher(address, shard, each, count) for each in range(count)]
            found.append(drive(pushers, gradient, seconds, address.shards[0]))
            print(line(found[-1]), flush=True)
            for pusher in pushers:
                pusher.close()
    return found


def server_settings() -> Config:
    return Config(run=Run(strategy="server"), sync=Sync(timeout="60s", consistency="asp"))


def drive(pushers: Sequence[Pusher], gradient: Any, seconds: float, shard: int) -> dict[str, Any]:
    """Let them push for so long, after a second to warm up."""
    started = {id(pusher): False for pusher in pushers}
    beaten, begin, cpu, own = 0.0, 0.0, dict[str, float](), 0.0
    until = time.monotonic() + DEADLINE
    done = 0
    while (now := time.monotonic()) < until:
        if now > beaten + BEAT:
            beaten = now
            for pusher in pushers:
                pusher.beat()
        poll([pusher.link for pusher in pushers], 0.02)
        for pusher in pushers:
            through = pusher.take()
            done += through and bool(begin)
            if through or (pusher.is_ready and not started[id(pusher)]):
                started[id(pusher)] = True
                pusher.push(gradient)
        if not begin and all(len(pusher.waits) >= 2 for pusher in pushers):
            begin, until = now, now + seconds
            cpu, own = cpu_of(shard), time.process_time()
            for pusher in pushers:
                pusher.waits.clear()
    if not begin:
        raise SystemExit(f"{len(pushers)} workers: no contribution of each within {DEADLINE:g} s")
    took = time.monotonic() - begin
    waits = sorted(wait for pusher in pushers for wait in pusher.waits)
    threads = {name: (spent - cpu[name]) / max(1, done) for name, spent in cpu_of(shard).items()}
    each = sum(threads.values())
    return {
        "part": "shard",
        "workers": len(pushers),
        "megabytes": gradient.nbytes / 1e6,
        "contributions": done / took,
        "megabytes_in": done * gradient.nbytes / took / 1e6,
        "wait": statistics.median(waits),
        "wait_most": waits[-1],
        "shard_share": each * done / took,
        "shard_each": each,
        "shard_threads": threads,
        "workers_share": (time.process_time() - own) / took,
        "megabytes_of_each": 2 * gradient.nbytes / 1e6,
        "load": os.getloadavg()[0],
    }


# -- nodes -------------------------------------------------------------------------------------------------


def train_node(place: Place, folder: str, steps: int) -> tuple[float, float, float, int]:
    """A node's steps: seconds, this process's seconds on the processor and its children's, and bytes."""
    os.environ[DIRECTORY_VARIABLE] = folder
    torch.set_num_threads(1)
    config = Config(run=Run(strategy="peers"), sync=Sync(timeout="120s", stale_max=4))
    with atoll.join(config, place=place) as session:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, NODE_WIDTH), nn.Tanh(), nn.Linear(NODE_WIDTH, 512))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        session.prepare(model, optimizer)
        inputs = torch.randn(4, 512)
        start = 0.0
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                start, cpu = time.monotonic(), time.process_time()
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        took, spent = time.monotonic() - start, time.process_time() - cpu
        size = sum(each.numel() * each.element_size() for each in model.parameters())
    return took, spent, float(size), place.rank


def measure_nodes(pool: WorkerPool, count: int, steps: int) -> dict[str, Any]:
    """`count` nodes on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        found = pool.run(train_node, folder, steps, world=count)
        sent = []
        for path in Path(folder).rglob("*.jsonl"):
            told = [each for each in JournalReader(path).read() if isinstance(each, NodeSeen)]
            if told and told[-1].applied:
                sent.append(told[-1].bytes_out / told[-1].applied)
    size = found[0][2]
    seconds = statistics.median(each[0] for each in found) / steps
    return {
        "part": "peers",
        "nodes": count,
        "megabytes": size / 1e6,
        "step": seconds,
        "megabytes_of_each": statistics.mean(sent) / 1e6 if sent else None,
        "of_gradient": statistics.mean(sent) / size if sent else None,
        "load": os.getloadavg()[0],
    }


def line(case: dict[str, Any]) -> str:
    if case["part"] == "shard":
        return (
            f"{case['workers']} workers at a shard: {case['contributions']:.0f} contributions/s of "
            f"{case['megabytes']:.2f} MB, {case['megabytes_in']:.0f} MB/s in and as much out; from push to "
            f"parameters {1e3 * case['wait']:.1f} ms, at most {1e3 * case['wait_most']:.0f} ms; the shard "
            f"takes {case['shard_share']:.2f} of a core, {1e3 * case['shard_each']:.2f} ms each "
            f"({', '.join(f'{name} {1e3 * each:.2f}' for name, each in case['shard_threads'].items())}), the "
            f"workers' process {case['workers_share']:.2f}"
        )
    sent = "?" if case["megabytes_of_each"] is None else f"{case['megabytes_of_each']:.2f}"
    return (
        f"{case['nodes']} nodes: a step takes {1e3 * case['step']:.1f} ms, each sends {sent} MB for "
        f"{case['megabytes']:.2f} MB of gradients"
    )


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Left: the shard's MB/s and the time of a push and pull. Right: a node's bytes and time for a step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shard = [case for case in found if case["part"] == "shard"]
    nodes = [case for case in found if case["part"] == "peers"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for axes, cases, by, value, name, time_of in (
        (left, shard, "workers", "megabytes_in", "MB/s into the shard", "wait"),
        (right, nodes, "nodes", "megabytes_of_each", "MB that a node sends for a step", "step"),
    ):
        counts = [case[by] for case in cases]
        axes.plot(counts, [case[value] for case in cases], "o-", color="#2b6ca3")
        axes.set_ylabel(name, color="#2b6ca3")
        axes.set_xlabel(by)
        axes.set_ylim(bottom=0)
        beside = axes.twinx()
        beside.plot(counts, [1e3 * case[time_of] for case in cases], "s--", color="#e9a23b")
        beside.set_ylabel("ms: push to parameters" if by == "workers" else "ms: a step", color="#e9a23b")
        beside.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--only", choices=("shard", "peers"), help="one of the two parts")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    start = time.monotonic()
    found: list[dict[str, Any]] = []
    if args.only != "peers":
        counts = QUICK_WORKERS if args.quick else WORKERS
        found += measure_shard(counts, QUICK_SECONDS if args.quick else SECONDS)
    if args.only != "shard":
        with WorkerPool(DEADLINE) as pool:
            for count in QUICK_NODES if args.quick else NODES:
                found.append(measure_nodes(pool, count, QUICK_STEPS if args.quick else STEPS))
                print(line(found[-1]), flush=True)
    path = write_results("many", output_folder(args), found, args.quick)
    draw(found, path.with_suffix(".png"))
    print(f"in {time.monotonic() - start:.0f} s; written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
