"""A GradScaler does what it does in plain PyTorch, at every strategy and store, with every implementation.

One loop has all cases: steps that are unscaled by `step`, and by `unscale_` with clipping by the session or
by torch after it; with infinities on one worker, or on all.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.core.memory import Memory
from atoll.groups.chooser import Score
from atoll.groups.grouping import Grouping
from atoll.hub.planner import GroupingSettings
from atoll.memory.gradients import ChunkGradients
from atoll.tensors.optimizer import StepHooks
from atoll.tensors.remoteoptimizer import RemoteOptimizer
from atoll.tensors.torch_scaling import SCALES, count_unscaling
from atoll.train.api.place import Place
from support.parity import ALONE, await_groups
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.sampled

CHUNK, SCALE, MAX_NORM, TOLERANCE = 4096, 1024.0, 0.05, 1e-6
HOW: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
# Step by step: what the script does between backward and step, and on which workers the loss is infinite.
SCRIPT: list[tuple[str, str]] = [
    ("", ""),
    ("", ""),
    ("session", ""),
    ("", "first"),
    ("torch", ""),
    ("session", "first"),
    ("", "all"),
    ("torch", "first"),
    ("", ""),
    ("session", ""),
]


def make(how: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [each for _ in range(4) for each in (nn.Linear(40, 40), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(40, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **HOW[how])


def loss_of(model: nn.Module, step: int, rank: int, overflows: bool) -> Tensor:
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(100 * step + rank))
    loss: Tensor = (model(x) - 1).square().mean()
    return loss * math.inf if overflows else loss


def overflows(where: str, rank: int) -> bool:
    return where == "all" or (where == "first" and rank == 0)


def plain(how: str, world: int) -> list[Tensor]:
    """GradScaler on the mean over the workers, where a step with infinities is left out for all."""
    model, optimizer = make(how)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=4)
    for step, (clip, where) in enumerate(SCRIPT):
        losses = [loss_of(model, step, rank, overflows(where, rank)) for rank in range(world)]
        scaler.scale(torch.stack(losses).mean()).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def plain_of_peers(how: str, world: int) -> list[Tensor]:
    """Each node scales by itself: the mean is over those whose gradients are finite, and it is clipped."""
    model, optimizer = make(how)
    for step, (clip, where) in enumerate(SCRIPT):
        gradients = []
        for rank in range(world):
            if overflows(where, rank):
                continue
            loss_of(model, step, rank, False).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
            optimizer.zero_grad()
        if not gradients:
            continue
        for parameter, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def budget(model: nn.Module) -> Memory:
    """Half of the values on the device, in whole blocks."""
    pages = sum(-(-parameter.nbytes // CHUNK) for parameter in model.parameters())
    return Memory(device=str(pages // 2 * CHUNK), chunk=str(CHUNK), step="host")


def train(
    place: Place, config: Config, how: str, address: str = "", tiers: bool = False, groups: bool = False
) -> list[Tensor]:
    served = served_worker(address, place.rank) if address else nullcontext()
    with served, atoll.join(config, place=None if address else place) as session:
        model, optimizer = make(how)
        memory = budget(model) if tiers else None
        if memory is not None and config.run.strategy == "peers":
            memory = Memory(device=memory.device, chunk=memory.chunk)
        elif memory is not None and place.world == 1 and config.run.strategy == "ring":
            memory = Memory(device=memory.device, host="1GiB", chunk=memory.chunk, step="host")
        session.prepare(model, optimizer, memory=memory)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=4)
        for step, (clip, where) in enumerate(SCRIPT):
            if groups and session.iteration == ALONE:  # a step that was left out is none
                await_groups(session, ALONE)
            scaler.scale(loss_of(model, step, place.rank, overflows(where, place.rank))).backward()
            if clip:
                scaler.unscale_(optimizer)
            if clip == "session":
                session.clip_grad_norm_(MAX_NORM)
            elif clip == "torch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]


def configured(strategy: str, consistency: str | None = None, **more: Any) -> Config:
    sync = Sync(timeout="60s") if consistency is None else Sync(timeout="60s", consistency=consistency)  # type: ignore[arg-type]
    return Config(run=Run(strategy=strategy), sync=sync, **more)  # type: ignore[arg-type]


def check(seen: list[list[Tensor]], expected: list[Tensor]) -> None:
    for rank, parameters in enumerate(seen):
        for index, (got, right) in enumerate(zip(parameters, expected, strict=True)):
            off = (got - right).abs().max()
            assert off <= TOLERANCE, f"worker {rank}, parameter {index}: differs by {off:.3g}"


CASES = {
    "alone": (configured("ring"), 1, False),
    "ring": (configured("ring"), 2, False),
    "hierarchical": (configured("hierarchical", groups=Groups(count=2)), 2, False),
    "tiers": (configured("ring"), 1, True),
    "members": (configured("ring"), 2, True),
    "server-bsp": (configured("server", "bsp"), 2, False),
    "server-bsp-lazy": (
        Config(run=Run(strategy="server"), sync=Sync(timeout="60s", consistency="bsp", lazy=True)),
        2,
        False,
    ),
    "server-bsp-tiers": (configured("server", "bsp"), 2, True),
    "server-asp": (configured("server", "asp"), 1, False),
    "server-ssp": (configured("server", "ssp"), 1, False),
    "server-asp-tiers": (configured("server", "asp"), 1, True),
    "ps-hra-bsp": (configured("ps-hra", "bsp", groups=Groups(probe=ALONE - 1)), 2, False),
    "ps-hra-asp": (configured("ps-hra", "asp"), 1, False),
    "peers": (
        Config(run=Run(strategy="peers"), sync=Sync(timeout="60s", stale_max=0)),
        2,
        False,
    ),
    "peers-tiers": (
        Config(run=Run(strategy="peers"), sync=Sync(timeout="60s", stale_max=0)),
        2,
        True,
    ),
}
# Each strategy and store with a fused optimizer and with another; soak has the third too.
TABLE = [
    pytest.param(where, how, marks=pytest.mark.soak if how == ("loop", "foreach")[index % 2] else ())
    for index, where in enumerate(CASES)
    for how in HOW
]


def _one_group() -> GroupingSettings:
    """Of both workers, once they have made their first steps apart."""
    wanted = Grouping([[0, 1]])
    return GroupingSettings(
        1,
        by="joint",
        consistency="bsp",
        regroup=False,
        score_for=lambda _known: lambda grouping: Score(2.0 if grouping == wanted else 1.0),
    )


@pytest.mark.parametrize(("where", "how"), TABLE)
def test_scaled_steps_are_those_of_plain_pytorch(where: str, how: str, pool: WorkerPool) -> None:
    config, world, tiers = CASES[where]
    with ExitStack() as stack:
        address, groups = "", where == "ps-hra-bsp"
        if config.run.strategy in ("server", "ps-hra"):
            run = ServedRun(workers=world, shards=2, grouping=_one_group() if groups else None)
            address = stack.enter_context(run).address
        pool.submit(train, config, how, address, tiers, groups, world=world)
        expected = plain_of_peers(how, world) if config.run.strategy == "peers" else plain(how, world)
        check(pool.collect(), expected)


def train_beside_infinity(place: Place, address: str, consistency: str, how: str) -> list[Tensor]:
    """Worker 0's gradients are infinite in every step."""
    config = configured("server", consistency)
    with served_worker(address, place.rank), atoll.join(config) as session:
        model, optimizer = make(how)
        session.prepare(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for step in range(5):
            loss = loss_of(model, step, place.rank, overflows("first", place.rank))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("consistency", "how"), [("asp", "loop"), ("asp", "fused"), ("ssp", "fused")])
