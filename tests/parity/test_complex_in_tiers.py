"""Complex parameters under budgets of memory: each step against plain PyTorch, at every strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.core.memory import Memory
from atoll.memory.fit import fit
from atoll.memory.fitted import Fitted
from atoll.memory.initialising import init
from atoll.memory.parameters import ChunkParameter
from atoll.tensors.checkpoint import read_checkpoint
from support.optimizers import ModulusSGD
from support.pool import WorkerPool
from support.runs import KINDS, alone, run_at, run_with
from support.tight import memory

pytestmark = [pytest.mark.usefixtures("poisoned"), pytest.mark.sampled]

STEPS, MICRO, SAMPLES, WORLD = 4, 2, 4, 2
TOLERANCE = {torch.complex64: 3e-5, torch.complex128: 1e-11}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["complex64", "complex128"])


def bounded(x: Tensor) -> Tensor:
    return x / (1 + x.abs())


class Waves(nn.Module):
    """Complex layers, of which some lie in an order of their own, and real ones beside them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        real = dtype.to_real()
        for index in range(4):
            weight = torch.randn(24, 24, dtype=dtype) / 5
            self.register_parameter(f"weight{index}", nn.Parameter(weight.t() if index % 2 else weight))
        self.bias = nn.Parameter(torch.randn(24, dtype=dtype) / 5)
        self.turn = nn.Parameter(torch.randn((), dtype=dtype))
        self.none = nn.Parameter(torch.empty(0, 3, dtype=dtype), requires_grad=False)
        self.mixed = nn.Parameter(torch.randn(12, 5, 24, dtype=dtype).permute(2, 0, 1) / 5)
        self.fixed = nn.Parameter(torch.randn(24, dtype=dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(24, dtype=real))
        self.out = nn.Linear(24, 3, dtype=real)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight0
        x = bounded(x @ self.weight1.conj() + self.bias + self.none.sum())  # a saved conjugate
        x = x * self.turn.conj().imag + x * self.turn.real  # a saved negative
        x = bounded(x @ self.weight2.mH * self.scale)
        x = x @ torch.view_as_complex(torch.view_as_real(self.weight3) * 2) * self.fixed
        x = x + torch.einsum("bi,ijk->bi", x, self.mixed)
        return self.out(x.abs())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, foreach=False)


def amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, amsgrad=True)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01)


def modulus(parameters: Any) -> torch.optim.Optimizer:
    return ModulusSGD(parameters, lr=0.01)


Make = Callable[[Any], torch.optim.Optimizer]
Norm = float | None


def build(dtype: torch.dtype, make: Make) -> tuple[Waves, torch.optim.Optimizer]:
    model = Waves(dtype)
    return model, make([p for p in model.parameters() if p.requires_grad])


def loss_of(model: nn.Module, step: int, micro: int, share: slice) -> Tensor:
    generator = torch.Generator().manual_seed(step * MICRO + micro)
    dtype = next(model.parameters()).dtype
    x = torch.randn(SAMPLES * WORLD, 24, dtype=dtype, generator=generator)
    found: Tensor = model(x[share]).square().mean() / MICRO
    return found


