"""(u) What a step costs whatever the model's size: the digits network, and where each microsecond goes.

    python benchmarks/step.py [--quick]

One worker against plain PyTorch, and two against DistributedDataParallel; each pair takes turns on the same
batches, with one torch thread a worker. Then each place where Atoll runs within a step is timed by itself,
with a clock around it; what the clock costs is taken off.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.nn.parallel import DistributedDataParallel

import atoll
from atoll.core.config import Config
from atoll.train.api.place import Place
from common import (
    Case,
    Target,
    Timings,
    compare,
    group_options,
    interleave,
    leave_group,
    measured_by,
    output_folder,
    over_group,
    recorded,
    write_results,
)
from workloads import DIGITS, Batch, Block

TARGETS = {1: Target(median=1.10), 2: Target(median=1.03)}
RIVALS = {1: "plain PyTorch", 2: "DDP"}
WARM_UP = 8
STEPS = DIGITS.steps


class Measured(msgspec.Struct):
    """One group's timings, and by cause the seconds of each step."""

    timings: dict[str, Timings]
    causes: dict[str, float]


class Clocks:
    """Times calls: by cause, the seconds of each step."""

    def __init__(self) -> None:
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._calls: defaultdict[str, int] = defaultdict(int)
        self.steps: defaultdict[str, list[float]] = defaultdict(list)

    def around(self, cause: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self._spent[cause] += time.perf_counter() - began
                self._calls[cause] += 1

        return timed

    def step(self) -> None:
        """A step is over."""
        for cause, spent in self._spent.items():
            self.steps[cause].append(spent)
        self._spent.clear()

    def medians(self) -> dict[str, float]:
        """By cause the median of all steps, less the clock's own time."""
        empty = self.around("nothing", lambda: None)
        for _ in range(2000):
            empty()
            self.step()
        nothing = median(self.steps.pop("nothing"))
        steps = max(map(len, self.steps.values()))
        calls = {cause: self._calls[cause] / steps for cause in self.steps}
        return {cause: max(0.0, median(each) - calls[cause] * nothing) for cause, each in self.steps.items()}


def put_clocks(session: atoll.Session, clocks: Clocks) -> None:
    """Time the places at which Atoll runs in a step of the session's only model."""
    (prepared,) = session._state.prepared
    hooks: Any = prepared._forwards[0]._hooks
    model: Any = hooks._model
    for handle, registered, cause in zip(
        hooks._handles,
        (model._forward_pre_hooks, model._forward_hooks),
        ("before forward: parameters are where they were", "after forward: samples, a hook on the output"),
        strict=True,
    ):
        registered[handle.id] = clocks.around(cause, registered[handle.id])
    hooks._reached = clocks.around("backward reaches the output: samples count", hooks._reached)
    stepper: Any = prepared.stepper
    accept, after = stepper._hooks.accept, stepper._hooks.after
    stepper._hooks = type(stepper._hooks)(
        clocks.around("before the step: parameters, samples, edits", stepper._hooks.before),
        clocks.around("before the step: look for NaN", accept),
        clocks.around("after the step: figures, records", after),
    )
    stepper._gradients = clocks.around("before the step: gradients side by side", stepper._gradients)
    prepared.reducer.sum.reduce = clocks.around(  # type: ignore[method-assign]
        "end of backward: the ring's sum and agreement, waits included", prepared.reducer.sum.reduce
    )
    session.log = clocks.around("session.log", session.log)  # type: ignore[method-assign]


def measure(pairs: int, place: Place | None) -> Measured:
    """One worker's part."""
    rank = 0 if place is None else place.rank
    batches = DIGITS.batches(rank, 32 * STEPS)
    fence: Callable[[], object] = (lambda: None) if place is None else dist.barrier
    with recorded(), atoll.join(Config(), place=place) as session:
        made = {"Atoll": DIGITS.under_atoll(batches, session), "rival": rival(batches, place)}
        blocks = {name: block for name, (_, block) in made.items()}
        interleave(blocks, WARM_UP, seed=1, fence=fence)
        timings = interleave(blocks, pairs, seed=2, fence=fence)
        clocks = Clocks()
        put_clocks(session, clocks)
        records = session._records
        records.stepped = _then(records.stepped, clocks.step)  # type: ignore[method-assign]
        for pair in range(max(4, pairs // 4)):
            fence()
            blocks["Atoll"](pair)
    return Measured(timings, clocks.medians())


def _then(function: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    def both(*arguments: Any) -> None:
        function(*arguments)
        after()

    return both


def rival(batches: Sequence[Batch], place: Place | None) -> tuple[nn.Module, Block]:
    if place is None:
        return DIGITS.in_plain_pytorch(batches)
    module = DIGITS.make()
    return module, DIGITS.trainer(DistributedDataParallel(module), DIGITS.optimizer(module), batches)


def work(output: Path, quick: bool) -> None:
    """What each of two workers does; worker 0 writes their timings to `output`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    place = Place(rank, world, rank, PrefixStore("step", _get_default_store()))
    measured = measure(6 if quick else 60, place)
    measured.timings = over_group(measured.timings)
    if rank == 0:
        output.write_bytes(msgspec.json.encode(measured))
    leave_group()


def case_of(measured: Measured, workers: int) -> Case:
    own, other = measured.timings["Atoll"], measured.timings["rival"]
    return compare(
        DIGITS.name,
        RIVALS[workers],
        own,
        other,
        workers=workers,
        steps=STEPS,
        target=TARGETS[workers],
        threads=1,
    )


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """A picture of the microseconds by cause."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (9, 2.5 + 2.5 * len(records))
    figure, axes = plt.subplots(len(records), 1, figsize=size, squeeze=False, layout="constrained")
    for axis, record in zip(axes[:, 0], records, strict=True):
        causes = sorted(record["causes"].items(), key=lambda each: each[1])
        axis.barh([cause for cause, _ in causes], [1e6 * seconds for _, seconds in causes], color="#2b6ca3")
        axis.set_title(f"{record['workers']} worker{'s' * (record['workers'] > 1)}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("microseconds in a step")
    figure.suptitle("Where Atoll runs within a step of the digits network", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    args = group_options(__doc__, (1, 2)).parse_args()
    if args.work:
        work(args.work, args.quick)
        return 0
    records: list[dict[str, Any]] = []
    for workers in args.workers:
        if workers == 1:
            torch.set_num_threads(1)
            measured = measure(10 if args.quick else 200, None)
        else:
            measured = measured_by(__file__, workers, args.quick, Measured)
        case = case_of(measured, workers)
        print(case.line(), flush=True)
        quiet = min(measured.timings["Atoll"].cpu_seconds) / min(measured.timings["rival"].cpu_seconds)
        print(f"least CPU time: {quiet:.3f}x", flush=True)
        for cause, seconds in sorted(measured.causes.items(), key=lambda each: -each[1]):
            print(f"  {1e6 * seconds:6.1f} us  {cause}", flush=True)
        records.append({**case.to_json(), "causes": measured.causes, "least_cpu_ratio": quiet})
    folder = output_folder(args)
    write_results("step", folder, records, quick=args.quick)
    draw(records, folder / "step.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
