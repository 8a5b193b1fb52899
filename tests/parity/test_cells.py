"""Every cell: one choice along each axis. A cell trains as its reference does, plain PyTorch in one process,
or the table of needs refuses it in one sentence.

Where contributors go at their own pace, one contributor has a reference: a worker, or a group. In a group
workers begin alone; until they are together, their gradients are zeros.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import atoll
from atoll.axes.cells import CELLS, Cell, CodecKind, choices_in, config_of, refusal_of
from atoll.core.config import Config
from atoll.core.errors import DeadlineError, UserError
from atoll.core.memory import Memory
from atoll.groups.chooser import Score
from atoll.groups.grouping import Grouping
from atoll.hub.planner import GroupingSettings
from atoll.train.api.place import Place
from support.pool import JobFailedError, WorkerPool
from support.runs import model, run_with

pytestmark = pytest.mark.check  # sessions of six steps and more, one after another

STEPS, SAMPLES = 6, 4
# In float64, which travels as it is; in float32. The last one is examples/own_codec.py's.
TOLERANCE = {"float32": 1e-10, "bfloat16": 5e-3, "eight-bits": 1e-2}
LEAST = 1e-6  # by which values differ where gradients went as bfloat16
BUDGET = Memory(device="24KiB", chunk="4096", step="host")  # the model takes more


def choices(cell: Cell) -> tuple[object, ...]:
    """One choice an axis. What a store with budgets is called follows from the other axes, but for a group of
    a server, whose members may have been told to share the model."""
    shared = cell.served and cell.store == "sharded"
    return cell.budgets, shared, cell.group, cell.sync, cell.link, cell.codec


def pairs(cell: Cell) -> set[tuple[object, ...]]:
    """Every two choices that meet in a cell."""
    return set(itertools.combinations(enumerate(choices(cell)), 2))


def few(cells: Iterable[Cell]) -> list[Cell]:
    """Cells in which any two choices meet: each time the one that has most pairs that are still missing."""
    left, chosen = list(cells), []
    missing = set().union(*map(pairs, left))
    while missing:
        chosen.append(max(left, key=lambda cell: len(missing & pairs(cell))))
        missing -= pairs(chosen[-1])
    return chosen


def marked() -> Iterator[Any]:
    quick = few(CELLS)
    for cell in CELLS:
        yield pytest.param(cell, id=str(cell), marks=() if cell in quick else pytest.mark.soak)


def workers_of(cell: Cell) -> int:
    if cell.group == "solo":
        return 1 if cell.sync in ("local", "ssp", "asp", "replicas") else 2
    return 4 if cell.sync == "peers" else 2


def configured(cell: Cell, codec: str = "") -> Config:
    # Over a link that may lose the rest, all blocks must arrive.
    config = config_of(cell).having(sync={"timeout": "60s"}, link={"high": "1"})
    config = config.having(sync={"codec": codec or cell.codec})
    if cell.budgets:
        memory = msgspec.structs.replace(BUDGET, sharding=config.memory.sharding)
        config = msgspec.structs.replace(config, memory=memory)
    if cell.sync == "peers":
        groups = {"count": 2 if cell.group == "ring" else 0}
        config = config.having(sync={"stale_max": 0}, groups=groups)
    return config


def model_of(codec: CodecKind) -> nn.Module:
    """A codec writes float32 alone."""
    return model() if codec == "float32" else model().float()


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randn(SAMPLES, 32, generator=generator, dtype=torch.float64)
    batch = batch.to(next(module.parameters()).dtype)
    return module(batch).square().mean()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def contributes_alone(session: atoll.Session, members: int) -> bool:
    """Whether this worker's group has so many members, and nobody else makes steps at the shards."""
    assert session._runtime.regrouping is not None
    reducer = session._state.prepared[0].reducer
    contributors = getattr(reducer, "contributors")  # noqa: B009  # a group's reducer has them
    return session.group.size == members and contributors == [session._runtime.regrouping.contributor]


