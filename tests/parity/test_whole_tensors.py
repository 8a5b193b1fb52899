"""Optimizers that step whole tensors, not elements: each step of every strategy that takes them against plain
PyTorch. In float64 the two differ in the order of additions at most.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn

import atoll
from atoll.core.config import Config, Run, Sync
from atoll.core.errors import UserError
from atoll.core.memory import Memory
from atoll.memory.parameters import ChunkParameter
from atoll.tensors.chunkstate import copied
from atoll.tensors.stepunit import tensor_bytes
from support.optimizers import BlockwiseSGD, Halves, HalvesSGD, ManyStates
from support.pool import WorkerPool, ring_of_one
from support.runs import KINDS, alone, run_at, run_with

pytestmark = pytest.mark.sampled

STEPS, SAMPLES, WORLD = 4, 4, 2
Make = Callable[[Any], torch.optim.Optimizer]


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.05, weight_decay=0.01)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05)


def many_states(parameters: Any) -> torch.optim.Optimizer:
    return ManyStates(parameters, lr=0.05)


def halves(parameters: Any) -> torch.optim.Optimizer:
    return HalvesSGD(parameters, lr=0.05, weight=0.5, part=0.75)


def blockwise(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with a state of another dtype for large parameters."""
    return BlockwiseSGD(parameters, lr=0.05, block=64, least=500)


MAKERS = [muon, adafactor, many_states, halves]
HERE = ("ring", "hierarchical", "elastic")  # each worker steps its own copy
ELSEWHERE = ("server", "ps-hra")  # the shards step


