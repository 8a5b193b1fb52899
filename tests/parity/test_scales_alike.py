"""Workers whose gradients are summed before they are unscaled have one scale; else all end with one line.

Where each worker's own gradients are unscaled before they meet others', each may have a scale of its own.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, nullcontext
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.core.memory import Memory
from atoll.groups.chooser import Score
from atoll.groups.grouping import Grouping
from atoll.hub.planner import GroupingSettings
from atoll.train.api.place import Place
from support.parity import ALONE, await_groups
from support.pool import JobFailedError, WorkerPool
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.sampled

CHUNK, SCALE, AT = 4096, 1024.0, 2


def make(how: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)), nn.Linear(40, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, fused=how == "fused")


def budget(model: nn.Module, strategy: str) -> Memory:
    """Half of the values on the device, in whole blocks."""
    pages = sum(-(-parameter.nbytes // CHUNK) for parameter in model.parameters())
    budgets = Memory(device=str(pages // 2 * CHUNK), chunk=str(CHUNK))
    return budgets if strategy == "peers" else msgspec.structs.replace(budgets, step="host")


def configured(strategy: str, **more: Any) -> Config:
    return Config(run=Run(strategy=strategy), sync=Sync(timeout="60s", **more))  # type: ignore[arg-type]


# Under budgets or not, and whether the two workers make a group first.
CASES: dict[str, tuple[Config, bool]] = {
    "ring": (configured("ring"), False),
    "hierarchical": (
        Config(run=Run(strategy="hierarchical"), sync=Sync(timeout="60s"), groups=Groups(count=2)),
        False,
    ),
    "members": (configured("ring"), True),
    "server": (configured("server", consistency="bsp"), False),
    "server-lazy": (configured("server", consistency="bsp", lazy=True), False),
    "server-tiers": (configured("server", consistency="bsp"), True),
    "groups-bsp": (
        Config(
            run=Run(strategy="ps-hra"),
            sync=Sync(timeout="60s", consistency="bsp"),
            groups=Groups(probe=ALONE - 1),
        ),
        False,
    ),
    "groups-asp": (
        Config(
            run=Run(strategy="ps-hra"),
            sync=Sync(timeout="60s", consistency="asp"),
            groups=Groups(probe=ALONE - 1),
        ),
        False,
    ),
    "groups-tiers": (
        Config(
            run=Run(strategy="ps-hra"),
            sync=Sync(timeout="60s", consistency="asp"),
            groups=Groups(probe=ALONE - 1),
        ),
        True,
    ),
    "devices": (
        Config(run=Run(strategy="peers"), sync=Sync(timeout="60s", stale_max=0), groups=Groups(count=1)),
        False,
    ),
    "devices-tiers": (
        Config(run=Run(strategy="peers"), sync=Sync(timeout="60s", stale_max=0), groups=Groups(count=1)),
        True,
    ),
}


def served(stack: ExitStack, config: Config) -> str:
    """The address of a run of two workers, where its strategy has one."""
    grouping = None
    if config.run.strategy == "ps-hra":
        wanted = Grouping([[0, 1]])
        grouping = GroupingSettings(
            1,
            by="joint",
            consistency=config.sync.consistency,
            regroup=False,
            score_for=lambda _known: lambda grouping: Score(2.0 if grouping == wanted else 1.0),
        )
    if config.run.strategy in ("server", "ps-hra"):
        return stack.enter_context(ServedRun(workers=2, shards=2, grouping=grouping)).address
    return ""


def train(place: Place, config: Config, how: str, clips: bool, tiers: bool, address: str) -> int:
    """Worker 1's scale is another one from some step on; how many steps were made after that one."""
    with (
        served_worker(address, place.rank) if address else nullcontext(),
        atoll.join(config, place=None if address else place) as session,
    ):
        model, optimizer = make(how)
        session.prepare(model, optimizer, memory=budget(model, config.run.strategy) if tiers else None)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        first = ALONE + AT if config.run.strategy == "ps-hra" else AT
        for step in range(first + 5):
            if config.run.strategy == "ps-hra":
                await_groups(session, step)
            if step == first and place.rank == 1:
                scaler.update(SCALE / 2)
            scaler.scale(model(torch.ones(4, 40)).square().mean()).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert step < first + 2, f"worker {place.rank} made step {step}"
    return 0


@pytest.mark.parametrize(
    ("where", "how"),
    [
        pytest.param(where, how, marks=pytest.mark.soak if how == ("loop", "fused")[index % 2] else ())
        for index, where in enumerate(CASES)
        for how in ("loop", "fused")
    ],
)
def test_workers_whose_sum_is_of_different_scales_are_told_so(where: str, how: str, pool: WorkerPool) -> None:
    config, tiers = CASES[where]
    clips = list(CASES).index(where) % 2 == 1
    with ExitStack() as stack, pytest.raises(JobFailedError) as caught:
        pool.run(train, config, how, clips, tiers, served(stack, config), world=2)
    failures = caught.value.failures
    assert len(failures) == 2
    for failure in failures.values():
        assert failure.kind in ("UserError", "MismatchError"), str(caught.value)
    assert re.search(r"worker 0 divides gradients by 1024, worker 1 by 512 at step \d+", str(caught.value))
    assert "session.register(scaler=scaler)" in str(caught.value)


def train_apart(place: Place, config: Config, how: str, address: str) -> list[torch.Tensor]:
    """Each worker has a scale of its own. The gradient is all ones, whatever the parameters are."""
    with (
        served_worker(address, place.rank) if address else nullcontext(),
        atoll.join(config, place=None if address else place) as session,
    ):
        torch.manual_seed(0)
        model = nn.Linear(8, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=how == "fused")
        session.prepare(model, optimizer)
        start = model.weight.detach().clone()
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE * (1 + place.rank))
        for _ in range(4):
            scaler.scale(model(torch.ones(1, 8)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        session.barrier()
        return [start - model.weight.detach()]


@pytest.mark.parametrize("how", ["loop", "fused"])
@pytest.mark.parametrize("strategy", ["peers", "server"])
def test_each_worker_has_its_own_scale_where_it_unscales_before_the_sum(
    strategy: str, how: str, pool: WorkerPool
) -> None:
    """A step is of a mean, which is 1; under asp their number is by the order of arrival."""
    more: dict[str, Any] = {"stale_max": 0} if strategy == "peers" else {"consistency": "asp"}
    apart = configured(strategy, **more)
    with ExitStack() as stack:
        moved = pool.run(train_apart, apart, how, served(stack, apart), world=2)
    for (each,) in moved:
        assert torch.allclose(each, each[0, 0].expand_as(each), atol=1e-6)
        steps = each[0, 0].item() / 0.5
        assert steps == pytest.approx(4) if strategy == "peers" else 2 - 1e-5 <= steps <= 8 + 1e-5
