"""(c) The peak memory of a worker, against a closed formula, with DistributedDataParallel's beside it.

    python benchmarks/footprint.py [--quick]

Each case runs in processes of its own: a model of large linear layers takes a few steps on a tiny batch, so
that parameters, gradients and optimizer state are nearly all of the memory. The peak is the highest resident
set since just before the model was made, less what was resident then.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import atoll
from atoll.chunks import ChunkMap, lay_out
from atoll.core.config import Config
from atoll.tensors.binding import specs_of
from common import MIB, leave_group, options, output_folder, write_results

WITHIN = 0.10  # of the formula
STEPS = 3  # the peak is reached in the second: gradients, optimizer state and a new gradient at once
BATCH = 4


ATOLL, PLAIN, DDP, DDP_VIEWS = "Atoll", "plain PyTorch", "DDP", "DDP with bucket views"
MARKERS = {PLAIN: "o", DDP: "s", DDP_VIEWS: "D"}


@dataclass(frozen=True)
class Shape:
    """A model of `layers` linear layers of `width` x `width`, with biases."""

    name: str
    width: int
    layers: int

    def make(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.layers)))


@dataclass(frozen=True)
class Optimizer:
    """`state`: values kept for each parameter; `temporaries`: further ones that a step holds at once."""

    name: str
    state: int
    temporaries: int

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.name == "SGD with momentum":
            return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=self.name == "AdamW fused")


SHAPES = {shape.name: shape for shape in (Shape("large", 4096, 3), Shape("middling", 2048, 12))}
OPTIMIZERS = {
    kind.name: kind
    for kind in (
        Optimizer("AdamW fused", state=2, temporaries=0),
        Optimizer("AdamW", state=2, temporaries=3),  # its loop's sqrt(v), and that divided by its correction
        Optimizer("SGD with momentum", state=1, temporaries=0),
    )
}
CASES = [
    ("large", "AdamW fused"),
    ("large", "AdamW"),
    ("large", "SGD with momentum"),
    ("middling", "AdamW fused"),
]
QUICK_CASES = [("large", "SGD with momentum")]


# -- the formula -------------------------------------------------------------------------------------------


def peak_bytes(
    chunk_map: ChunkMap, *, workers: int, state: int, temporaries: int = 0, activations: int = 0
) -> int:
    """The most bytes that a worker of a ring holds for a model whose parameters are all trained.

    `state` is how many values the optimizer keeps for each element; `temporaries`, how many more its step
    makes at once of the largest tensor it steps; `activations`, the bytes that forward keeps for backward.
    docs/benchmarks.md derives it.
    """
    parameters = sum(chunk.nbytes for chunk in chunk_map.chunks)
    alone = workers == 1  # then gradients are autograd's own only, and the optimizer steps parameters
    stepped = chunk_map.specs if alone else chunk_map.chunks
    largest = max(each.nbytes for each in stepped)
    gradients = parameters if alone else 2 * parameters
    return (1 + state) * parameters + gradients + max(activations, temporaries * largest)


def activation_bytes(model: nn.Module, inputs: Tensor) -> int:
    """What forward keeps for backward, besides the parameters themselves; each storage counted once."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs)
    return sum(kept.values())


# -- a worker ----------------------------------------------------------------------------------------------


class Resident:
    """The resident set of this process, as the kernel counts it."""

    def __init__(self) -> None:
        self.base = self._field("VmRSS")
        self.method = self._reset_peak()

    def peak(self) -> int:
        """The highest since this object was made, less what it was then; bytes."""
        if self.method == "VmHWM":
            return self._field("VmHWM") - self.base
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.base

    @staticmethod
    def _reset_peak() -> str:
        """Start the kernel's high-water mark anew; where that is not allowed, the process's counts."""
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        except OSError:
            return "ru_maxrss"
        return "VmHWM"

    @staticmethod
    def _field(name: str) -> int:
        found = re.search(
            rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.M
        )
        assert found is not None
        return int(found[1]) * 1024


@dataclass(frozen=True)
class Measured:
    """What one worker found."""

    peak: int  # bytes
    formula: int
    method: str