def test_a_contribution_with_infinities_is_not_applied(consistency: str, how: str, pool: WorkerPool) -> None:
    """The shards go on with what worker 1 contributes: how many of its contributions make a step is by the
    order in which they come, and so is the result; it is the infinities' and the scale's in no order."""
    with ServedRun(workers=2, shards=2) as run:
        seen = pool.run(train_beside_infinity, run.address, consistency, how, world=2)
    start, _ = make(how)
    for parameters in seen:
        moved = [(a - b).abs().max().item() for a, b in zip(parameters, start.parameters(), strict=True)]
        assert max(moved) < 3.0
    assert max(moved) > 0.01  # worker 1


@pytest.mark.parametrize("how", HOW)
def test_gradients_that_are_lent_as_copies(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from host memory to a GPU."""
    monkeypatch.setattr(ChunkGradients, "on_device", lambda _, gradient: gradient.clone())
    config, _, tiers = CASES["tiers"]
    check([train(Place(), config, how, tiers=tiers)], plain(how, 1))


def test_a_fused_optimizer_is_as_it_was_after_the_session() -> None:
    """What a GradScaler is told of it, of the class or of the object."""
    for how in HOW:
        _, optimizer = make(how)
        before = dict(vars(optimizer))
        hooks = StepHooks(before=lambda: None, accept=lambda _: True, after=lambda: None)
        remote = RemoteOptimizer(
            optimizer,
            hooks,
            make=lambda *_: None,
            settings=dict,
            fetch=dict,
            home="elsewhere",
            counts_skips=True,
        )
        assert optimizer._step_supports_amp_scaling
        remote.close()
        assert dict(vars(optimizer)).keys() == before.keys()
        assert vars(optimizer).get(SCALES) == before.get(SCALES)


def test_a_scaler_that_only_looks_for_infinities_writes_nothing() -> None:
    """Under bsp a mean that the script has changed is sent once more."""
    count_unscaling()
    gradient, found = torch.ones(3), torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, torch.ones(()))
    assert gradient._version == 0
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, torch.tensor(0.5))
    assert gradient._version == 1
    assert gradient.tolist() == [0.5] * 3
    count_unscaling()  # again: it stays one call
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, torch.tensor(0.5))
    assert gradient._version == 2
