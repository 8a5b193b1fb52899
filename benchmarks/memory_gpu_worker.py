"""One run of benchmarks/memory_gpu.py, which starts it.

    python benchmarks/memory_gpu_worker.py SYSTEM FOLDER PLAN

SYSTEM is one of `SYSTEMS`, PLAN is JSON (`Plan`). The same model, tokens and AdamW for all, in bfloat16.
FOLDER/0.json gets a `Record`. Without a GPU all of it runs on the CPU; what a GPU alone can say is left out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import atoll
from footprint import Resident
from runs import write_record
from workloads import gpt

TO_DEVICE, TO_HOST = "to_device", "to_host"
COPIES = {"Memcpy HtoD": TO_DEVICE, "Memcpy DtoH": TO_HOST}  # as the profiler names them
HEAD = 128  # features of an attention head


@dataclass(frozen=True)
class Plan:
    """A GPT on random bytes: `warm` steps, `steps` that are timed, `profiled` ones under the profiler."""

    layers: int
    width: int
    context: int
    batch: int
    warm: int
    steps: int
    profiled: int
    budget: float = 0.0  # Atoll's for the device, as a part of the parameters' bytes

    @property
    def parameters(self) -> int:
        """How many: embedding and head, and in each block four matrices, two norms and two biases."""
        w = self.width
        return 2 * gpt.VOCABULARY * w + 2 * w + self.layers * (12 * w * w + 9 * w)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.context

    def model(self, device: torch.device) -> gpt.GPT:
        """With its initial values, in bfloat16. The head is a matrix of its own: FSDP2 takes no tied ones."""
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with device:
            model = gpt.GPT(self.layers, max(1, self.width // HEAD), self.width, self.context)
            model.head = nn.Linear(self.width, gpt.VOCABULARY, bias=False)
        torch.set_default_dtype(torch.float32)
        return model


@dataclass
class Record:
    """What FOLDER/0.json holds. None: not known without a GPU."""

    device: str = ""  # the GPU's name
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0  # of a step
    device_making: int | None = None  # bytes allocated at most, until all was in its place
    device_peak: int | None = None  # the same from then on
    host_peak: int = 0  # bytes of the process at most, beyond what it had before the model was made
    idle: float | None = None  # part of the profiled steps in which no kernel ran
    copied: dict[str, int] | None = None  # bytes of a step by direction, as the profiler saw them
    figures: dict[str, Any] = field(default_factory=dict)  # Atoll's own


class Job:
    """The steps, and their record."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.record = plan, Record()
        self.has_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.has_gpu else torch.device("cpu")
        if self.has_gpu:
            self.record.device = torch.cuda.get_device_name(self.device)
            torch.zeros(1, device=self.device)  # the context and its libraries are not the model's
        self._drawn = torch.Generator().manual_seed(0)
        self._resident = Resident()

    def settle(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """All steps. The model has its memory by now."""
        if self.has_gpu:
            self.record.device_making = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        losses = self._steps(model, optimizer, self.plan.warm)
        began = time.perf_counter()
        losses += self._steps(model, optimizer, self.plan.steps)
        self.record.seconds = (time.perf_counter() - began) / self.plan.steps
        self.record.losses = [loss.item() for loss in losses]
        if self.has_gpu:
            self.record.device_peak = torch.cuda.max_memory_allocated()
            self._profile(model, optimizer)
        self.record.host_peak = self._resident.peak()

    def _steps(self, model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[Tensor]:
        """Nothing waits for the device within, unless the system makes it."""
        losses = []
        for _ in range(count):
            shape = (self.plan.batch, self.plan.context + 1)
            windows = torch.randint(gpt.VOCABULARY, shape, generator=self._drawn).to(self.device)
            loss = gpt.loss_of(model, windows)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        self.settle()
        return losses

    def _profile(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            began = time.perf_counter()
            self._steps(model, optimizer, self.plan.profiled)
            seconds = time.perf_counter() - began
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            seen = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        self.record.idle = 1 - busy(seen) / seconds
        self.record.copied = {way: n // self.plan.profiled for way, n in copied(seen).items()}


def busy(seen: Iterable[Mapping[str, Any]]) -> float:
    """Seconds in which a kernel ran, of a trace's events (times in microseconds)."""
    spans = sorted((each["ts"], each["ts"] + each["dur"]) for each in seen if each.get("cat") == "kernel")
    total, end = 0.0, float("-inf")
    for begins, ends in spans:
        total += max(0.0, ends - max(begins, end))
        end = max(end, ends)
    return total / 1e6


def copied(seen: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes copied by direction, of a trace's events."""
    found = {TO_DEVICE: 0, TO_HOST: 0}
    for each in seen:
        for name, way in COPIES.items():
            if each.get("cat") == "gpu_memcpy" and each["name"].startswith(name):
                found[way] += each["args"]["bytes"]
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain(job: Job) -> None:
    model = job.plan.model(job.device)
    job.train(model, adamw(model))


def under_atoll(job: Job) -> None:
    """Not closed at the end: `close()` puts the whole model on the device."""
    nbytes = int(job.plan.budget * job.plan.parameters * torch.bfloat16.itemsize)
    memory = atoll.Memory(device=str(nbytes))
    with atoll.memory.init(memory):
        model = job.plan.model(job.device)
    optimizer = adamw(model)
    fitted = atoll.memory.fit(model, optimizer, memory=memory)
    job.train(model, optimizer)
    it, largest = fitted.stats(), max(chunk.nbytes for chunk in fitted.chunk_map.chunks)
    job.record.figures = {
        "device_budget": it.device_budget,
        "device_arena": it.device_peak,
        "host_arena": it.host_peak,
        "step_moves": it.step_moves,
        "step_nbytes": it.step_nbytes,
        "optimum": it.optimum,  # moves to the device of a step
        "optimum_nbytes": None if it.optimum is None else it.optimum * largest,  # at most
        "waited": it.waited / max(1, it.steps),  # seconds a step
        "plan": fitted.plan.reason,
    }


def fsdp_offload(job: Job) -> None:
    """FSDP2 as its tutorial has it, each block, then the root, in a group of one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    backend = "cpu:gloo,cuda:nccl" if job.has_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model = job.plan.model(job.device)
    mesh = init_device_mesh(job.device.type, (1,))
    policy = CPUOffloadPolicy(pin_memory=job.has_gpu)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    job.train(model, adamw(model))


SYSTEMS: dict[str, Callable[[Job], None]] = {
    "plain": plain,
    "atoll": under_atoll,
    "fsdp-offload": fsdp_offload,
}


def main() -> None:
    system, folder, plan = sys.argv[1:]
    job = Job(Plan(**json.loads(plan)))
    SYSTEMS[system](job)
    write_record(Path(folder), 0, job.record)
    sys.stdout.flush()
    os._exit(0)  # nothing is closed: what is torn down late may wait for what is gone


if __name__ == "__main__":
    main()
