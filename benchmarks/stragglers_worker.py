"""One worker of benchmarks/stragglers.py, which starts it, by torchrun or by `atoll run`.

    python benchmarks/stragglers_worker.py ddp|atoll FOLDER PLAN

PLAN is JSON (`Plan`). The same model, data, optimizer and emulated computing for both; what is around the
loop is each one's own way. FOLDER/RANK.json gets when each step was made, and the held-out loss at points of
time, which is worked out after the training from copies of the parameters.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

import atoll
from common import MIB, leave_group
from runs import write_record
from workloads import gpt, gpt_adamw

BATCH = 4  # windows of a worker's step
CONTEXT = 64
TESTED = 512  # windows of the held-out loss
WARM_UP = 40  # steps
SNAPSHOTS, LEAST_BETWEEN = 40, 1.0  # copies of the parameters over a training, and seconds between two


@dataclass(frozen=True)
class Plan:
    """What a training is. `computing` is each worker's forward and backward, in seconds; `seconds` is how
    long all of it is to take: the learning rate goes by that under Atoll, and by steps under DDP."""

    computing: list[float]  # by rank
    windows: int  # of the text, each used once, over all workers
    seconds: float
    seed: int
    held_out: bool  # whether the loss is of interest

    @property
    def looks(self) -> float:
        """Seconds between two copies of the parameters."""
        return max(LEAST_BETWEEN, self.seconds / SNAPSHOTS)


class Emulated(nn.Module):
    """`module`, taking `seconds` for forward and backward in all, by sleeping in forward.

    What is slept makes room for a backward as long as the median of this worker's latest ones was: its CPU
    time, since what others keep it waiting for is no computing.
    """

    def __init__(self, module: nn.Module, seconds: float) -> None:
        super().__init__()
        self.module = module
        self.seconds = seconds
        self._backward: list[float] = [0.0]

    def forward(self, tokens: Tensor) -> Tensor:
        begin = time.perf_counter()
        out: Tensor = self.module(tokens)
        backward = sorted(self._backward[-9:])[len(self._backward[-9:]) // 2]
        time.sleep(max(0.0, begin + self.seconds - backward - time.perf_counter()))
        return out

    def backward(self, loss: Tensor) -> None:
        spent = time.thread_time()
        loss.backward()  # type: ignore[no-untyped-call]
        self._backward.append(time.thread_time() - spent)


@dataclass
class Record:
    """What FOLDER/RANK.json holds; times are in seconds since the epoch."""

    rank: int
    samples: int = BATCH  # of a step
    steps: list[float] = field(default_factory=list)  # when each was made
    held_out: list[tuple[float, float]] = field(default_factory=list)  # (when, nats)


class Snapshots:
    """Copies of a model's parameters now and then, and what they are worth afterwards."""

    def __init__(self, model: nn.Module, every: float) -> None:
        self._model, self._every = model, every
        self._kept: list[tuple[float, dict[str, Tensor]]] = []

    def take(self, now: float, last: bool = False) -> None:
        if last or not self._kept or now - self._kept[-1][0] >= self._every:
            copy = {name: value.detach().clone() for name, value in self._model.state_dict().items()}
            self._kept.append((now, copy))

    @torch.no_grad()
    def evaluate(self, windows: Tensor, only_last: bool) -> list[tuple[float, float]]:
        found = []
        for when, state in self._kept[-1:] if only_last else self._kept:
            self._model.load_state_dict(state)
            found.append((when, float(gpt.loss_of(self._model, windows))))
        return found


def parts(plan: Plan) -> tuple[nn.Module, Subset[Tensor], Tensor]:
    """The model, what it is trained on, and what is held out."""
    text, rest = gpt.read_text(4 * MIB)
    windows, others = gpt.Windows(text, CONTEXT), gpt.Windows(rest, CONTEXT)
    tested = torch.stack([others[i] for i in range(0, len(others), max(1, len(others) // TESTED))])
    torch.manual_seed(plan.seed)
    model = gpt.GPT(layers=2, heads=4, width=64, context=CONTEXT)
    chosen = torch.randperm(len(windows))[: plan.windows].tolist()
    return model, Subset(windows, chosen), tested


def loop(
    record: Record,
    model: Emulated,
    trained: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Tensor],
    clip: Callable[[], object],
    part: Callable[[int], float],
    snapshots: Snapshots | None,
) -> None:
    """Train on `batches`; `trained` is what is called: the model, or a wrapper of it."""
    scheduler = LambdaLR(optimizer, lambda step: gpt.rate(step, part(step), WARM_UP))
    for windows in batches:
        model.backward(gpt.loss_of(trained, windows))
        clip()
        optimizer.step()
        optimizer.zero_grad()
        record.steps.append(time.time())
        if snapshots is not None:
            snapshots.take(record.steps[-1])
        scheduler.step()
    if snapshots is not None:
        snapshots.take(time.time(), last=True)


def under_ddp(plan: Plan, record: Record) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    record.rank = rank
    inner, training, tested = parts(plan)
    model = Emulated(inner, plan.computing[rank])
    wrapped = DistributedDataParallel(model)
    sampler: Any = DistributedSampler(training, world, rank, seed=plan.seed, drop_last=True)
    batches = DataLoader(training, BATCH, sampler=sampler, drop_last=True)
    snapshots = Snapshots(inner, plan.looks) if plan.held_out and rank == 0 else None
    loop(
        record, model, wrapped, gpt_adamw(wrapped, lr=3e-3, betas=(0.9, 0.95)), batches,
        lambda: nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0),
        lambda step: step / len(batches), snapshots,
    )  # fmt: skip
    leave_group()
    if snapshots is not None:
        record.held_out = snapshots.evaluate(tested, only_last=False)


def under_atoll(plan: Plan, record: Record) -> None:
    inner, training, tested = parts(plan)
    with atoll.join() as session:
        record.rank = session.rank
        model = Emulated(inner, plan.computing[session.rank])
        optimizer = gpt_adamw(model, lr=3e-3, betas=(0.9, 0.95))
        session.prepare(model, optimizer)
        batches = DataLoader(training, BATCH, sampler=session.sampler(training, seed=plan.seed))
        snapshots = Snapshots(inner, plan.looks) if plan.held_out else None
        begin = time.time()
        loop(
            record, model, model, optimizer, batches, lambda: session.clip_grad_norm_(1.0),
            # Workers make unlike numbers of steps: the clock says how far the run is.
            lambda _step: (time.time() - begin) / plan.seconds, snapshots,
        )  # fmt: skip
    if (
        snapshots is not None
    ):  # any worker's parameters are the run's: one curve is enough, and the last of each
        record.held_out = snapshots.evaluate(tested, only_last=record.rank != 0)


def main() -> None:
    system, folder, plan = sys.argv[1], Path(sys.argv[2]), Plan(**json.loads(sys.argv[3]))
    torch.set_num_threads(1)
    record = Record(rank=-1)
    {"ddp": under_ddp, "atoll": under_atoll}[system](plan, record)
    write_record(folder, record.rank, record)


if __name__ == "__main__":
    main()