def train(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    """STEPS steps on a tiny batch."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH, width, generator=draw)
    for _ in range(STEPS):
        loss: Tensor = model(inputs).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def measure(contestant: str, shape: Shape, kind: Optimizer, workers: int) -> Measured:
    """This process's peak over building and training the model."""
    session = atoll.join(Config()) if contestant == ATOLL else None
    small = Shape("small", 64, 2).make()  # what libraries allocate at their first use is not the model's
    train(small, kind.make(small), 64)
    resident = Resident()
    model = shape.make()
    optimizer = kind.make(model)
    trained: nn.Module = model
    if session is not None:
        session.prepare(model, optimizer)
    elif contestant != PLAIN:
        trained = DistributedDataParallel(model, gradient_as_bucket_view=contestant == DDP_VIEWS)
    train(trained, optimizer, shape.width)
    peak = resident.peak()
    if session is not None:
        session.close()
    return Measured(peak, formula_of(model, shape, kind, workers), resident.method)


def formula_of(model: nn.Module, shape: Shape, kind: Optimizer, workers: int) -> int:
    """The formula's bytes for a model of this shape; `model` has served its time."""
    parameters = dict(model.named_parameters())
    return peak_bytes(
        lay_out(specs_of(parameters, dict.fromkeys(parameters.values(), "0"))),
        workers=workers,
        state=kind.state,
        temporaries=kind.temporaries,
        activations=activation_bytes(model, torch.zeros(BATCH, shape.width)),
    )


def work(output: Path, contestant: str, shape: Shape, kind: Optimizer) -> None:
    """What a started process does; worker 0 writes to `output`, with the highest peak of the workers."""
    torch.set_num_threads(1)
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    if workers > 1:
        dist.init_process_group("gloo")
    measured = measure(contestant, shape, kind, workers)
    if workers > 1:
        peak = torch.tensor(measured.peak)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        measured = replace(measured, peak=int(peak))
    if workers == 1 or dist.get_rank() == 0:
        output.write_bytes(msgspec.json.encode(measured))
    if workers > 1:
        leave_group()


# -- the cases ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryCase:
    """One model and optimizer at one number of workers: peaks of Atoll, the formula and the rivals; bytes."""

    model: str
    optimizer: str
    workers: int
    peak: int
    formula: int
    rivals: dict[str, int]
    method: str

    @property
    def off(self) -> float:
        """How far the peak is above the formula (below, if negative), as a part of it."""
        return self.peak / self.formula - 1

    @property
    def met(self) -> bool:
        return abs(self.off) <= WITHIN

    def line(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        rivals = ", ".join(f"{name} {peak / MIB:.0f}" for name, peak in self.rivals.items())
        return (
            f"{self.model}, {self.optimizer}, {workers}: peak {self.peak / MIB:.0f} MiB, "
            f"formula {self.formula / MIB:.0f} ({self.off:+.1%}; {rivals}); "
            f"target within {WITHIN:.0%}: {'met' if self.met else 'MISSED'}"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "off": round(self.off, 4), "met": self.met}


def run_case(shape: Shape, kind: Optimizer, workers: int) -> MemoryCase:
    rivals = (PLAIN,) if workers == 1 else (DDP, DDP_VIEWS)
    own, *others = (launch(contestant, shape, kind, workers) for contestant in (ATOLL, *rivals))
    return MemoryCase(
        model=f"{shape.layers} layers of {shape.width}",
        optimizer=kind.name,
        workers=workers,
        peak=own.peak,
        formula=own.formula,
        rivals={name: other.peak for name, other in zip(rivals, others, strict=True)},
        method=own.method,
    )


def launch(contestant: str, shape: Shape, kind: Optimizer, workers: int) -> Measured:
    """Measure in fresh processes, `workers` of them."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        command = [sys.executable]
        if workers > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        command += [__file__, "--work", str(output), contestant, shape.name, kind.name]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return msgspec.json.decode(output.read_bytes(), type=Measured)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)  # be one of the processes
    args = parser.parse_args()
    if args.work:
        output, contestant, shape, kind = args.work
        work(Path(output), contestant, SHAPES[shape], OPTIMIZERS[kind])
        return 0
    cases: list[MemoryCase] = []
    for shape, kind in QUICK_CASES if args.quick else CASES:
        for workers in (1, 2):
            cases.append(run_case(SHAPES[shape], OPTIMIZERS[kind], workers))
            print(cases[-1].line(), flush=True)
    folder = output_folder(args)
    write_results("footprint", folder, [case.to_json() for case in cases], quick=args.quick)
    draw(cases, folder / "footprint.png")
    return 0


def draw(cases: Sequence[MemoryCase], path: Path) -> None:
    """A picture of each case's peak, with the formula's mark and its 10 %, and the rivals'."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.6 * len(cases)), layout="constrained")
    for row, case in enumerate(reversed(cases)):
        formula, label = case.formula / MIB, row == 0
        axes.barh(row, case.peak / MIB, height=0.34, color="#6f9dc6", label=ATOLL if label else None)
        band = (formula * (1 - WITHIN), formula * (1 + WITHIN))
        axes.fill_betweenx((row - 0.3, row + 0.3), *band, color="#f3cfc8", zorder=0)
        axes.vlines(formula, row - 0.3, row + 0.3, color="#c23b22", linewidth=2, zorder=3)
        for name, peak in case.rivals.items():
            axes.plot(peak / MIB, row, MARKERS[name], color="#333333", markersize=6, zorder=4)
    for name, marker in MARKERS.items():
        axes.plot([], [], marker, color="#333333", markersize=6, label=name)
    names = [f"{c.model}, {c.optimizer}\n{c.workers} worker{'s' * (c.workers > 1)}" for c in reversed(cases)]
    axes.set_yticks(range(len(cases)), names)
    axes.set_xlabel("MiB at the peak (red: the formula, and 10 % on either side)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle("Peak memory of a worker", fontsize=12)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