def train(session: atoll.Session, together: int, codec: CodecKind) -> tuple[list[float], list[torch.Tensor]]:
    """Six steps, made once this worker's group has `together` members; the losses, and the values after."""
    module = model_of(codec)
    module, optimizer = session.prepare(module, optimizer_of(module))
    rank, deadline = session.rank, time.monotonic() + 60

    while together > 1 and not contributes_alone(session, together):
        if time.monotonic() > deadline:
            raise DeadlineError(
                "waited 60 s for the hub to make one group, and for the shards to know no other"
            )
        (0 * loss_of(module, rank, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    losses = []
    for step in range(STEPS):
        loss = loss_of(module, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    session.barrier()
    return losses, [value.detach().clone() for value in module.state_dict().values()]


def train_plain(world: int, codec: CodecKind) -> tuple[list[list[float]], list[torch.Tensor]]:
    """The same in one process, each step with all workers' batches; the losses of each worker's batch."""
    module = model_of(codec)
    optimizer = optimizer_of(module)
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(STEPS):
        for rank in range(world):
            loss = loss_of(module, rank, step)
            (loss / world).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [value.detach().clone() for value in module.state_dict().values()]


def run(pool: WorkerPool, cell: Cell, codec: str = "") -> list[tuple[list[float], list[torch.Tensor]]]:
    """Train in a cell, by its codec or by another one; what `train` returns, by rank."""
    world, grouped = workers_of(cell), cell.served and cell.group == "ring"
    wanted = Grouping([list(range(world))])
    grouping = GroupingSettings(
        1,
        by="joint",
        consistency="bsp" if cell.sync == "bsp" else "asp",
        regroup=False,
        score_for=lambda _known: lambda found: Score(2.0 if found == wanted else 1.0),
    )
    return run_with(
        pool,
        configured(cell, codec),
        train,
        world if grouped else 1,
        cell.codec,
        world=world,
        shards=2 if cell.served else None,
        grouping=grouping if grouped else None,
    )


@pytest.mark.parametrize("cell", list(marked()))
def test_a_cell_trains_as_one_process_or_is_refused_in_one_sentence(pool: WorkerPool, cell: Cell) -> None:
    need = refusal_of(cell)
    if need is not None:
        said = choices_in(cell, configured(cell)).fill(need.reason)
        assert "\n" not in said
        if "configuration" in need.moments:
            with pytest.raises(need.error) as refused:
                atoll.join(configured(cell), place=Place())
            assert str(refused.value) == said
            return
        with pytest.raises(JobFailedError) as failed:
            run(pool, cell)
        assert {(failure.kind, failure.message) for failure in failed.value.failures.values()} == {
            (need.error.__name__, said)
        }
        assert issubclass(need.error, UserError)
        return
    check(cell, run(pool, cell), cell.codec)


OWN = [
    cell for cell in CELLS if cell.codec != "float32" and cell.sync != "replicas" and refusal_of(cell) is None
]


@pytest.mark.parametrize(
    "cell",
    [pytest.param(each, id=str(each), marks=() if each in few(OWN) else pytest.mark.soak) for each in OWN],
)
def test_a_cell_that_takes_a_codec_takes_one_of_another_package(pool: WorkerPool, cell: Cell) -> None:
    """`examples/own_codec.py`, which is found by its entry point."""
    check(cell, run(pool, cell, "eight-bits"), "eight-bits")


def check(cell: Cell, found: list[tuple[list[float], list[torch.Tensor]]], codec: str) -> None:
    """Hold what was trained against plain PyTorch in one process."""
    (losses, expected), tolerance = train_plain(len(found), cell.codec), TOLERANCE[codec]
    apart = 0.0
    for rank, (own, values) in enumerate(found):
        assert own == pytest.approx(losses[rank], rel=tolerance), f"worker {rank}"
        for value, other in zip(values, expected, strict=True):
            apart = max(apart, float((value - other).abs().max()))
    assert apart < tolerance
    if cell.codec != "float32" and cell.sync != "replicas":  # where one contributor exchanges nothing
        assert apart > LEAST, "gradients went as they are"


def test_any_two_choices_meet_in_a_quick_cell() -> None:
    quick = few(CELLS)
    assert set().union(*map(pairs, quick)) == set().union(*map(pairs, CELLS))
    assert len(quick) < len(CELLS) / 3
