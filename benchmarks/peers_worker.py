"""One worker of benchmarks/peers.py, which starts it in a lab, by way of `atoll lab run`.

    python benchmarks/peers_worker.py FOLDER PLAN

PLAN is JSON (`Plan`). The same model, data, optimizer and emulated computing for
all; what is around the loop is each one's own way. FOLDER/NODE.json gets when each step was made.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import atoll
from atoll.core.config import LAB_WORKER_VARIABLE
from common import leave_group
from runs import write_record

FIRST, PORT = "site0", 29500  # where DistributedDataParallel's nodes meet
SPREAD = float(np.log(3) / 2.3263)  # of the lognormal's logarithm: the 99th percentile is 3 medians
FORWARD = 1 / 3  # of the computing; backward is the rest
LAYERS, WIDTH = 4, 204  # 669 kB of gradients
TRIES = 5  # of each exchange that is measured before the training


@dataclass(frozen=True)
class Plan:
    """What a training is. A node takes a draw of its own from the lognormal for each step, times its `slow`,
    for `batch` samples, and in proportion for others."""

    system: str  # "alone", "ddp", "atoll"
    steps: int
    median: float  # seconds of a step's computing
    batch: int
    slow: list[float]  # by node
    shares: list[int]  # samples of each node's batch, where they are not dealt
    seed: int
    dealt: bool = False  # under Atoll: by session.batches

    def draws(self, node: int) -> Any:
        """The seconds of this node's steps, the same for every contestant."""
        drawn = np.random.default_rng((self.seed, node)).standard_normal(self.steps)
        return self.median * np.exp(SPREAD * drawn)


@dataclass
class Record:
    """What FOLDER/NODE.json holds; times of steps are in seconds since the epoch."""

    node: int
    gradients: int = 0  # bytes of the model's
    steps: list[float] = field(default_factory=list)  # when each was made
    samples: list[int] = field(default_factory=list)  # of each
    computed: list[float] = field(default_factory=list)  # seconds that were slept in each
    # DistributedDataParallel: seconds of a full exchange, of an all-reduce, and of its own steps that do
    # not compute
    full: list[float] = field(default_factory=list)
    all_reduce: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)  # bytes of each of DistributedDataParallel's


class Sleep(torch.autograd.Function):
    """Its input, whose gradient comes after a time."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class Network(nn.Module):
    """Layers that sleep `seconds` in forward and backward in all. Each has its part of backward, before its
    gradients come: so who can send the first ones while the next are computed may do so. Beyond that, sleeps
    are few: who wakes on a loaded machine is late each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.seconds = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(FORWARD * self.seconds)
        hidden = inputs
        for layer in self.layers:
            hidden = Sleep.apply(torch.tanh(layer(hidden)), (1 - FORWARD) * self.seconds / LAYERS)
        return hidden

    @property
    def gradient_bytes(self) -> int:
        return sum(4 * parameter.numel() for parameter in self.parameters())


def train(
    plan: Plan,
    record: Record,
    model: Network,
    trained: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[list[Tensor]],
) -> None:
    """Train on `batches`; `trained` is what is called: the model, or a wrapper of it."""
    slow = plan.slow[record.node]
    for seconds, (inputs,) in zip(plan.draws(record.node), batches, strict=False):
        model.seconds = slow * seconds * len(inputs) / plan.batch
        step(trained, optimizer, inputs)
        record.steps.append(time.time())
        record.samples.append(len(inputs))
        record.computed.append(model.seconds)


def step(trained: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    (trained(inputs) - inputs.roll(1, 1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def data(samples: int, seed: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed)))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def alone(plan: Plan, record: Record, model: Network) -> None:
    """No synchronisation: each node trains a model of its own."""
    batch = plan.shares[record.node]
    batches = DataLoader(data(batch * plan.steps, plan.seed + record.node), batch)
    train(plan, record, model, model, optimizer_of(model), batches)


def ddp(plan: Plan, record: Record, model: Network) -> None:
    world = len(plan.shares)
    dist.init_process_group("gloo", init_method=f"tcp://{FIRST}:{PORT}", rank=record.node, world_size=world)
    full = FullExchange(model.gradient_bytes)
    record.full = measured(full, full.prepare)
    gradients = torch.zeros(model.gradient_bytes // 4)
    record.all_reduce = measured(lambda: dist.all_reduce(gradients))
    # A bucket for each layer: with torch's own 25 MiB a model this small would have one, and nothing could
    # hide. With twice as many, or half, it is slower.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=model.gradient_bytes / LAYERS / 2**20)
    optimizer, batch = optimizer_of(wrapped), plan.shares[record.node]
    record.bare = measured(lambda: step(wrapped, optimizer, torch.ones(batch, WIDTH)))
    training = data(batch * world * plan.steps, plan.seed)
    sampler: Any = DistributedSampler(training, world, record.node, seed=plan.seed)
    train(plan, record, model, wrapped, optimizer, DataLoader(training, batch, sampler=sampler))
    told = wrapped._get_ddp_logging_data()
    record.buckets = [int(size) for size in str(told["rebuilt_bucket_sizes"]).split(",")]
    leave_group()


class FullExchange:
    """So many bytes of each node to each of the others, at once."""

    def __init__(self, size: int) -> None:
        self._others = [node for node in range(dist.get_world_size()) if node != dist.get_rank()]
        self._own = torch.zeros(size // 4)
        self._received = [torch.empty(size // 4) for _ in self._others]

    def prepare(self) -> None:
        """All say that they are ready to receive; else Gloo says so behind what is being sent, and then
        nothing comes until all of that is there."""
        pairs = zip(self._received, self._others, strict=True)
        self._works = [dist.irecv(into, node) for into, node in pairs]

    def __call__(self) -> None:
        self._works += [dist.isend(self._own, node) for node in self._others]
        for work in self._works:
            assert work is not None
            work.wait()


def measured(exchange: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> list[float]:
    """Seconds until the last node had everything, of several tries after one that counts for nothing."""
    seconds = []
    for _ in range(1 + TRIES):
        prepare()
        dist.barrier()
        begin = time.perf_counter()
        exchange()
        took = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(float(took))
    return seconds[1:]


def under_atoll(plan: Plan, record: Record, model: Network) -> None:
    with atoll.join() as session:
        optimizer = optimizer_of(model)
        session.prepare(model, optimizer)
        if plan.dealt:
            training = data(plan.steps * session.config.sync.global_batch, plan.seed)
            loader = DataLoader(training, batch_sampler=session.batches(training, seed=plan.seed, ahead=0))
        else:
            batch = plan.shares[record.node]
            training = data(batch * len(plan.shares) * plan.steps, plan.seed)
            loader = DataLoader(training, batch, sampler=session.sampler(training, seed=plan.seed))
        train(plan, record, model, model, optimizer, loader)


def main() -> None:
    folder, plan = Path(sys.argv[1]), Plan(**json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    model = Network()
    record = Record(node=int(os.environ[LAB_WORKER_VARIABLE]), gradients=model.gradient_bytes)
    {"alone": alone, "ddp": ddp, "atoll": under_atoll}[plan.system](plan, record, model)
    write_record(folder, record.node, record)


if __name__ == "__main__":
    main()
