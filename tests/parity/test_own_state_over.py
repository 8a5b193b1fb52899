"""The optimizer's state goes over strategies, numbers of workers and the session's end, into plain torch.

Each life trains on its share of the same batches, so that all of them make the steps of one process.
"""

from __future__ import annotations

import itertools
import warnings
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.core.memory import Memory
from atoll.train.api.place import Place
from support.optimizers import FUSED, SETTINGS
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

STEPS, BATCH, TOLERANCE = 3, 4, 1e-7
# By name: the configuration, and whether there are budgets.
WAYS: dict[str, tuple[Config, bool]] = {
    "ring": (Config(run=Run(strategy="ring")), False),
    "hierarchical": (Config(run=Run(strategy="hierarchical"), groups=Groups(count=2)), False),
    "members": (Config(run=Run(strategy="ring")), True),
    "server": (Config(run=Run(strategy="server"), sync=Sync(consistency="bsp")), False),
    "asp": (Config(run=Run(strategy="server"), sync=Sync(consistency="asp")), False),
    "ps-hra": (Config(run=Run(strategy="ps-hra"), sync=Sync(consistency="bsp")), False),
    "peers": (Config(run=Run(strategy="peers"), sync=Sync(stale_max=0)), False),
}
SERVED = ("server", "asp", "ps-hra")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    inner = [each for _ in range(4) for each in (nn.Linear(24, 24), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), *inner, nn.Linear(24, 1)).double()


def make(name: str, settings: dict[str, Any], model: nn.Module) -> Optimizer:
    optimizer: Optimizer = getattr(torch.optim, name)(model.parameters(), **settings)
    return optimizer


def steps(
    model: nn.Module, optimizer: Optimizer, begin: int, end: int, rank: int = 0, world: int = 1
) -> None:
    for step in range(begin, end):
        x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step), dtype=torch.double)
        (model(x[rank::world]) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def life(
    place: Place,
    way: str,
    address: str,
    name: str,
    settings: dict[str, Any],
    folder: str,
    begin: int,
) -> list[Tensor]:
    """Resume, make STEPS steps and save, and then as many in plain torch on the whole batch; the
    parameters."""
    config, has_budgets = WAYS[way]
    served = served_worker(address, place.rank) if address else nullcontext()
    with served, atoll.join(config, place=None if address else place) as session:
        model = build()
        optimizer = make(name, settings, model)
        memory = Memory(device="16KiB", chunk="1KiB", step="host") if has_budgets else None
        session.prepare(model, optimizer, memory=memory)
        if begin:
            session.load(folder)
        steps(model, optimizer, begin, begin + STEPS, session.rank, session.world)
        session.save(folder)
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a state that has not come back
        states = optimizer.state_dict()["state"].values()
    for value in (each for state in states for each in state.values() if isinstance(each, Tensor)):
        storage = value.untyped_storage()
        assert storage.nbytes() == value.numel() * value.element_size()
        assert storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
    steps(model, optimizer, begin + STEPS, begin + 2 * STEPS)
    return [parameter.detach().clone() for parameter in model.parameters()]


IMPLEMENTATIONS = [
    (name, settings | how)
    for name, variants in SETTINGS.items()
    for settings in variants
    for how in ({"foreach": False}, {"foreach": True}, *([{"fused": True}] if name in FUSED else []))
]
# From each way with each world size to each: one optimizer for a pair here, so that any two choices of a way,
# a world size and an optimizer meet in some of them; soak has all.
WORLDS = [(2, 1), (1, 2), (2, 2), (1, 1)]
PAIRS = list(itertools.product(WAYS, WAYS))


def _world(way: str, wanted: int) -> int:
    """Members and groups are of several; under asp several have no order, and so no single result."""
    return 2 if way in ("members", "hierarchical") else 1 if way == "asp" else wanted


def _cases() -> list[Any]:
    cases = []
    for number, (source, to) in enumerate(PAIRS):
        for index, (name, settings) in enumerate(IMPLEMENTATIONS):
            worlds = WORLDS[(number + index) % 4]
            worlds = _world(source, worlds[0]), _world(to, worlds[1])
            chosen = index == (number * 5) % len(IMPLEMENTATIONS) and number % 2 == 0
            id_ = f"{source}{worlds[0]}-{to}{worlds[1]}-{name}-{'-'.join(k for k in settings if settings[k])}"
            marks = () if chosen else pytest.mark.soak
            cases.append(pytest.param(source, to, worlds, name, settings, id=id_, marks=marks))
    return cases


@pytest.mark.check
@pytest.mark.parametrize(("source", "to", "worlds", "name", "settings"), _cases())
def test_lives_of_one_training(
    source: str,
    to: str,
    worlds: tuple[int, int],
    name: str,
    settings: dict[str, Any],
    pool: WorkerPool,
    tmp_path: Path,
) -> None:
    plain = build()
    reference = make(name, settings, plain)
    steps(plain, reference, 0, STEPS)
    for number, (way, world) in enumerate(zip((source, to), worlds, strict=True)):
        with ExitStack() as stack:
            address = ""
            if way in SERVED:
                address = stack.enter_context(ServedRun(workers=world, shards=2)).address
            arguments = (way, address, name, settings, str(tmp_path / "saved"), number * STEPS)
            lived = pool.run(life, *arguments, world=world)
        steps(plain, reference, (number + 1) * STEPS, (number + 2) * STEPS)
        for rank, parameters in enumerate(lived):
            for got, right in zip(parameters, plain.parameters(), strict=True):
                off = (got - right).abs().max()
                assert off <= TOLERANCE, f"{way}, worker {rank}: differs by {off:.3g}"


def ends_by_error(place: Place, way: str, address: str) -> list[str]:
    """What is said where the script goes on with the optimizer after an error that it has caught."""
    config, _ = WAYS[way]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    served = served_worker(address, place.rank) if address else nullcontext()
    try:
        with served, atoll.join(config, place=None if address else place) as session:
            session.prepare(model, optimizer)
            steps(model, optimizer, 0, 1)
            raise KeyError("the script's own")
    except KeyError:
        pass
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(model, optimizer, 1, 3)
    return [str(each.message) for each in caught if each.category is RuntimeWarning]


@pytest.mark.check
@pytest.mark.parametrize(("way", "where"), [("server", "at the shards"), ("peers", "at the node's CPU side")])
def test_a_state_that_was_lost_by_an_error_is_said_once(way: str, where: str, pool: WorkerPool) -> None:
    with ExitStack() as stack:
        address = ""
        if way in SERVED:
            address = stack.enter_context(ServedRun(workers=1, shards=1)).address
        ((line,),) = pool.run(ends_by_error, way, address, world=1)
    assert line.startswith("AdamW is used after its session, and begins anew: ")
    assert where in line
    assert "session.load" in line
