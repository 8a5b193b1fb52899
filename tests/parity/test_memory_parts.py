"""Chunks that several members hold in parts: their steps, and the norms of their gradients, against plain
torch."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.chunks import Chunk, lay_out_memory
from atoll.memory.gradients import TrainedChunk
from atoll.memory.payloads import MASTER, VALUES, TensorPayloads
from atoll.memory.segments import Segments, run_step
from atoll.memory.sharedgradients import combined, partial_norm
from atoll.memory.states import ChunkStates, stepped_dtype
from atoll.moves.owners import Part, split_evenly
from atoll.tensors.binding import specs_of
from atoll.tensors.stepunit import unit_of
from support.optimizers import FUSED, SETTINGS

SHAPES = [(5, 7), (1,), (33, 31), (64,), (2, 515), (129,)]
ABSENT = {1: 2, 2: 4}  # by step, the parameter that has no gradient
KINDS = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float64, False)]
CASES = [
    pytest.param(
        *(name, settings | how, dtype, master),
        id="-".join([name, *settings, *how, str(dtype)[6:], *["master"] * master]),
        marks=pytest.mark.soak if dtype == torch.float64 or (master and name != "AdamW") else (),
    )
    for name, variants in SETTINGS.items()
    for settings in variants
    for how in ({"foreach": True}, *([{"fused": True}] if name in FUSED else []))
    for dtype, master in KINDS
    if not ("momentum" in settings and "fused" in how)  # torch's raises where a gradient comes late
]


def made(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients_of(step: int, dtype: torch.dtype) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(10 + step)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [None if index == ABSENT.get(step) else gradient for index, gradient in enumerate(drawn)]


class PartPayloads(TensorPayloads):
    """As `Sharing.own`: payloads are of the part, whatever the chunk's elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self._numel = numel

    def add(self, key: tuple[int, str], numel: int, dtype: torch.dtype) -> None:
        assert numel >= self._numel
        super().add(key, self._numel, dtype)


class Held:
    """A member's part of a chunk."""

    def __init__(self, trained: TrainedChunk, part: Part, optimizer: Any, master: bool) -> None:
        self.trained, self.part, self.payloads = trained, part, PartPayloads(part.numel)
        flat = torch.zeros(trained.extent, dtype=trained.dtype)
        for slot, parameter in enumerate(trained.parameters):
            trained.part(flat, slot).copy_(parameter.detach())
        self.payloads.add((0, VALUES), trained.chunk.numel, trained.dtype)
        with self.payloads.pin((0, VALUES), overwrites=True) as values:
            values.copy_(flat[part.begin : part.end])
        self.states = ChunkStates(
            trained,
            self.payloads,
            unit_of(optimizer),
            0,
            stepped_dtype(trained.dtype, master),
            (part.begin, part.end),
        )
        self.states.take_over()
        self.segments = Segments(self.states)

    def copy_values(self, into: Tensor) -> None:
        with self.payloads.pin((0, VALUES)) as values:
            into[self.part.begin : self.part.end].copy_(values)


@pytest.mark.parametrize(("name", "settings", "dtype", "master"), CASES)
def test_parts_step_as_the_whole_parameters_do(
    name: str, settings: dict[str, Any], dtype: torch.dtype, master: bool
) -> None:
    """To the bit, whatever the optimizer and its kernels; and the states are those of the whole."""
    kind = getattr(torch.optim, name)
    parameters = made(dtype)
    plain = [nn.Parameter(p.detach().to(stepped_dtype(dtype, master))) for p in parameters]
    reference = kind(plain, **settings)
    optimizer = kind(parameters, **settings)
    (chunk,) = lay_out_memory(specs_of({str(i): p for i, p in enumerate(parameters)}, {})).chunks
    trained = trained_of(chunk, parameters)
    (parts,) = split_evenly([chunk.extent], [range(3)]).parts
    holders = [Held(trained, part, optimizer, master) for part in parts]
    assert len(holders) == 3
    train(trained, holders, optimizer)
    for step in range(4):
        for parameter, gradient in zip(plain, gradients_of(step, dtype), strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        reference.step()
    flat = torch.zeros(chunk.extent, dtype=dtype)
    for held in holders:
        held.copy_values(flat)
    for slot, place in enumerate(chunk.slots):
        assert torch.equal(trained.part(flat, slot), plain[place.parameter].detach().to(dtype))
        state = reference.state[plain[place.parameter]]
        kept = next(held.states.kept(slot) for held in holders if held.states.portion.has(slot))
        for key in kept:
            whole = torch.zeros(chunk.extent, dtype=kept[key])
            for held in holders:
                if held.states.portion.has(slot):
                    held.states.copy_held(slot, key, whole)
            wanted = plain[place.parameter].detach() if key == MASTER else state[key]
            assert torch.equal(trained.part(whole, slot), wanted), key


def trained_of(chunk: Chunk, parameters: list[nn.Parameter]) -> TrainedChunk:
    members = [slot.parameter for slot in chunk.slots]
    return TrainedChunk(chunk, [str(i) for i in members], [parameters[i] for i in members])


def train(trained: TrainedChunk, holders: list[Held], optimizer: Any) -> None:
    """Four steps; half way a state goes through plain torch's form into each part."""
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    run = partial(run_step, type(optimizer), optimizer.__dict__)
    for step in range(4):
        gradients = gradients_of(step, trained.dtype)
        flat = torch.full((trained.extent,), float("nan"), dtype=trained.dtype)
        present = []
        for slot, place in enumerate(trained.chunk.slots):
            gradient = gradients[place.parameter]
            present.append(gradient is not None)
            if gradient is not None:
                trained.part(flat, slot).copy_(gradient)
        flat.nan_to_num_()  # padding
        for held in holders:
            held.segments.step(group, flat, tuple(present), run)
        if step == 1:
            reload(trained, holders)


def reload(trained: TrainedChunk, holders: list[Held]) -> None:
    for slot in range(len(trained.parameters)):
        those = [held.states for held in holders if held.states.portion.has(slot)]
        state: dict[str, Any] = those[0].numbers(slot)
        for key, dtype in those[0].kept(slot).items():
            whole = torch.zeros(trained.extent, dtype=dtype)
            for states in those:
                states.copy_held(slot, key, whole)
            state[key] = trained.part(whole, slot).clone()
        for held in holders:
            held.states.load(slot, state)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, 0.5, 0.0, math.inf, -math.inf])
def test_norms_of_parts_make_the_norm_of_the_whole(norm_type: float) -> None:
    whole = torch.randn(2_500_000, generator=torch.Generator().manual_seed(3))
    whole[::7] = 0.0
    parts = torch.split(whole, [1, 2_000_000, 499_999])
    told = [float(partial_norm(part, norm_type)) for part in parts]
    exact = torch.linalg.vector_norm(whole.double(), norm_type)
    assert combined(told, norm_type) == pytest.approx(float(exact), rel=1e-12)
    assert combined([float(exact)], norm_type) == float(exact)
    whole[1_000] = math.nan
    told = [float(partial_norm(part, norm_type)) for part in parts]
    wanted = float(torch.linalg.vector_norm(whole.double(), norm_type))
    assert math.isnan(combined(told, norm_type)) == math.isnan(wanted)