def tall(bias: bool) -> nn.Sequential:
    """Return a model of matrices that are no squares; one is too large for a small chunk."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 20, bias=bias), nn.Tanh(), nn.Linear(20, 48, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(48, 4, bias=bias)).double()


def loss_of(model: nn.Module, step: int, share: slice) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES * WORLD, 32, generator=generator, dtype=torch.float64)
    found: Tensor = model(inputs[share]).square().mean()
    return found


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, share: slice) -> list[list[Tensor]]:
    seen = []
    for step in range(STEPS):
        loss_of(model, step, share).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
    return seen


def plain(make: Make) -> tuple[list[list[Tensor]], dict[int, Any]]:
    model = tall(bias=make is not muon)
    optimizer = make(model.parameters())
    return steps_of(model, optimizer, slice(None)), optimizer.state_dict()["state"]


def trained(session: atoll.Session, make: Make) -> tuple[list[list[Tensor]], dict[int, Any]]:
    model = tall(bias=make is not muon)
    optimizer = make(model.parameters())
    session.prepare(model, optimizer)
    share = slice(session.rank * SAMPLES, (session.rank + 1) * SAMPLES) if session.world > 1 else slice(None)
    return steps_of(model, optimizer, share), optimizer.state_dict()["state"]


def trained_in_tiers(session: atoll.Session, make: Make) -> tuple[list[list[Tensor]], dict[int, Any]]:
    """Train, and see that the model lies in tiers. The states are read within the session."""
    model = tall(bias=make is not muon)
    optimizer = make(model.parameters())
    session.prepare(model, optimizer)
    assert all(isinstance(parameter, ChunkParameter) for parameter in model.parameters())
    share = slice(session.rank * SAMPLES, (session.rank + 1) * SAMPLES)
    return steps_of(model, optimizer, share), copied(optimizer.state_dict()["state"])


def check_states(found: Any, right: Any) -> None:
    """Check that two states have equal keys, shapes, dtypes and kinds, and nearly equal values."""
    assert isinstance(found, type(right))  # a tensor may be read when it is used
    if isinstance(right, dict):
        assert found.keys() == right.keys()
        for key, value in right.items():
            check_states(found[key], value)
    elif isinstance(right, Halves):
        check_states([found.high, found.rest], [right.high, right.rest])
    elif isinstance(right, (list, tuple)):
        assert len(found) == len(right)
        for one, other in zip(found, right, strict=True):
            check_states(one, other)
    elif isinstance(right, Tensor):
        assert (found.shape, found.dtype) == (right.shape, right.dtype)
        assert torch.allclose(found.double(), right.double(), rtol=1e-9, atol=1e-12)
    else:
        assert found == right


def check_like_plain(found: list[Any], make: Make) -> None:
    right, state = plain(make)
    for seen, kept in found:
        for one, other in zip(seen, right, strict=True):
            check_equal(one, other)
        check_states(kept, state)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", HERE)
def test_each_step_is_plain_torchs(pool: WorkerPool, kind: str, make: Make) -> None:
    check_like_plain(run_at(pool, kind, trained, make, world=WORLD), make)


@pytest.mark.parametrize("make", [muon, adafactor])
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_each_step_of_a_shard_is_plain_torchs(pool: WorkerPool, kind: str, make: Make) -> None:
    check_like_plain(run_at(pool, kind, trained, make, world=WORLD), make)


@pytest.mark.parametrize("make", MAKERS)
def test_each_step_of_cpu_sides_is_plain_torchs(pool: WorkerPool, make: Make) -> None:
    check_like_plain(run_at(pool, "peers", trained, make, world=WORLD), make)


@pytest.mark.parametrize("make", [muon, adafactor])
@pytest.mark.parametrize("kind", ["asp", "ssp", "ps-hra asp"])
def test_one_asynchronous_worker_steps_as_plain_torch(pool: WorkerPool, kind: str, make: Make) -> None:
    check_like_plain(run_at(pool, kind, trained, make, world=1), make)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", ["tiers", "server tiers", "peers tiers"])
def test_each_step_in_tiers_is_plain_torchs(pool: WorkerPool, kind: str, make: Make) -> None:
    """Members of a ring have whole chunks; shards and CPU sides step whole tensors for values in tiers."""
    if kind == "server tiers" and make in (many_states, halves):
        pytest.skip("its class is the test's own, which a shard does not import")
    check_like_plain(run_at(pool, kind, trained_in_tiers, make, world=WORLD), make)


@pytest.mark.parametrize("make", [muon, adafactor])
def test_each_step_of_a_group_in_tiers_is_plain_torchs(pool: WorkerPool, make: Make) -> None:
    config = Config(run=Run(strategy="ps-hra"), sync=Sync(consistency="bsp"), memory=KINDS["tiers"].memory)
    check_like_plain(run_with(pool, config, trained_in_tiers, make, world=WORLD, shards=1), make)


def gone_back(session: atoll.Session, make: Make, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the values at the end of a run, and after the same steps from a checkpoint in between."""
    model = tall(bias=make is not muon)
    optimizer = make(model.parameters())
    session.prepare(model, optimizer)
    share = slice(session.rank * SAMPLES, (session.rank + 1) * SAMPLES)
    steps_of(model, optimizer, share)
    session.save(folder)
    then = steps_of(model, optimizer, share)[-1]
    session.load(folder)
    return then, steps_of(model, optimizer, share)[-1]


@pytest.mark.parametrize("make", [muon, adafactor, halves])
@pytest.mark.parametrize("kind", ["ring", "tiers", "server tiers", "peers tiers"])
def test_a_checkpoint_in_tiers_has_every_state(
    pool: WorkerPool, kind: str, make: Make, tmp_path: Path
) -> None:
    if kind == "server tiers" and make is halves:
        pytest.skip("its class is the test's own, which a shard does not import")
    for then, again in run_at(pool, kind, gone_back, make, str(tmp_path / "saved"), world=WORLD):
        assert all(map(torch.equal, then, again))


