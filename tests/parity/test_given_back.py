"""After a session with budgets of memory, model and optimizer are plain ones with all of their state.

Where a worker has no room for them, whoever uses them is told so in one line.
"""

from __future__ import annotations

import itertools
import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_own_state import assert_own
from torch import Tensor, nn
from torch.optim import Optimizer

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.core.errors import UserError
from atoll.core.memory import Memory
from atoll.memory import fitted
from atoll.train.api.place import Place
from support.optimizers import FUSED, SETTINGS
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.check  # sessions of six steps and more, one after another

STEPS, BATCH, TOLERANCE = 3, 12, 1e-7
# By name: the configuration and the number of workers.
WAYS: dict[str, tuple[Config, int]] = {
    "members": (Config(run=Run(strategy="ring")), 2),
    "three members": (Config(run=Run(strategy="ring")), 3),
    "groups of members": (Config(run=Run(strategy="hierarchical"), groups=Groups(count=2)), 4),
    "alone": (Config(), 1),
    "a ring of one": (Config(run=Run(strategy="ring")), 1),
    "server": (Config(run=Run(strategy="server"), sync=Sync(consistency="bsp")), 2),
    "asp": (Config(run=Run(strategy="server"), sync=Sync(consistency="asp")), 1),
    "ps-hra": (Config(run=Run(strategy="ps-hra"), sync=Sync(consistency="bsp")), 2),
    "ps-hra asp": (Config(run=Run(strategy="ps-hra"), sync=Sync(consistency="asp")), 1),
    "peers": (Config(run=Run(strategy="peers"), sync=Sync(stale_max=0)), 2),
}
SERVED = ("server", "asp", "ps-hra", "ps-hra asp")
MEMBERS = ("members", "three members", "groups of members")
ON_DISK = ("alone", "server", "members")  # with a disk tier, too
IMPLEMENTATIONS = [
    (name, settings | how)
    for name, variants in SETTINGS.items()
    for settings in variants
    for how in ({"foreach": False}, {"foreach": True}, *([{"fused": True}] if name in FUSED else []))
]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    inner = [each for _ in range(4) for each in (nn.Linear(24, 24), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), *inner, nn.Linear(24, 1)).double()


def make(name: str, settings: dict[str, Any], model: nn.Module) -> Optimizer:
    optimizer: Optimizer = getattr(torch.optim, name)(model.parameters(), **settings)
    return optimizer


