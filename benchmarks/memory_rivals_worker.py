"""One worker of benchmarks/memory_rivals.py, which starts it: by `atoll run`, by torchrun, or by itself.

    python benchmarks/memory_rivals_worker.py SYSTEM FOLDER PLAN

SYSTEM is one of `SYSTEMS`, PLAN is JSON (`Plan`). The same model, batches, loss and AdamW for all; what is
around the loop is each one's own way, as its documentation shows it. FOLDER/RANK.json gets a `Record`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import atoll
from common import MIB, leave_group
from footprint import Resident
from runs import write_record
from workloads import gpt

RATE, BETAS, DECAY = 1e-3, (0.9, 0.95), 0.1  # of AdamW
TEXT = MIB  # bytes to train on


@dataclass(frozen=True)
class Plan:
    """What a training is: a GPT, `batch` windows a step of each worker, `steps` steps after `warm` ones."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    warm: int
    steps: int
    seed: int

    def model(self) -> gpt.GPT:
        """With its initial values. The head is a matrix of its own: FSDP2 takes no tied parameters."""
        torch.manual_seed(self.seed)
        model = gpt.GPT(self.layers, self.heads, self.width, self.context)
        model.head.weight = nn.Parameter(torch.randn_like(model.embedding.weight) * 0.02)
        return model


@dataclass
class Record:
    """What FOLDER/RANK.json holds."""

    rank: int
    method: str = ""  # where the peak is from
    peak: int = 0  # bytes of the process at most, beyond what it had just before the model was made
    losses: list[float] = field(default_factory=list)  # of this worker's batch, of all steps
    seconds: list[float] = field(default_factory=list)  # of the steps after the warm ones
    cpu: float = 0.0  # seconds of CPU time that all threads spent on such a step


class Job:
    """The model, its batches and its record. To be made when all libraries are loaded and connected."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.record = plan, Record(rank)
        self._windows = gpt.Windows(gpt.read_text(TEXT)[0], plan.context)
        self._resident = Resident()
        self.model = plan.model()

    def batches(self) -> Iterator[Tensor]:
        """Windows of the text, drawn by this worker, for all steps."""
        drawn = torch.Generator().manual_seed(1000 * self.plan.seed + self.record.rank)
        for _ in range(self.plan.warm + self.plan.steps):
            indices = torch.randint(len(self._windows), (self.plan.batch,), generator=drawn).tolist()
            yield torch.stack([self._windows[index] for index in indices])

    def train(self, trained: nn.Module, step: Callable[[Tensor], None]) -> None:
        """`step(loss)` makes the backward, the optimizer's step, and lets the gradients go."""
        for number, windows in enumerate(self.batches()):
            if number == self.plan.warm:
                spent = time.process_time()
            began = time.perf_counter()
            loss = gpt.loss_of(trained, windows)
            step(loss)
            if number >= self.plan.warm:
                self.record.seconds.append(time.perf_counter() - began)
            self.record.losses.append(loss.item())
        self.record.cpu = (time.process_time() - spent) / self.plan.steps

    def train_with(self, trained: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def step(loss: Tensor) -> None:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        self.train(trained, step)

    def ended(self, folder: Path) -> None:
        self.record.peak, self.record.method = self._resident.peak(), self._resident.method
        write_record(folder, self.record.rank, self.record)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)


def plain(folder: Path, plan: Plan) -> None:
    job = Job(plan, 0)
    job.train_with(job.model, adamw(job.model))
    job.ended(folder)


def under_atoll(folder: Path, plan: Plan) -> None:
    """With the budgets of the configuration's table [memory]."""
    with atoll.join() as session:
        job = Job(plan, session.rank)
        optimizer = adamw(job.model)
        session.prepare(job.model, optimizer)
        job.train_with(job.model, optimizer)
        job.ended(folder)


def ddp(folder: Path, plan: Plan) -> None:
    dist.init_process_group("gloo")
    job = Job(plan, dist.get_rank())
    wrapped = DistributedDataParallel(job.model, gradient_as_bucket_view=True)
    job.train_with(wrapped, adamw(wrapped))
    job.ended(folder)
    del wrapped
    leave_group()


def fsdp(folder: Path, plan: Plan, *, offload: bool = False) -> None:
    """FSDP2 as its tutorial has it: each block, then the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("gloo")
    job = Job(plan, dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy: Any = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    for block in job.model.blocks:
        fully_shard(block, mesh=mesh, **policy)
    fully_shard(job.model, mesh=mesh, **policy)
    job.train_with(job.model, adamw(job.model))
    job.ended(folder)
    leave_group()


def deepspeed(folder: Path, plan: Plan) -> None:
    """ZeRO-3, with parameters and optimizer offloaded to the CPU."""
    import deepspeed as rival

    rival.init_distributed(dist_backend="gloo")
    job = Job(plan, dist.get_rank())
    engine, *_ = rival.initialize(
        model=job.model,
        model_parameters=job.model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": plan.batch,
            "gradient_clipping": 0.0,  # else it is 1: nobody else clips
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": RATE, "betas": BETAS, "weight_decay": DECAY},
            },
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "cpu"},
            },
        },
    )

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    job.train(engine, step)
    job.ended(folder)
    leave_group()


SYSTEMS: dict[str, Callable[[Path, Plan], None]] = {
    "plain": plain,
    "atoll": under_atoll,
    "ddp": ddp,
    "fsdp": fsdp,
    "fsdp-offload": partial(fsdp, offload=True),
    "deepspeed": deepspeed,
}


def main() -> None:
    system, folder, plan = sys.argv[1:]
    torch.set_num_threads(1)
    SYSTEMS[system](Path(folder), Plan(**json.loads(plan)))


if __name__ == "__main__":
    main()
