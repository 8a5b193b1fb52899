"""Each parameter's optimizer state has tensors of its own, as in torch.

This holds in the state_dict, in what is saved of it, in checkpoints and after the session. So plain torch,
which counts each parameter's steps, goes on from it. A state in which several parameters have one tensor, as
older versions saved it, is read right.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import atoll
from atoll.core.config import Chunks, Config
from atoll.core.memory import Memory
from atoll.tensors.checkpoint import read_checkpoint, write_checkpoint
from atoll.train.api.place import Place
from support.optimizers import FUSED, SETTINGS
from support.pool import ring_of_one

pytestmark = pytest.mark.sampled

STEPS = 3
LOADED = 1e-7
Maker = Callable[[nn.Module], Optimizer]

IMPLEMENTATIONS = [
    (name, settings | how)
    for name, variants in SETTINGS.items()
    for settings in variants
    for how in ({"foreach": False}, {"foreach": True}, *([{"fused": True}] if name in FUSED else []))
]
WAYS = ["ring", "alone", "tiers"]
_IDS = [f"{name}-{'-'.join(k for k in settings if settings[k])}" for name, settings in IMPLEMENTATIONS]
# Any two choices of a way from and a way to meet for some optimizer; soak has all.
PAIRS = list(itertools.product(WAYS, WAYS))
TABLE = [
    pytest.param(*case, *pair, id=f"{id_}-{pair[0]}-{pair[1]}", marks=() if chosen else pytest.mark.soak)
    for index, (case, id_) in enumerate(zip(IMPLEMENTATIONS, _IDS, strict=True))
    for number, pair in enumerate(PAIRS)
    for chosen in [number in (index % 9, (index + 4) % 9)]
]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def steps(model: nn.Module, optimizer: Optimizer, begin: int, end: int) -> None:
    for step in range(begin, end):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.double)
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make(name: str, settings: dict[str, Any], model: nn.Module) -> Optimizer:
    optimizer: Optimizer = getattr(torch.optim, name)(model.parameters(), **settings)
    return optimizer


def join(way: str) -> atoll.Session:
    return atoll.join(Config(), place=ring_of_one() if way == "ring" else Place())


def prepare(session: atoll.Session, way: str, model: nn.Module, optimizer: Optimizer) -> None:
    memory = Memory(device="4KiB", host="1GiB", chunk="256B") if way == "tiers" else None
    session.prepare(model, optimizer, memory=memory)


def assert_own(states: Mapping[Any, Mapping[str, Any]]) -> None:
    """No tensor shares memory with another, and none is a part of a larger storage."""
    seen = set()
    for state in states.values():
        for value in state.values():
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                assert storage.data_ptr() not in seen
                assert storage.nbytes() == value.numel() * value.element_size()
                seen.add(storage.data_ptr())


def assert_equal(
    model: nn.Module, optimizer: Optimizer, plain: nn.Module, reference: Optimizer, tolerance: float = 0.0
) -> None:
    """`tolerance`: torch's load_state_dict makes NAdam's mu_product more precise than it was."""
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (a - b).abs().max() <= tolerance, f"{name}: differs by {(a - b).detach().abs().max():.3g}"
    expected, got = reference.state_dict()["state"], optimizer.state_dict()["state"]
    assert expected.keys() == got.keys()
    for index, state in expected.items():
        assert state.keys() == got[index].keys()
        for key, value in state.items():
            off = (torch.as_tensor(value) - torch.as_tensor(got[index][key])).abs().max()
            assert off <= tolerance, (index, key)


def saved(optimizer: Optimizer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return file


@pytest.mark.parametrize(("name", "settings", "source", "to"), TABLE)
def test_state_goes_into_plain_torch_and_on(
    name: str, settings: dict[str, Any], source: str, to: str, tmp_path: Path
) -> None:
    plain = build()
    reference = make(name, settings, plain)
    steps(plain, reference, 0, STEPS)

    model = build()
    optimizer = make(name, settings, model)
    with join(source) as session:
        prepare(session, source, model, optimizer)
        steps(model, optimizer, 0, STEPS)
        held = {key: value.clone() for key, value in model.state_dict().items()}
        file = saved(optimizer)
        session.save(tmp_path / "new")
    assert_own(optimizer.state)
    assert_own(torch.load(file)["state"])
    file.seek(0)
    largest = sum(v.nbytes for s in reference.state.values() for v in s.values() if isinstance(v, Tensor))
    assert (
        len(file.getbuffer())
        < largest + len(saved(torch.optim.SGD(build().parameters())).getbuffer()) + 16384
    )

    fresh = build()
    fresh.load_state_dict(held)
    lives = [(model, optimizer), (fresh, make(name, settings, fresh))]  # as the session has left it; by torch
    lives[1][1].load_state_dict(torch.load(file))

    _with_one_tensor_for_several(tmp_path / "new", tmp_path / "old")
    steps(plain, reference, STEPS, 2 * STEPS)
    for path in ("new", "old"):
        another = build()
        its = make(name, settings, another)
        with join(to) as session:
            prepare(session, to, another, its)
            session.load(tmp_path / path)
            steps(another, its, STEPS, 2 * STEPS)
            assert_equal(another, its, plain, reference, LOADED)
        assert_own(its.state)
        lives.append((another, its))
    for each, its in lives[:2]:
        steps(each, its, STEPS, 2 * STEPS)
    steps(plain, reference, 2 * STEPS, 3 * STEPS)
    for each, its in lives:
        steps(each, its, 2 * STEPS, 3 * STEPS)
        assert_equal(each, its, plain, reference, LOADED)


def _with_one_tensor_for_several(source: Path, to: Path) -> None:
    """A checkpoint as it was before each parameter had its own."""
    checkpoint = read_checkpoint(source)
    first: dict[str, Any] = {}
    for state in checkpoint.trees["optimizer"][0]["state"].values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 0:
                state[key] = first.setdefault(key, value)
    write_checkpoint(to, model=checkpoint.model, trees=checkpoint.trees)


@pytest.mark.parametrize("way", WAYS)
def test_a_state_with_one_tensor_for_several_is_taken_over_when_prepared(way: str) -> None:
    """What plain torch has loaded from a file of an older version."""
    plain, model = build(), build()
    reference, optimizer = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(model.parameters())
    steps(plain, reference, 0, STEPS)
    state = copy.deepcopy(reference.state_dict())
    for each in state["state"].values():
        each["step"] = state["state"][0]["step"]
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(state)
    with join(way) as session:
        prepare(session, way, model, optimizer)
        steps(model, optimizer, STEPS, 2 * STEPS)
        steps(plain, reference, STEPS, 2 * STEPS)
        assert_equal(model, optimizer, plain, reference)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["write", "replace", "all", "elements"])
def test_what_a_script_writes_into_a_state_counts(way: str, how: str) -> None:
    plain, model = build(), build()
    reference, optimizer = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(model.parameters())

    def edit(its: Optimizer, parameters: list[nn.Parameter]) -> None:
        if how == "write":
            its.state[parameters[1]]["step"].fill_(7)
        elif how == "replace":
            its.state[parameters[2]]["step"] = torch.tensor(9.0)
        elif how == "all":
            for parameter in parameters:
                its.state[parameter]["step"].zero_()
        else:
            its.state[parameters[0]]["exp_avg"] = torch.ones_like(parameters[0])

    with join(way) as session:
        prepare(session, way, model, optimizer)
        for its, module in ((reference, plain), (optimizer, model)):
            steps(module, its, 0, 2)
            edit(its, list(module.parameters()))
            steps(module, its, 2, 4)
        assert_equal(model, optimizer, plain, reference)
        for its, module in ((reference, plain), (optimizer, model)):
            edit(its, list(module.parameters()))  # and nothing after it
    assert_equal(model, optimizer, plain, reference)


def test_a_state_that_is_kept_goes_on_with_the_training() -> None:
    """As in torch, whose state_dict is of the optimizer's own tensors."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    with join("ring") as session:
        session.prepare(model, optimizer)
        steps(model, optimizer, 0, 1)
        held = optimizer.state_dict()["state"]
        steps(model, optimizer, 1, 5)
        assert {float(state["step"]) for state in held.values()} == {5.0}
        steps_seen = {float(state["step"]) for state in optimizer.state.values()}
        assert steps_seen == {5.0}


@pytest.mark.parametrize("chunk", ["1KiB", "64KiB"])
def test_parameters_without_gradients_part_from_their_segment(chunk: str) -> None:
    model, plain = build(), build()
    optimizer, reference = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
    with atoll.join(Config(chunks=Chunks(size=chunk)), place=ring_of_one()) as session:
        session.prepare(model, optimizer)
        for step in range(6):
            for module, its in ((model, optimizer), (plain, reference)):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.double)
                (module(x) - 1).square().mean().backward()
                if step % 2:
                    module[2].weight.grad = None
                its.step()
                its.zero_grad()
            assert_equal(model, optimizer, plain, reference)
            assert_own(optimizer.state)