@pytest.mark.parametrize("tiers", [False, True], ids=["resident", "tiers"])
@pytest.mark.parametrize("make", [*MAKERS, blockwise])
def test_a_worker_alone_is_bit_equal(make: Make, tiers: bool) -> None:
    (seen, state), (right, kept) = alone(trained, make, tiers=tiers), plain(make)
    for one, other in zip(seen, right, strict=True):
        for found, expected in zip(one, other, strict=True):
            assert torch.equal(found, expected)
    check_states(state, kept)


def deep() -> nn.Sequential:
    """Return a model of which the budget of `under_a_quarter` is a quarter."""
    torch.manual_seed(0)
    layers = [layer for _ in range(9) for layer in (nn.Linear(32, 32, bias=False), nn.Tanh())]
    return nn.Sequential(*layers).double()


def under_a_quarter(session: atoll.Session, make: Make) -> tuple[list[list[Tensor]], Any, int]:
    model = deep()
    optimizer = make(model.parameters())
    budget = sum(parameter.nbytes for parameter in model.parameters()) // 4
    session.prepare(model, optimizer, memory=Memory(device=str(budget), chunk="4096", step="host"))
    share = slice(session.rank * SAMPLES, (session.rank + 1) * SAMPLES) if session.world > 1 else slice(None)
    seen = steps_of(model, optimizer, share)
    tiers = session._state.prepared[0].tiers
    assert tiers is not None
    assert tiers.fitted is not None
    figures = tiers.fitted.stats()
    assert figures.device_peak <= budget
    return seen, copied(optimizer.state_dict()["state"]), figures.device_peak


@pytest.mark.parametrize("world", [1, WORLD])
@pytest.mark.parametrize("make", [adafactor, blockwise, halves])
def test_a_quarter_of_the_model_on_the_device(pool: WorkerPool, make: Make, world: int) -> None:
    """Row and column factors, and 8-bit codes with their scales, under a budget of a quarter of the values.

    The states are as many bytes as plain torch's.
    """
    model = deep()
    optimizer = make(model.parameters())
    right = steps_of(model, optimizer, slice(None) if world == 1 else slice(0, world * SAMPLES))
    kept = optimizer.state_dict()["state"]
    for seen, state, _ in run_with(pool, KINDS["ring"], under_a_quarter, make, world=world):
        for one, other in zip(seen, right, strict=True):
            if world == 1:
                assert all(map(torch.equal, one, other))
            check_equal(one, other)
        assert tensor_bytes(state) == tensor_bytes(kept)
        check_states(state, kept)


def test_the_script_may_say_the_unit() -> None:
    """An element-wise optimizer gives the same values in either unit; a word that is none is refused."""
    for step in ("tensor", "element", None):
        model = tall(bias=True)
        with atoll.join(Config(), place=ring_of_one()) as session:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            session.prepare(model, optimizer, step=step)
            found = steps_of(model, optimizer, slice(None))
        twin = tall(bias=True)
        right = steps_of(twin, torch.optim.AdamW(twin.parameters(), lr=0.01), slice(None))
        assert all(map(torch.equal, found[-1], right[-1])), step
    model = tall(bias=False)
    for make, step, error, line in (
        (adafactor, "chunk", UserError, r"step='chunk'\): the unit is 'element' or 'tensor'; leave step out"),
        (
            muon,
            "element",
            UserError,
            r"step='element'\): Muon cannot step flat parameters .*; leave",
        ),
    ):
        with atoll.join(Config(), place=ring_of_one()) as session, pytest.raises(error, match=line):
            session.prepare(model, make(model.parameters()), step=step)


def test_element_is_the_scripts_own_risk() -> None:
    """Adafactor in flat runs trains, and comes out otherwise than plain torch's."""
    model = tall(bias=True)
    with atoll.join(Config(), place=ring_of_one()) as session:
        optimizer = adafactor(model.parameters())
        session.prepare(model, optimizer, step="element")
        found = steps_of(model, optimizer, slice(None))
    assert all(bool(values.isfinite().all()) for values in found[-1])
    assert not all(map(torch.equal, found[-1], plain(adafactor)[0][-1]))
