"""What chunked memory costs a step: where everything fits, and where half of the parameters do.

    python benchmarks/memory.py [--quick]

Where everything fits, the same GPT trains under `memory.fit` and in plain PyTorch, on this machine's CPU.
Where half does, the device and its link are emulated, since a CPU's memory is its own: each matrix of the GPT
sleeps for its share, as a thread does that waits for an accelerator, and `tests/support/links.py` gives the
engine's copies a rate, at which those of a step take a given part of the plain model's step. All else is
real: the copies, the engine, the optimizer's steps on the CPU. The plan is given what `memory.fit` has
measured of that link.

The last case has a host that steps slowly, emulated in the same way: a chunk's step takes its elements over a
given pace, and one that is made in a copy twice as long, as the plan takes it to be. All steps take longer
than a forward, with steps during backward, without them, and in plain PyTorch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atoll
from atoll.memory import planning, stepping
from atoll.memory.bandwidth import measure
from atoll.memory.fit import plan as plan_of
from atoll.memory.fitted import Fitted, Moving
from atoll.memory.observing import as_in
from atoll.memory.planning import choose, profile_of
from atoll.memory.profile import Recorder
from atoll.memory.segments import Segments
from atoll.moves.timeline import EARLY_COST, Bandwidths
from common import Case, Target, Timings, compare, interleave, milliseconds, options, write_ratios
from overhead import same_values
from support.links import slow_link
from workloads import GPT_FUSED, gpt, gpt_adamw

FITS, MOVES, EARLIER = Target(median=1.02), Target(median=1.15), Target(median=0.9)
PREDICTED = 0.15  # how far the plan's prediction may be off, as a part of what was measured
SHARE = 0.5  # of the parameters' bytes, on the device
COPIES = (0.5, 1.0, 2.0)  # of the plain step: what a step's copies take, one after another
LAYERS, HEADS, WIDTH, TOKENS = 12, 4, 128, 16
DEVICE = 0.2  # seconds that the emulated device computes in a forward, and twice that in a backward
WARM = 6  # steps until chunks are stepped early
SETTLED = 3  # steps until the order is known and each step is like the last
RECORDED = 3  # steps by whose profiles the plan's model predicts
TURN = 3  # measured steps at once, after one that is not: what a step leaves to the next is the next one's

Block = Callable[[int], object]


# -- the emulated device -----------------------------------------------------------------------------------


class OnDevice(torch.autograd.Function):
    """Waits as the host does for an accelerator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, None


