"""Shares by speed, measured: workers of unlike speed in a ring and at a parameter server, beside
DistributedDataParallel.

    python benchmarks/uneven.py [--quick]

Computing is emulated by sleeping for each sample: 5 ms at full speed, 64 samples a worker. In the same
processes, one after the other: DistributedDataParallel with even batches, Atoll's ring with `sync.shares`
even and auto, and in two cases a parameter server (bsp) with auto. What counts is the part of the workers'
sum of speeds that is used: samples a second, over what the workers would compute together if nobody waited.
Cases: equal workers; one of four at a quarter of the speed; one of four that shares a core with three busy
processes, and computes where the others sleep; one of four that slows down by half in the middle, whose first
ten iterations afterwards do not count; eight workers from 0.1 to 0.9. The first iterations, in which shares
are found, do not count either.

The sum of speeds counts the emulated computing alone. Forward, backward, the loader and the reduction of the
little model, on cores that all workers share, cost some milliseconds more in each iteration, which DDP pays
too: "equal" shows what is left to the others. So an iteration is long (0.3 s) beside them, and batches are
large enough for parts in whole samples to come close to the speeds.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.core.config import Config, Run, Sync
from atoll.train.api.place import Place
from common import leave_group, measured_by, options, output_folder, recorded, write_results
from server import Address, Servers

EACH = 0.005  # seconds for a sample at full speed
OF_WORKER = 64  # samples, on the average
LEFT_OUT = 10  # iterations at the beginning, and after a change of speeds, that do not count
# With even batches an iteration is as long as any other.
STEPS = {"DDP": 24, "even": 24, "auto": 80, "server": 80}
QUICK_STEPS = {"DDP": 24, "even": 24, "auto": 32, "server": 32}
TURNS = 3
FEATURES = 64


@dataclass(frozen=True)
class Case:
    """The workers' speeds; after half of the iterations, `later`. With `neighbours` the last worker computes
    on a core that it shares with so many busy processes, which make its speed."""

    name: str
    speeds: tuple[float, ...]
    later: tuple[float, ...] = ()
    neighbours: int = 0
    served: bool = False  # trained at a parameter server, too
    target: float | None = None  # of the part of the sum of speeds that shares by speed use

    def speed(self, rank: int, half: int) -> float:
        """Return a worker's speed in the first half of the iterations, or in the second."""
        return (self.later if half and self.later else self.speeds)[rank]

    def together(self, half: int) -> float:
        """Return the samples a second that the workers compute together."""
        return sum(self.speed(rank, half) for rank in range(len(self.speeds))) / EACH

    def compute(self, rank: int, half: int, samples: int) -> None:
        """Take as long as this worker's computing of so many samples does."""
        if not self.neighbours or rank < len(self.speeds) - 1:
            time.sleep(EACH * samples / self.speed(rank, half))
            return
        until = time.thread_time() + EACH * samples
        while time.thread_time() < until:
            pass

    @contextlib.contextmanager
    def surrounded(self, rank: int) -> Iterator[None]:
        """Within it the last worker has its neighbours, and the other workers are on other cores."""
        if not self.neighbours:
            yield
            return
        cores, is_last = sorted(os.sched_getaffinity(0)), rank == len(self.speeds) - 1
        os.sched_setaffinity(0, cores[-1:] if is_last else cores[:-1])
        busy = [sys.executable, "-c", "while True: pass"]
        beside = [subprocess.Popen(busy) for _ in range(self.neighbours if is_last else 0)]
        try:
            yield
        finally:
            for each in beside:
                each.kill()
                each.wait()
            os.sched_setaffinity(0, cores)


CASES = (
    Case("equal", (1.0,) * 4),
    Case("one at a quarter", (1.0, 1.0, 1.0, 0.25), served=True, target=0.95),
    Case("one with busy neighbours", (1.0, 1.0, 1.0, 0.25), neighbours=3, served=True, target=0.95),
    Case("one slows down by half", (1.0,) * 4, (1.0, 1.0, 1.0, 0.5)),
    Case("eight from 0.1 to 0.9", (0.1, 0.2, 0.3, 0.45, 0.55, 0.7, 0.8, 0.9), target=0.93),
)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 256), nn.Tanh(), nn.Linear(256, 10))


