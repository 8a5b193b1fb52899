"""One worker of benchmarks/peers_rivals.py, which starts it, by `atoll run`, by torchrun or by itself.

    python benchmarks/peers_rivals_worker.py SYSTEM FOLDER PLAN [RANK]

SYSTEM is one of `SYSTEMS`, PLAN is JSON (`Plan`). The same model, data, optimizer and emulated computing for
all; what is around the loop is each one's own way, as its documentation shows it. FOLDER/RANK.json gets the
held-out loss at points of time, worked out after the training from copies of the parameters.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, Subset

import atoll
from common import MIB, leave_group
from runs import write_record
from stragglers_worker import CONTEXT, TESTED, Emulated, Snapshots
from workloads import gpt, gpt_adamw

RATE = 2e-3  # of learning; constant, since systems differ in what they call a step
LOOK = 1.0  # seconds between two copies of the parameters
AGREE_SECONDS = 120.0  # for all peers to be there


@dataclass(frozen=True)
class Plan:
    """What a training is. It ends after `steps` steps of the model; where peers need not make equally many,
    after `seconds` too."""

    computing: list[float]  # seconds of a worker's batch of `batch` windows, by rank
    batch: int
    steps: int
    seconds: float
    seed: int

    @property
    def whole(self) -> int:
        """Windows of a step, over all workers."""
        return self.batch * len(self.computing)


@dataclass
class Record:
    """What FOLDER/RANK.json holds. Times are in seconds since the epoch."""

    rank: int
    begin: float = 0.0  # when the first batch was begun
    end: float = 0.0
    steps: int = 0  # of the model
    batches: int = 0  # that this worker computed
    held_out: list[tuple[float, float]] = field(default_factory=list)  # (when, nats)


class Job:
    """The model, what it is trained on, and its record: what all systems have in common."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.record = plan, Record(rank)
        text, rest = gpt.read_text(4 * MIB)
        self.windows, others = gpt.Windows(text, CONTEXT), gpt.Windows(rest, CONTEXT)
        self.tested = torch.stack([others[i] for i in range(0, len(others), max(1, len(others) // TESTED))])
        torch.manual_seed(plan.seed)
        self.inner = gpt.GPT(layers=2, heads=4, width=64, context=CONTEXT)
        self.model = Emulated(self.inner, plan.computing[rank])
        self._snapshots = Snapshots(self.inner, LOOK)

    def batches(self) -> Iterator[Tensor]:
        """Windows of the text, drawn by this worker, without end."""
        drawn = torch.Generator().manual_seed(1000 * self.plan.seed + self.record.rank)
        count = self.plan.batch * self.plan.steps * len(self.plan.computing)
        sampler = RandomSampler(self.windows, replacement=True, num_samples=count, generator=drawn)
        yield from DataLoader(self.windows, self.plan.batch, sampler=sampler)

    def compute(self, trained: nn.Module, windows: Tensor) -> None:
        """Forward and backward; `trained` is what is called: the model, or a wrapper of it. A batch of
        another size takes its part of the time."""
        self.record.begin = self.record.begin or time.time()
        self.model.seconds = self.plan.computing[self.record.rank] * len(windows) / self.plan.batch
        self.model.backward(gpt.loss_of(trained, windows))

    def stepped(self, steps: int, seconds: float = float("inf")) -> bool:
        """Note that the model has made so many steps; whether the training is over."""
        now = time.time()
        self.record.steps, self.record.end = steps, now
        self.record.batches += 1
        over = steps >= self.plan.steps or now - self.record.begin > seconds
        self._snapshots.take(now, last=over)
        return over

    def look(self) -> None:
        """Copy the parameters as they are now."""
        self._snapshots.take(time.time(), last=True)

    def ended(self, folder: Path) -> None:
        """Work out the held-out losses, on the first worker; on others of the last parameters alone."""
        self.record.held_out = self._snapshots.evaluate(self.tested, only_last=self.record.rank != 0)
        write_record(folder, self.record.rank, self.record)


def optimizer_of(parameters: nn.Module) -> torch.optim.Optimizer:
    return gpt_adamw(parameters, lr=RATE, betas=(0.9, 0.95))


def under_atoll(folder: Path, plan: Plan, _rank: int) -> None:
    """Under peers a batch is dealt by speed; under ring it is not."""
    with atoll.join() as session:
        job = Job(plan, session.rank)
        optimizer = optimizer_of(job.model)
        session.prepare(job.model, optimizer)
        drawn = torch.randperm(len(job.windows))[: plan.whole * plan.steps].tolist()
        training = Subset(job.windows, drawn)
        sampler: Any = session.batches(training, seed=plan.seed)
        for steps, windows in enumerate(DataLoader(training, batch_sampler=sampler), start=1):
            job.compute(job.model, windows)
            optimizer.step()
            optimizer.zero_grad()
            if job.stepped(steps):
                break
        session.barrier()  # from then on the parameters have all contributions in them, and are alike
        job.look()
    job.ended(folder)


def ddp(folder: Path, plan: Plan, _rank: int) -> None:
    dist.init_process_group("gloo")
    job = Job(plan, dist.get_rank())
    wrapped = DistributedDataParallel(job.model)
    optimizer = optimizer_of(wrapped)
    for steps, windows in enumerate(job.batches(), start=1):
        job.compute(wrapped, windows)
        optimizer.step()
        optimizer.zero_grad()
        if job.stepped(steps):
            break
    leave_group()
    job.ended(folder)


def torchft(folder: Path, plan: Plan, rank: int) -> None:
    """As torchft's train_ddp.py: a replica of one worker; the lighthouse is $TORCHFT_LIGHTHOUSE."""
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel as Replicated
    from torchft import Manager, Optimizer, ProcessGroupGloo

    job = Job(plan, rank)
    inner = optimizer_of(job.model)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load_state_dict(state: dict[str, Any]) -> None:
        job.model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=len(plan.computing),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": job.model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"worker_{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=30),
    )
    wrapped, optimizer = Replicated(manager, job.model), Optimizer(manager, inner)
    for windows in job.batches():
        optimizer.zero_grad()  # which begins the quorum
        job.compute(wrapped, windows)
        optimizer.step()
        if job.stepped(manager.current_step()):
            break
    meet(folder, rank, len(plan.computing))  # who leaves sooner takes the others' last step with it
    manager.shutdown(wait=False)
    job.ended(folder)


def hivemind(folder: Path, plan: Plan, rank: int, delayed: bool = False) -> None:
    """As hivemind's quickstart and its guide to settings have it. An epoch is a step of the model: all peers'
    gradients, until together they are of a whole batch. `delayed`: gradients are averaged, and the optimizer
    steps, while the next ones are computed.

    Its defaults are for rounds of minutes. For steps as short as these, groups form as soon as all peers are
    in (`target_group_size`), and progress is told ten times a second; parameters are averaged every tenth
    step.
    """
    from hivemind import DHT, Optimizer
    from hivemind.optim.grad_averager import GradientAverager

    known = folder / "peers.txt"
    peers = [] if rank == 0 else awaited(known).split()
    patience = {"startup_timeout": AGREE_SECONDS, "bootstrap_timeout": 30.0, "wait_timeout": 10.0}
    dht = DHT(initial_peers=peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True, **patience)
    if rank == 0:
        known.with_suffix(".new").write_text("\n".join(map(str, dht.get_visible_maddrs())), encoding="utf-8")
        known.with_suffix(".new").replace(known)
    job = Job(plan, rank)
    plain = optimizer_of(job.model)
    groups = {"target_group_size": len(plan.computing), "request_timeout": 0.5}
    optimizer = Optimizer(
        dht=dht,
        run_id="atoll-benchmark",
        target_batch_size=plan.whole,
        batch_size_per_step=plan.batch,
        params=[{key: own[key] for key in ("params", "weight_decay")} for own in plain.param_groups],
        optimizer=lambda params: torch.optim.AdamW(params, lr=RATE, betas=(0.9, 0.95)),
        offload_optimizer=True,
        delay_optimizer_step=delayed,
        delay_grad_averaging=delayed,
        matchmaking_time=1.0,
        averaging_timeout=10.0,
        average_state_every=10,
        averager_opts=groups,
        grad_averager_factory=partial(GradientAverager, **groups),
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.1},
    )
    meet(folder, rank, len(plan.computing))
    for windows in job.batches():
        job.compute(job.model, windows)
        optimizer.step()
        optimizer.zero_grad()
        if job.stepped(optimizer.local_epoch, plan.seconds):
            break
    meet(folder, rank, len(plan.computing), "ended")
    job.ended(folder)
    optimizer.shutdown()
    dht.shutdown()
    os._exit(0)  # its threads may outlive it


def meet(folder: Path, rank: int, world: int, word: str = "there") -> None:
    """Return when all workers have come here."""
    (folder / f"{word}-{rank}").touch()
    for other in range(world):
        awaited(folder / f"{word}-{other}")


def awaited(path: Path) -> str:
    until = time.monotonic() + AGREE_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            raise SystemExit(f"{path.name} was not there within {AGREE_SECONDS:g} s")
        time.sleep(0.05)
    return path.read_text(encoding="utf-8")


SYSTEMS: dict[str, Callable[[Path, Plan, int], None]] = {
    "atoll": under_atoll,
    "ddp": ddp,
    "torchft": torchft,
    "hivemind": hivemind,
    "hivemind-delayed": partial(hivemind, delayed=True),
}


def main() -> None:
    system, folder, plan, *rank = sys.argv[1:]
    torch.set_num_threads(1)
    SYSTEMS[system](Path(folder), Plan(**json.loads(plan)), int(rank[0]) if rank else -1)


if __name__ == "__main__":
    main()