def build() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = gpt.GPT(LAYERS, HEADS, WIDTH, TOKENS)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    numel = sum(module.weight.numel() for module in linear)
    for module in linear:
        seconds = DEVICE * module.weight.numel() / numel
        module.register_forward_hook(lambda _module, _inputs, output, s=seconds: OnDevice.apply(output, s))
    return model


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Block:
    """What trains it by one step, given the step's number."""

    def step(number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        text = torch.randint(gpt.VOCABULARY, (1, TOKENS + 1), generator=draw)
        logits = model(text[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_turns(contestants: Mapping[str, Block], turns: int, first: int, before: int = 1) -> dict[str, Timings]:
    """Steps from `first` on: contestants take turns, of `TURN` measured steps after `before` that are not."""
    timings = {name: Timings([], []) for name in contestants}
    for turn in range(turns):
        for name, step in sorted(contestants.items(), reverse=bool(turn % 2)):
            begin = first + turn * (TURN + before)
            for number in range(begin, begin + before):
                step(number)
            for number in range(begin + before, begin + before + TURN):
                cpu, start = time.process_time(), time.perf_counter()
                step(number)
                timings[name].seconds.append(time.perf_counter() - start)
                timings[name].cpu_seconds.append(time.process_time() - cpu)
    return timings


# -- half of the parameters fit ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """A case, and what the plan said of it."""

    case: Case
    copies: float  # of the plain step, as it came out
    rate: float  # of the link each way, bytes/s
    step_nbytes: dict[str, int]
    step_moves: dict[str, int]
    chunk_bytes: int
    cache_blocks: int
    predicted: float  # seconds
    bound: float  # seconds: the longer of compute and copies
    waited: float  # seconds of a step that uses waited

    @property
    def off(self) -> float:
        return self.predicted / self.case.seconds - 1

    @property
    def predicted_met(self) -> bool:
        return abs(self.off) <= PREDICTED

    def line(self) -> str:
        verdict = "met" if self.predicted_met else "MISSED"
        return (
            f"{self.case.line()}; copies {self.copies:.2f} of compute; {milliseconds(self.predicted)} "
            f"predicted ({self.off:+.1%}), target within {PREDICTED:.0%}: {verdict}"
        )

    def to_json(self) -> dict[str, Any]:
        mine = {key: value for key, value in vars(self).items() if key != "case"}
        return {**self.case.to_json(), **mine, "off": self.off, "predicted_met": self.predicted_met}


class Measured:
    """In the place of `memory.bandwidth.measure`: the same, of a device whose cores are its own."""

    rates: Bandwidths  # the latest

    def __init__(self, pace: float = 0.0) -> None:
        """With a `pace`, it is that of a host which steps so many elements in a second."""
        self.pace = pace

    def __call__(self, *asked: Any) -> Bandwidths:
        found = measure(*asked)
        self.rates = msgspec.structs.replace(found, shared=False, host_steps=self.pace or found.host_steps)
        return self.rates


def fitted(model: nn.Module, optimizer: torch.optim.Optimizer) -> Moving:
    budget = int(SHARE * sum(parameter.nbytes for parameter in model.parameters()))
    found = atoll.memory.fit(model, optimizer, memory=atoll.Memory(device=str(budget)))
    assert isinstance(found, Moving)
    return found


def bytes_moved(rate: float) -> int:
    """Bytes of a step's copies both ways, by the plan for a link of this rate."""
    model = build()
    optimizer = gpt_adamw(model)
    with slow_link(rate, rate), fitted(model, optimizer) as moving:
        step = trainer(model, optimizer)
        for number in range(SETTLED):
            step(number)
        moved = moving.stats().step_nbytes
    return moved["to_device"] + moved["to_host"]


def measure_moving(copies: float, turns: int, measured: Measured) -> Moved:
    """One case: copies that take `copies` of the plain step."""
    plain, own = build(), build()
    in_plain = trainer(plain, gpt_adamw(plain))
    alone = in_turns({"plain": in_plain}, 1, 0)["plain"]
    compute = median(alone.seconds)
    guessed = 2.5 * sum(p.nbytes for p in own.parameters()) / (copies * compute)
    rate = bytes_moved(guessed) / (copies * compute)
    optimizer = gpt_adamw(own)
    with slow_link(rate, rate), fitted(own, optimizer) as moving:
        rates = measured.rates
        step = trainer(own, optimizer)
        for number in range(TURN + 1):
            step(number)
        seconds = predicted(moving, optimizer, step, TURN + 1, rates)
        for number in range(TURN + 1, TURN + 1 + RECORDED):
            in_plain(number)
        waited = moving.stats().waited
        timings = in_turns({"Atoll": step, "plain": in_plain}, turns, TURN + 1 + RECORDED)
        stats = moving.stats()
    same_values(own, plain)
    nbytes = {key: stats.step_nbytes[key] for key in ("to_device", "to_host")}
    link = sum(nbytes.values()) / rate
    other = timings["plain"]
    longer = Timings([max(each, link) for each in other.seconds], other.cpu_seconds)
    case = compare(
        f"half fits, copies {copies:g} of compute",
        "the longer of plain PyTorch and the copies" if copies >= 1 else "plain PyTorch",
        timings["Atoll"],
        longer,
        workers=1,
        steps=1,
        target=MOVES,
        threads=torch.get_num_threads(),
    )
    return Moved(
        case=case,
        copies=link / median(other.seconds),
        rate=rate,
        step_nbytes=nbytes,
        step_moves={key: stats.step_moves[key] for key in nbytes},
        chunk_bytes=moving.plan.chunk_bytes,
        cache_blocks=moving.plan.cache_blocks,
        predicted=seconds,
        bound=case.rival_seconds,
        waited=(stats.waited - waited) / (turns * (TURN + 1)),
    )


def predicted(
    moving: Moving, optimizer: torch.optim.Optimizer, step: Block, first: int, rates: Bandwidths
) -> float:
    """What the plan's model says of this plan's step, in seconds: the median by the profiles of `RECORDED`
    steps from number `first` on."""
    model, found = moving.model, []
    for number in range(first, first + RECORDED):
        recorder, uses = Recorder(model, moving.mover), []
        handle = optimizer.register_step_pre_hook(lambda *_, r=recorder, u=uses: u.append(r.stop()))
        recorder.start()
        step(number)
        handle.remove()
        profile = profile_of(model, [optimizer], uses[0])
        as_run = as_in(moving.budgets, moving.plan)
        plan = choose(model, [optimizer], as_run, profile=profile, bandwidths=rates)
        found.append(plan.predicted.seconds)
    return median(found)


# -- the steps take longer than a forward ------------------------------------------------------------------


@contextmanager
def slow_host(pace: float) -> Iterator[None]:
    """Within it a chunk's step takes its elements over `pace`, and twice that where it is made in a copy."""
    run, aside = stepping.run_step, Segments.step_aside

    def run_slowly(*args: Any, **kwargs: Any) -> Any:
        parameters: list[nn.Parameter] = args[3]
        return slowly(run, sum(parameter.numel() for parameter in parameters) / pace, *args, **kwargs)

    def step_aside(segments: Segments, *args: Any) -> Any:
        numel = segments.states.trained.chunk.used
        return slowly(aside, EARLY_COST * numel / pace, segments, *args)

    with (
        mock.patch.object(stepping, "run_step", run_slowly),
        mock.patch.object(Segments, "step_aside", step_aside),
    ):
        yield


def slowly(function: Callable[..., Any], seconds: float, *args: Any, **kwargs: Any) -> Any:
    """Call it, and sleep until `seconds` have passed since."""
    until = time.perf_counter() + seconds
    result = function(*args, **kwargs)
    time.sleep(max(until - time.perf_counter(), 0))
    return result


def step_slowly(optimizer: torch.optim.Optimizer, pace: float) -> None:
    """A plain optimizer, with the steps of that host."""
    step = optimizer.step
    numel = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    optimizer.step = lambda: slowly(step, numel / pace)  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class Early:
    """A case whose steps are made during backward where there is time."""

    case: Case  # beside the same with all steps after backward
    plain: float  # seconds of a step in plain PyTorch
    predicted: float
    room: int  # chunks for which there is some
    stepped: float  # of them, in a step
    rolled_back: int

    def line(self) -> str:
        return (
            f"{self.case.line()}; plain PyTorch {milliseconds(self.plain)}; {milliseconds(self.predicted)} "
            f"predicted; {self.stepped:.1f} of {self.room} chunks early, {self.rolled_back} in vain in all"
        )

    def to_json(self) -> dict[str, Any]:
        mine = {key: value for key, value in vars(self).items() if key != "case"}
        return {**self.case.to_json(), **mine}


def measure_early(copies: float, turns: int) -> Early:
    """Copies that take `copies` of the compute, and steps that take twice a forward."""
    models = {name: build() for name in ("Atoll", "after", "plain")}
    optimizers = {name: gpt_adamw(model) for name, model in models.items()}
    parameters = list(models["plain"].parameters())
    pace = sum(parameter.numel() for parameter in parameters) / (2 * DEVICE)
    nbytes = sum(parameter.nbytes for parameter in parameters)
    rate = 2.5 * nbytes / (copies * 3 * DEVICE)
    memory = atoll.Memory(device=str(int(SHARE * nbytes)), host=str(8 * nbytes), step="host")
    with slow_link(rate, rate), slow_host(pace), mock.patch.object(planning, "measure", Measured(pace)):
        plan = plan_of(models["Atoll"], optimizers["Atoll"], memory)
        plans = {"Atoll": plan, "after": msgspec.structs.replace(plan, early=())}
        held = {
            name: atoll.memory.fit(models[name], optimizers[name], memory=memory, plan=own)
            for name, own in plans.items()
        }
        step_slowly(optimizers["plain"], pace)
        blocks = {name: trainer(model, optimizers[name]) for name, model in models.items()}
        for number in range(WARM):
            for block in blocks.values():
                block(number)
        before = held["Atoll"].stats()
        # A pause is no forward that hides steps: the step after it makes none early.
        timings = in_turns(blocks, turns, WARM, before=2)
        stats = held["Atoll"].stats()
        for moving in held.values():
            moving.close()
    same_values(models["Atoll"], models["plain"])
    same_values(models["after"], models["plain"])
    case = compare(
        "steps twice a forward, some made during backward",
        "all made after it",
        timings["Atoll"],
        timings["after"],
        workers=1,
        steps=1,
        target=EARLIER,
        threads=torch.get_num_threads(),
    )
    return Early(
        case=case,
        plain=median(timings["plain"].seconds),
        predicted=plan.predicted.seconds,
        room=len(plan.early),
        stepped=(stats.stepped_early - before.stepped_early) / (stats.steps - before.steps),
        rolled_back=stats.rolled_back,
    )


# -- everything fits ---------------------------------------------------------------------------------------


def measure_fitting(pairs: int, buildings: int) -> Case:
    own, other = Timings([], []), Timings([], [])
    for building in range(buildings):
        batches = GPT_FUSED.batches(0, 32)
        made: dict[str, tuple[nn.Module, Callable[[int], None]]] = {}
        held: list[Fitted] = []
        for name in sorted(("Atoll", "plain"), reverse=bool(building % 2)):
            model = GPT_FUSED.make()
            optimizer = GPT_FUSED.optimizer(model)
            if name == "Atoll":
                held.append(atoll.memory.fit(model, optimizer, memory=atoll.Memory(device="2GiB")))
                assert held[0].plan.fits
            made[name] = model, GPT_FUSED.trainer(model, optimizer, batches)
        blocks = {name: block for name, (_, block) in made.items()}
        interleave(blocks, 5, seed=building)
        timings = interleave(blocks, pairs // buildings, seed=1000 + building)
        own.extend(timings["Atoll"])
        other.extend(timings["plain"])
        same_values(made["Atoll"][0], made["plain"][0])
        held[0].close()
    return compare(
        "everything fits",
        "plain PyTorch",
        own,
        other,
        workers=1,
        steps=GPT_FUSED.steps,
        target=FITS,
        threads=torch.get_num_threads(),
    )


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pairs, buildings, turns = (8, 2, 1) if args.quick else (120, 4, 4)
    fits = measure_fitting(pairs, buildings)
    print(fits.line(), flush=True)
    moved: list[Moved] = []
    measured = Measured()
    with mock.patch.object(planning, "measure", measured):
        for copies in COPIES:
            moved.append(measure_moving(copies, turns, measured))
            print(moved[-1].line(), flush=True)
    early = measure_early(COPIES[0], turns)
    print(early.line(), flush=True)
    records: Sequence[Mapping[str, Any]] = [each.to_json() for each in (fits, *moved, early)]
    cases = [fits, *(each.case for each in (*moved, early))]
    write_ratios("memory", args, cases, "A step in chunked memory", records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