def train(
    case: Case, steps: int, batches: Iterator[Any], forward: Callable[..., Any], optimizer: Any
) -> float:
    """Make the iterations; return the part of the sum of speeds that was used."""
    rank, total = dist.get_rank(), OF_WORKER * len(case.speeds)
    ideal = taken = 0.0
    for number in range(steps):
        half = int(number >= steps // 2)
        began = time.perf_counter()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(forward(x), y)
        case.compute(rank, half, len(x))
        loss.backward()
        optimizer.step()
        first = steps // 2 if half and case.later else 0
        if number - first >= LEFT_OUT:
            taken += time.perf_counter() - began
            ideal += total / case.together(half)
    return ideal / taken


def without_end(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


@contextlib.contextmanager
def joined(kind: str, whole: int, name: str) -> Iterator[atoll.Session]:
    """Within it this worker has a session: in a ring, whose keys are under `name`, or at a parameter server.

    `whole`: samples in a batch of all workers.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if kind != "server":
        place = Place(rank, world, rank, PrefixStore(name, _get_default_store()))
        with atoll.join(Config(sync=Sync(global_batch=whole, shares=kind)), place=place) as session:
            yield session
        return
    config = Config(
        run=Run(strategy="server"), sync=Sync(consistency="bsp", global_batch=whole, shares="auto")
    )
    with contextlib.ExitStack() as stack:
        of_run: list[Address | None] = [stack.enter_context(Servers(world, 1)) if rank == 0 else None]
        dist.broadcast_object_list(of_run)
        assert of_run[0] is not None
        yield stack.enter_context(of_run[0].joined(rank, config))


def used_by(kind: str, case: Case, steps: int, turn: int) -> float:
    """Train in one of the ways."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = OF_WORKER * world
    inputs = torch.randn(whole * 64, FEATURES, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, torch.arange(len(inputs)) % 10)
    module = model_of()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    if kind == "DDP":
        part = TensorDataset(*(each[rank::world] for each in data.tensors))
        batches = without_end(DataLoader(part, batch_size=OF_WORKER))
        return train(case, steps, batches, DistributedDataParallel(module), optimizer)
    with recorded(), joined(kind, whole, f"{case.name}/{kind}/{turn}") as session:
        session.prepare(module, optimizer)
        batches = without_end(DataLoader(data, batch_sampler=session.batches(data)))
        return train(case, steps, batches, module, optimizer)


def work(output: Path, quick: bool) -> None:
    """Measure the cases of this number of workers; worker 0 writes what was used."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured: dict[str, dict[str, list[float]]] = {}
    for case in (case for case in CASES if len(case.speeds) == dist.get_world_size()):
        if case.neighbours and len(os.sched_getaffinity(0)) < 2:
            continue
        kinds = dict(QUICK_STEPS if quick else STEPS)
        if not case.served:
            del kinds["server"]
        measured[case.name] = {kind: [] for kind in kinds}
        with case.surrounded(dist.get_rank()):
            for turn in range(1 if quick else TURNS):
                for kind, steps in kinds.items():
                    dist.barrier()
                    measured[case.name][kind].append(used_by(kind, case, steps, turn))
    if dist.get_rank() == 0:
        output.write_bytes(msgspec.json.encode(measured))
    leave_group()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--work", type=Path, help="be one of the workers, and write what was used to this file"
    )
    given = parser.parse_args()
    if given.work:
        work(given.work, given.quick)
        return
    cases: list[dict[str, Any]] = []
    targets = {case.name: case.target for case in CASES}
    for workers in sorted({len(case.speeds) for case in CASES}):
        found = measured_by(__file__, workers, given.quick, dict[str, dict[str, list[float]]])
        for name, kinds in found.items():
            used = {kind: statistics.median(values) for kind, values in kinds.items()}
            times = paired(kinds, "DDP")
            case = {"case": name, **used, "over DDP": times, "over even": paired(kinds, "even")}
            cases.append({**case, "target": targets[name], "all": kinds})
            parts = ", ".join(f"{kind} {part:.3f}" for kind, part in used.items())
            print(f"{name}: {parts} of the sum of speeds; auto is {times:.2f}x DDP", flush=True)
    folder = output_folder(given)
    write_results("uneven", folder, cases, given.quick)
    draw(cases, folder / "uneven.png")


def paired(kinds: dict[str, list[float]], rival: str) -> float:
    """Return the median of auto's part over the rival's of the same turn."""
    return statistics.median(own / its for own, its in zip(kinds["auto"], kinds[rival], strict=True))


def draw(cases: list[dict[str, Any]], path: Path) -> None:
    """The part of the sum of speeds that each way has used, in each case: each turn's, and the median."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = {
        "DDP": "DDP",
        "even": "Atoll's ring, even shares",
        "auto": "Atoll's ring, shares by speed",
        "server": "Atoll's server (bsp), shares by speed",
    }
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (kind, name) in enumerate(names.items()):
        rows = [(place, case) for place, case in enumerate(cases) if kind in case]
        heights = [len(cases) - 1 - place + (1.5 - number) * 0.2 for place, _ in rows]
        bars = axes.barh(heights, [case[kind] for _, case in rows], height=0.18, label=name)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        for height, (_, case) in zip(heights, rows, strict=True):
            axes.plot(case["all"][kind], [height] * len(case["all"][kind]), "k.", markersize=3)
    axes.axvline(1.0, color="#8a8a8a", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(cases)), [case["case"] for case in reversed(cases)])
    axes.set_xlim(0, 1.12)
    axes.set_xlabel("part of the sum of the workers' speeds that is used (dots: each turn)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