def step(model: nn.Module, optimizer: Optimizer, number: int, rank: int = 0, world: int = 1) -> None:
    x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(number), dtype=torch.double)
    (model(x[rank::world]) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def seen(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    values = {name: each.detach().clone() for name, each in model.named_parameters()}
    for index, state in optimizer.state_dict()["state"].items():
        values |= {f"{index}.{key}": torch.as_tensor(value).clone() for key, value in state.items()}
    return values


def memory_of(on_disk: bool) -> Memory:
    more = {"host": "256KiB", "disk": f"{tempfile.mkdtemp()}:4MiB"} if on_disk else {}
    return Memory(device="16KiB", chunk="4KiB", step="host", **more)  # type: ignore[arg-type]


def train(place: Place, way: str, address: str, name: str, settings: dict[str, Any], on_disk: bool) -> Any:
    """Make STEPS steps in a session; returns its model and optimizer, after its end."""
    config, _ = WAYS[way]
    model = build()
    optimizer = make(name, settings, model)
    served = served_worker(address, place.rank) if address else nullcontext()
    place = Place() if way == "alone" else place
    with served, atoll.join(config, place=None if address else place) as session:
        session.prepare(model, optimizer, memory=memory_of(on_disk))
        assert session._state.tiers
        assert any(type(parameter) is not nn.Parameter for parameter in model.parameters())
        for number in range(STEPS):
            step(model, optimizer, number, session.rank, session.world)
    return model, optimizer


def goes_on(place: Place, *arguments: Any) -> list[dict[str, Tensor]]:
    """Model and state after a session, and after each of as many steps in plain torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a state that has not come back
        model, optimizer = train(place, *arguments)
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        assert_own(optimizer.state_dict()["state"])
        found = [seen(model, optimizer)]
        for number in range(STEPS, 2 * STEPS):
            step(model, optimizer, number)
            found.append(seen(model, optimizer))
    return found


def run(pool: WorkerPool, way: str, script: Callable[..., Any], *arguments: Any) -> list[Any]:
    world = WAYS[way][1]
    with ExitStack() as stack:
        address = ""
        if way in SERVED:
            address = stack.enter_context(ServedRun(workers=world, shards=2)).address
        return pool.run(script, way, address, *arguments, world=world)


def _cases() -> list[Any]:
    cases = []
    ways = [(way, False) for way in WAYS] + [(way, True) for way in ON_DISK]
    for number, (way, on_disk) in enumerate(ways):
        for index, (name, settings) in enumerate(IMPLEMENTATIONS):
            chosen = index in {(number * 7) % len(IMPLEMENTATIONS), (number * 7 + 17) % len(IMPLEMENTATIONS)}
            how = "-".join(key for key in settings if settings[key])
            id_ = f"{way}{'-disk' * on_disk}-{name}-{how}".replace(" ", "_")
            marks = () if chosen else pytest.mark.soak
            cases.append(pytest.param(way, on_disk, name, settings, id=id_, marks=marks))
    return cases


@pytest.mark.parametrize(("way", "on_disk", "name", "settings"), _cases())
def test_plain_torch_goes_on(
    pool: WorkerPool, way: str, on_disk: bool, name: str, settings: dict[str, Any]
) -> None:
    plain = build()
    reference = make(name, settings, plain)
    for number in range(STEPS):
        step(plain, reference, number)
    right = [seen(plain, reference)]
    for number in range(STEPS, 2 * STEPS):
        step(plain, reference, number)
        right.append(seen(plain, reference))
    for rank, found in enumerate(run(pool, way, goes_on, name, settings, on_disk)):
        for number, (expected, got) in enumerate(zip(right, found, strict=True)):
            assert expected.keys() == got.keys()
            for key, value in expected.items():
                off = (got[key] - value).abs().max()
                assert off <= TOLERANCE, f"worker {rank}, {number} steps on: {key} differs by {off:.3g}"


# Where there is no room


def uses_of(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """What is said of each way to use model and optimizer."""
    said = []
    for use in (
        lambda: model(torch.zeros(1, 8, dtype=torch.double)),
        optimizer.state_dict,
        lambda: len(optimizer.state),
        optimizer.state_dict,
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                use()
                said.append("; ".join(str(each.message) for each in caught))
            except UserError as error:
                said.append(str(error))
    return said


def short_of_room(place: Place, way: str, address: str, room: list[int]) -> Any:
    with patch.object(fitted, "available_bytes", lambda: room[place.rank % len(room)]):
        model, optimizer = train(place, way, address, "AdamW", {}, on_disk=False)
    if way == "alone" or room[place.rank % len(room)] > 2**30:
        found = [seen(model, optimizer)]
        for number in range(STEPS, 2 * STEPS):
            step(model, optimizer, number)
            found.append(seen(model, optimizer))
        return found
    return uses_of(model, optimizer)


@pytest.mark.parametrize("way", MEMBERS)
def test_members_without_room_are_told_where_they_use_model_or_state(pool: WorkerPool, way: str) -> None:
    for said in run(pool, way, short_of_room, [30_000]):
        for line in said:
            assert "this one has left them without the whole of it: model and optimizer state would" in line
            assert "take 64.0 KiB, and this worker's machine has free 29.3 KiB; read or save" in line
            assert "\n" not in line


@pytest.mark.parametrize("way", ["server", "ps-hra", "peers"])
def test_a_state_for_which_there_is_no_room_is_told_once(pool: WorkerPool, way: str) -> None:
    for forward, used, *more in run(pool, way, short_of_room, [30_000]):
        assert not forward  # the values have room
        assert used.startswith("AdamW is used after its session, and begins anew: ")
        assert re.search(
            r"model and optimizer state would take \d\d\.\d KiB, and this worker's machine has free", used
        )
        assert "session.save" in used
        assert "\n" not in used
        assert not any(more)


def right_steps() -> list[dict[str, Tensor]]:
    model = build()
    optimizer = make("AdamW", {}, model)
    found = []
    for number in range(2 * STEPS):
        step(model, optimizer, number)
        found.append(seen(model, optimizer))
    return found[STEPS - 1 :]


def assert_right(found: list[dict[str, Tensor]]) -> None:
    for expected, got in zip(right_steps(), found, strict=True):
        assert expected.keys() == got.keys()
        for key, value in expected.items():
            assert (got[key] - value).abs().max() <= TOLERANCE, key


def test_alone_all_stays_where_it_is_and_goes_on(pool: WorkerPool) -> None:
    (found,) = run(pool, "alone", short_of_room, [30_000])
    assert_right(found)


@pytest.mark.parametrize("way", MEMBERS)
def test_members_with_room_get_all_beside_members_without(pool: WorkerPool, way: str) -> None:
    results = run(pool, way, short_of_room, [2**40, 30_000])
    for rank, found in enumerate(results):
        if rank % 2:
            assert all("this one has left them without the whole of it" in line for line in found)
        else:
            assert_right(found)


def ends_by_error(place: Place, way: str, address: str) -> list[str]:
    model = build()
    optimizer = make("AdamW", {}, model)
    try:
        with atoll.join(WAYS[way][0], place=place) as session:
            session.prepare(model, optimizer, memory=memory_of(on_disk=False))
            step(model, optimizer, 0, session.rank, session.world)
            session.barrier()
            raise KeyError("the script's own")
    except KeyError:
        pass
    return uses_of(model, optimizer)


def test_members_that_an_error_has_parted_are_told_so(pool: WorkerPool) -> None:
    for said in run(pool, "members", ends_by_error):
        for line in said:
            assert "this one has left them; read or save its values before that" in line


def two_models(place: Place, way: str, address: str) -> list[dict[str, Tensor]]:
    pairs = []
    for _ in range(2):
        model = build()
        pairs.append((model, make("AdamW", {}, model)))
    with atoll.join(WAYS[way][0], place=place) as session:
        for model, optimizer in pairs:
            session.prepare(model, optimizer, memory=memory_of(on_disk=False))
        for number in range(STEPS):
            for model, optimizer in pairs:
                step(model, optimizer, number, session.rank, session.world)
    found = []
    for model, optimizer in pairs:
        for number in range(STEPS, STEPS + 1):
            step(model, optimizer, number)
        found.append(seen(model, optimizer))
    return found


def test_two_models_of_members_come_back(pool: WorkerPool) -> None:
    expected = right_steps()[1]
    for each in itertools.chain(*run(pool, "members", two_models)):
        assert expected.keys() == each.keys()
        assert all((each[key] - value).abs().max() <= TOLERANCE for key, value in expected.items())