def seen_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def resolve(model: nn.Module) -> None:
    """Give gradients that autograd leaves as conjugates memory of their own: torch's clipping and Adam do not
    take them."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.resolve_conj()


def plainly(dtype: torch.dtype, make: Make, norm: Norm, gradients: bool = True) -> list[list[Tensor]]:
    model, optimizer = build(dtype, make)
    seen: list[list[Tensor]] = []
    for step in range(STEPS):
        for micro in range(MICRO):
            loss_of(model, step, micro, slice(None)).backward()
        resolve(model)
        seen.append([])
        if norm is not None:
            seen[-1] += [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm)]
        seen[-1] += gradients_of(model) if gradients else []
        optimizer.step()
        optimizer.zero_grad()
        seen[-1] += seen_of(model)
    return seen


def make_steps(
    session: atoll.Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    norm: Norm,
    steps: range,
    gradients: bool = True,
) -> list[list[Tensor]]:
    seen: list[list[Tensor]] = []
    share = slice(session.rank, None, session.world)
    for step in steps:
        for micro in range(MICRO):
            with session.no_sync() if micro < MICRO - 1 else nullcontext():
                loss_of(model, step, micro, share).backward()
        seen.append([])
        if norm is not None:
            seen[-1] += [session.clip_grad_norm_(0.05, norm)]
        seen[-1] += gradients_of(model) if gradients else []
        optimizer.step()
        optimizer.zero_grad()
        seen[-1] += seen_of(model)
    return seen


def train(
    session: atoll.Session, dtype: torch.dtype, make: Make, norm: Norm = None, gradients: bool = True
) -> list[list[Tensor]]:
    model, optimizer = build(dtype, make)
    session.prepare(model, optimizer)
    assert isinstance(model.weight0, ChunkParameter)
    assert model.weight0.dtype == dtype
    return make_steps(session, model, optimizer, norm, range(STEPS), gradients)


def check(found: list[list[Tensor]], right: list[list[Tensor]], tolerance: float) -> None:
    for step, (ours, theirs) in enumerate(zip(found, right, strict=True)):
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            off = float((a - b).abs().max()) if a.numel() else 0.0
            size = float(b.abs().max()) if b.numel() else 0.0  # a norm of type 0.5 is large
            assert off <= tolerance * max(1.0, size), f"step {step}, tensor {number}: {off:.3g}"


@DTYPES
@pytest.mark.parametrize("norm", [None, 2.0, 1.0, math.inf])
@pytest.mark.parametrize("make", [sgd, adam, adamw])
def test_alone(dtype: torch.dtype, make: Make, norm: Norm) -> None:
    check(alone(train, dtype, make, norm, tiers=True), plainly(dtype, make, norm), TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("make", [sgd, adam, adamw])
@pytest.mark.parametrize("kind", ["tiers", "server tiers", "peers tiers"])
def test_at_a_strategy(pool: WorkerPool, kind: str, make: Make, dtype: torch.dtype) -> None:
    is_mean = kind != "peers tiers"  # there p.grad is the node's own, and the mean is clipped at the step
    norm = 2.0 if is_mean else None
    right = plainly(dtype, make, norm, is_mean)
    for found in run_at(pool, kind, train, dtype, make, norm, is_mean, world=WORLD):
        check(found, right, TOLERANCE[dtype])


@pytest.mark.parametrize("strategy", ["hierarchical", "ps-hra"])
def test_in_a_group(pool: WorkerPool, strategy: str) -> None:
    config = msgspec.structs.replace(KINDS[strategy], memory=KINDS["tiers"].memory)
    right = plainly(torch.complex128, adam, 2.0)
    shards = 1 if strategy == "ps-hra" else None
    found = run_with(pool, config, train, torch.complex128, adam, 2.0, world=WORLD, shards=shards)
    for each in found:
        check(each, right, TOLERANCE[torch.complex128])


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf, -math.inf, 0.5])
@pytest.mark.parametrize("sharding", ["symmetric", "asymmetric"])
def test_members_measure_complex_numbers(pool: WorkerPool, sharding: str, norm: float) -> None:
    """A norm of another order than 2 is not that of the real and the imaginary parts."""
    budget = msgspec.structs.replace(KINDS["tiers"].memory, sharding=sharding)
    config = msgspec.structs.replace(KINDS["tiers"], memory=budget)
    right = plainly(torch.complex128, sgd, norm)
    for found in run_with(pool, config, train, torch.complex128, sgd, norm, world=WORLD):
        check(found, right, TOLERANCE[torch.complex128])


# Optimizers that do not step a complex parameter as its real and imaginary parts: whole tensors are stepped.


@pytest.mark.parametrize("make", [amsgrad, adagrad, modulus])
def test_an_optimizer_of_complex_numbers_alone(make: Make) -> None:
    found = alone(train, torch.complex128, make, tiers=True)
    check(found, plainly(torch.complex128, make, None), TOLERANCE[torch.complex128])


@pytest.mark.parametrize("make", [amsgrad, adagrad, modulus])
def test_an_optimizer_of_complex_numbers_of_members(pool: WorkerPool, make: Make) -> None:
    budget = msgspec.structs.replace(KINDS["tiers"].memory, sharding="asymmetric")
    config = msgspec.structs.replace(KINDS["tiers"], memory=budget)
    right = plainly(torch.complex128, make, None)
    for found in run_with(pool, config, train, torch.complex128, make, world=WORLD):
        check(found, right, TOLERANCE[torch.complex128])


# On disk, and where a model does not fit while it is built


def tight(model: nn.Module, folder: Path) -> Memory:
    host = 10240 * next(model.parameters()).itemsize
    return memory(model, 0.4, host=str(host), disk=f"{folder}:64MiB")


def make_here(fitted: Fitted, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    seen: list[list[Tensor]] = []
    for step in range(STEPS):
        for micro in range(MICRO):
            loss_of(model, step, micro, slice(None)).backward()
        seen.append([fitted.clip_grad_norm_(0.05)])
        seen[-1] += gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
        seen[-1] += seen_of(model)
    return seen


@DTYPES
@pytest.mark.parametrize("make", [sgd, adam, adamw, adagrad])
def test_on_disk(dtype: torch.dtype, make: Make, tmp_path: Path) -> None:
    given = tight(Waves(dtype), tmp_path)
    with init(given):
        model, optimizer = build(dtype, make)
    with fit(model, optimizer, memory=given) as fitted:
        seen = make_here(fitted, model, optimizer)
        figures = fitted.stats()
    assert figures.moves["from_disk"] > 0
    right = plainly(dtype, make, 2.0)
    check(seen, right, TOLERANCE[dtype])
    assert all(type(p) is nn.Parameter for p in model.parameters())
    values = seen_of(model)
    for found, value, like in zip(values, seen[-1][-len(values) :], Waves(dtype).parameters(), strict=True):
        assert torch.equal(found, value)
        assert found.stride() == like.stride()


# What a script does with its parameters and gradients


def edit(session: atoll.Session | None) -> list[list[Tensor]]:
    model, optimizer = build(torch.complex128, sgd)
    share = slice(None)
    if session is not None:
        session.prepare(model, optimizer)
        share = slice(session.rank, None, session.world)
    w, seen = model.weight1, []
    for step in range(STEPS):
        loss_of(model, step, 0, share).backward()
        if session is None:
            resolve(model)
        gradient = w.grad
        assert gradient is not None
        seen.append([gradient.conj().clone(), gradient.mH.clone(), gradient.imag.clone()])
        seen[-1] += [gradient.conj().imag.clone(), torch.view_as_real(gradient).clone()]
        kept = [gradient.conj(), gradient.conj().imag, gradient.mH[3], gradient.conj() @ gradient.mH]
        with torch.no_grad():
            gradient.real.mul_(0.5)
            gradient.conj().imag.add_(0.25)
            w.imag.mul_(0.9)
            w.conj()[2].add_(0.125 + 0.25j)
            torch.view_as_real(model.weight2)[..., 1].mul_(0.75)
        seen[-1] += [each.clone() for each in kept]
        model.weight0.grad = model.weight0.grad.conj()  # type: ignore[union-attr]
        model.bias.data = model.bias.data.conj() * 1
        model.turn.data = model.turn.data.conj()
        seen[-1] += gradients_of(model)
        del gradient, kept
        optimizer.step()
        optimizer.zero_grad()
        seen[-1] += seen_of(model)
    return seen


def test_edits_alone() -> None:
    check(alone(edit, tiers=True), edit(None), TOLERANCE[torch.complex128])


@pytest.mark.parametrize("kind", ["tiers", "server tiers"])
def test_edits_by_all_workers(pool: WorkerPool, kind: str) -> None:
    right = edit(None)
    for found in run_at(pool, kind, edit, world=WORLD):
        check(found, right, TOLERANCE[torch.complex128])


# Checkpoints


def save_and_go_on(
    session: atoll.Session, folder: str, make: Make, goes_on: bool
) -> tuple[list[list[Tensor]], dict[int, dict[str, Any]]]:
    model, optimizer = build(torch.complex128, make)
    session.prepare(model, optimizer)
    if not goes_on:
        make_steps(session, model, optimizer, None, range(2))
        session.save(folder)
    else:
        session.load(folder)
    seen = make_steps(session, model, optimizer, None, range(2, STEPS), False)
    state = optimizer.state_dict()["state"]
    return seen, {i: {k: torch.as_tensor(v).clone() for k, v in s.items()} for i, s in state.items()}


def plain_state(make: Make, steps: int) -> tuple[nn.Module, dict[int, dict[str, Any]]]:
    model, optimizer = build(torch.complex128, make)
    for step in range(steps):
        for micro in range(MICRO):
            loss_of(model, step, micro, slice(None)).backward()
        resolve(model)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer.state_dict()["state"]


def check_states(found: dict[int, dict[str, Any]], right: dict[int, dict[str, Any]]) -> None:
    assert found.keys() == right.keys()
    for index, state in right.items():
        assert found[index].keys() == state.keys()
        for key, value in state.items():
            if value is not None:
                there, here = torch.as_tensor(found[index][key]), torch.as_tensor(value)
                assert (there.dtype, there.shape) == (here.dtype, here.shape), (index, key)
                if here.numel():
                    assert float((there - here).abs().max()) <= 1e-11, (index, key)


@pytest.mark.parametrize("make", [adam, amsgrad])
@pytest.mark.parametrize("way", [("tiers", "tiers"), ("tiers", "ring"), ("ring", "tiers")])
def test_a_checkpoint_goes_on_anywhere(
    pool: WorkerPool, way: tuple[str, str], make: Make, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    check_going_on(pool, way, make, folder)
    # In plain torch
    saved = read_checkpoint(folder)
    right, states = plain_state(make, 2)
    for name, value in right.state_dict().items():
        assert saved.model[name].dtype == value.dtype
        if value.numel():
            assert float((saved.model[name] - value).abs().max()) <= 1e-11
    check_states(saved.trees["optimizer"][0]["state"], states)


@pytest.mark.parametrize(
    "way", [("server tiers", "server tiers"), ("server tiers", "ring"), ("peers tiers", "peers tiers")]
)
def test_a_checkpoint_of_steps_made_elsewhere(pool: WorkerPool, way: tuple[str, str], tmp_path: Path) -> None:
    check_going_on(pool, way, adam, str(tmp_path / "saved"))


def check_going_on(pool: WorkerPool, way: tuple[str, str], make: Make, folder: str) -> None:
    right, (_, states) = plainly(torch.complex128, make, None, False), plain_state(make, STEPS)
    for kind, goes_on in zip(way, (False, True), strict=True):
        config = KINDS[kind]
        if config.memory.is_given and make is amsgrad:
            config = msgspec.structs.replace(
                config, memory=msgspec.structs.replace(config.memory, sharding="asymmetric")
            )
        shards = 1 if kind.startswith("server") else None
        script = partial(save_and_go_on, folder=folder, make=make, goes_on=goes_on)
        for seen, state in run_with(pool, config, script, world=WORLD, shards=shards):
            check(seen, right[2:], TOLERANCE[torch.complex128])
            check_states(state, states)


def test_the_state_of_a_loaded_optimizer_is_plain_torch_s(tmp_path: Path) -> None:
    """A state_dict of plain torch goes into tiers and back."""
    right, states = plainly(torch.complex128, adam, None), plain_state(adam, 2)

    def go_on(session: atoll.Session) -> Any:
        model, optimizer = build(torch.complex128, adam)
        session.prepare(model, optimizer)
        model.load_state_dict(states[0].state_dict())
        optimizer.load_state_dict(
            {"state": states[1], "param_groups": optimizer.state_dict()["param_groups"]}
        )
        seen = make_steps(session, model, optimizer, None, range(2, STEPS))
        torch.save(optimizer.state_dict(), tmp_path / "state")
        torch.save(model.state_dict(), tmp_path / "model")
        return seen

    check(alone(go_on, tiers=True), right[2:], TOLERANCE[torch.complex128])
    check_states(torch.load(tmp_path / "state")["state"], plain_state(adam, STEPS)[1])
    model = Waves(torch.complex128)
    model.load_state_dict(torch.load(tmp_path / "model"))
    check([seen_of(model)], [right[-1][-len(list(model.parameters())) :]], 1e-11)
