"""A shard that steps whole tensors, against the optimizer in plain torch: equal to the bit, whatever shapes,
strides and states there are, and through every way in which a state is kept or taken back.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from atoll.chunks import ChunkMap, lay_out
from atoll.core.errors import UserError
from atoll.core.optimizerkind import OptimizerKind
from atoll.tensors.binding import specs_of
from atoll.tensors.packing import pack, unpack
from atoll.tensors.shardoptimizer import Scratch, ShardOptimizer, full_name
from atoll.tensors.wholechunk import WholeChunk
from atoll.wire.messages import plain_hyperparameters
from support.optimizers import Halves, HalvesSGD, ManyStates

SHAPES = [(20, 32), (48, 20), (4, 48), (3, 5, 3, 3), (7,), ()]
CLASSES = [torch.optim.Adafactor, torch.optim.Muon, ManyStates, HalvesSGD]


class Twins:
    """Parameters and their plain optimizer, and a shard with all of their chunks."""

    def __init__(self, class_: type[torch.optim.Optimizer]) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = [shape for shape in SHAPES if len(shape) == 2 or class_ is not torch.optim.Muon]
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        for parameter in self.parameters:
            if parameter.ndim == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
        self.plain: Any = class_
        self.plain = self.plain(self.parameters, lr=0.05)
        named = {str(index): parameter for index, parameter in enumerate(self.parameters)}
        specs = specs_of(named, dict.fromkeys(self.parameters, "0"))
        self.layout = lay_out(specs, chunk_bytes=4096)
        self.class_ = class_
        self.shard = self.another()
        for chunk in self.chunks:
            self.shard.set_values(chunk, self.flat(chunk, list(self.parameters)))

    @property
    def chunks(self) -> tuple[int, ...]:
        return self.shard.chunks

    def another(self, layout: ChunkMap | None = None) -> ShardOptimizer:
        """Return a shard without values."""
        path = f"{self.class_.__module__}:{self.class_.__qualname__}"
        settings = plain_hyperparameters(self.plain.param_groups)[0]
        layout = layout or self.layout
        ids = [chunk.id for chunk in layout.chunks]
        kinds = [OptimizerKind(full_name(self.class_), 1, by_tensor=True)]
        return ShardOptimizer(layout, ids, kinds, [settings], configured=path)

    def flat(self, chunk: int, tensors: list[Any]) -> Tensor:
        """Return one tensor of each parameter, (extent,), as they lie in the chunk."""
        laid = self.layout.chunks[chunk]
        flat = torch.zeros(laid.extent)
        for slot in laid.slots:
            like = self.parameters[slot.parameter]
            values = tensors[slot.parameter].detach()
            flat[slot.offset : slot.offset + slot.numel].as_strided(like.shape, like.stride()).copy_(values)
        return flat

    @torch.no_grad()
    def gradients(self, number: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(100 + number)
        return [torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator)) for p in self.parameters]

    def step(self, number: int) -> None:
        """Step both; every third step leaves a parameter out."""
        gradients, without = self.gradients(number), {0} if number % 3 == 2 else set()
        for index, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            parameter.grad = None if index in without else gradient
        # Before the plain step, which may count steps in its groups:
        self.shard.param_groups.set(plain_hyperparameters(self.plain.param_groups))
        self.plain.step()
        for chunk in self.chunks:
            slots = self.layout.chunks[chunk].slots
            present = [slot.parameter not in without for slot in slots]
            self.shard.step(chunk, self.flat(chunk, gradients), present)

    def check(self) -> None:
        for chunk in self.chunks:
            assert torch.equal(self.shard.values(chunk), self.flat(chunk, list(self.parameters)))


@pytest.mark.parametrize("class_", CLASSES)
def test_steps_are_plain_torchs_to_the_bit(class_: type[torch.optim.Optimizer]) -> None:
    twins = Twins(class_)
    for number in range(5):
        twins.step(number)
        twins.check()


@pytest.mark.parametrize("class_", CLASSES)
def test_a_shard_goes_on_from_another_ones_state(class_: type[torch.optim.Optimizer]) -> None:
    """As from a snapshot, a standby's copy, a checkpoint: before the first step, and in the midst."""
    twins = Twins(class_)
    for number in range(5):
        again = twins.another()
        for chunk in twins.chunks:
            whole = WholeChunk.of(twins.shard, chunk)
            whole.put_into(again, chunk, twins.shard.values(chunk).clone())
        twins.shard = again
        twins.step(number)
        twins.check()


@pytest.mark.parametrize("class_", CLASSES)
def test_contributions_join_an_open_step(class_: type[torch.optim.Optimizer]) -> None:
    """The second contribution undoes the first one's step; also where the shard was copied in between."""
    twins = Twins(class_)
    for number in range(4):
        first, second = twins.gradients(2 * number), twins.gradients(2 * number + 1)
        for parameter, one, other in zip(twins.parameters, first, second, strict=True):
            parameter.grad = torch.lerp(one, other, 0.5)
        settings = plain_hyperparameters(twins.plain.param_groups)
        twins.plain.step()
        twins.shard.param_groups.set(settings)
        for chunk in twins.chunks:
            present = [True] * len(twins.layout.chunks[chunk].slots)
            flat = twins.flat(chunk, first)
            twins.shard.contribute(chunk, flat, present, 1.0, opens=True, closes=False)
        if number % 2:
            again = twins.another()
            for chunk in twins.chunks:
                values = twins.shard.values(chunk).clone()
                WholeChunk.of(twins.shard, chunk).put_into(again, chunk, values)
            twins.shard = again
        twins.shard.param_groups.set(settings)
        for chunk in twins.chunks:
            present = [True] * len(twins.layout.chunks[chunk].slots)
            flat = twins.flat(chunk, second)
            twins.shard.contribute(chunk, flat, present, 0.5, opens=False, closes=True)
        twins.check()


@pytest.mark.parametrize("class_", CLASSES)
def test_steps_are_undone_and_copied(class_: type[torch.optim.Optimizer]) -> None:
    twins, scratch = Twins(class_), Scratch()
    for number in range(3):
        for chunk in twins.chunks:
            present = [True] * len(twins.layout.chunks[chunk].slots)
            with twins.shard.undone(chunk, scratch):
                twins.shard.step(chunk, twins.flat(chunk, twins.gradients(50 + number)), present)
        other = twins.another()
        for chunk in twins.chunks:
            other.copy(chunk, twins.shard)
        twins.shard = other
        twins.step(number)
        twins.check()


def test_every_state_comes_back_as_it_was() -> None:
    state = {
        "step": torch.tensor(3.0), "rows": torch.randn(5, 1), "codes": torch.arange(7, dtype=torch.int8),
        "half": torch.randn(3).bfloat16(), "empty": torch.zeros(0, 3), "flags": torch.tensor([True, False]),
        "sides": [torch.randn(2), [torch.randn(3), None]], "pair": (1, 2.5), "none": None, "on": True,
        "name": "warm", "most": float("inf"), "by": {"left": torch.ones(2), 3: "x"},
    }  # fmt: skip
    flat, words = pack([state, {}])
    again, nothing = unpack(flat, words)
    assert nothing == {}
    assert str(again) == str(state)
    assert again["half"].dtype == torch.bfloat16
    assert again["empty"].shape == (0, 3)


PART = {"tensor": "float32", "shape": [1], "at": 0}
TWO = {"high": PART, "rest": {**PART, "at": 4}}
WRAPPED = {"shape": [1], "stride": [1], "parts": TWO, "context": {"list": [{"dtype": "float32"}, True]}}
HALVES = "support.optimizers:Halves"


def test_words_of_a_tensor_that_is_made_of_others() -> None:
    (state,) = unpack(torch.ones(8, dtype=torch.uint8), [{"key": {"wrapped": HALVES, **WRAPPED}}])
    assert type(state["key"]) is Halves
    assert state["key"].shape == (1,)


@pytest.mark.parametrize(
    "said",
    [
        {"wrapped": HALVES, **WRAPPED, "shape": [3]},
        {"wrapped": HALVES, **WRAPPED, "shape": ["a"]},
        {"wrapped": HALVES, **WRAPPED, "shape": 1},
        {"wrapped": HALVES, **WRAPPED, "stride": None},
        {"wrapped": HALVES, **WRAPPED, "context": None},
        {"wrapped": HALVES, **WRAPPED, "parts": {"high": PART}},
        {"wrapped": HALVES, **WRAPPED, "parts": {**TWO, "rest": 1}},
        {"wrapped": HALVES, **WRAPPED, "parts": {**TWO, "rest": {**PART, "shape": [99]}}},
        {"wrapped": "support.optimizers:HalvesSGD", **WRAPPED},
        {"wrapped": "torch:Tensor", **WRAPPED},
        {"wrapped": "torch.nested._internal.nested_tensor:NestedTensor", **WRAPPED},
        {"wrapped": "os:system", **WRAPPED},
        {"wrapped": "no.such.module:Halves", **WRAPPED},
        {"wrapped": "", **WRAPPED},
        {"wrapped": "test_whole_tensor_shards:Halves", **WRAPPED},
        {"dtype": "save"},
        {"dtype": "_inductor"},
        {"dtype": "quint8"},
        {"list": [PART] * 3},
        {"tensor": "float32", "shape": [2], "at": 4},
        {"tensor": "float32", "shape": [2], "at": -4},
        {"tensor": "float32", "shape": [-1], "at": 0},
        {"tensor": "save", "shape": [1], "at": 0},
        {"tensor": "quint8", "shape": [1], "at": 0},
        {"dict": [1]},
        {"dict": [[1, 2, 3]]},
        {"dict": [[[1], 2]]},
        {"tensor": "float32", "shape": ["1"], "at": 0},
        {"tensor": "float32"},
        {"float": "1.0"},
        {"x": 1},
        [1],
    ],
    ids=str,
)
def test_words_that_fit_no_bytes_are_refused(said: Any) -> None:
    with pytest.raises(UserError, match="state of an optimizer|a state of .* bytes"):
        unpack(torch.zeros(8, dtype=torch.uint8), [{"key": said}])


def test_words_in_very_many_lists_are_refused() -> None:
    deep: Any = functools.reduce(lambda inner, _: {"list": [inner]}, range(5000), None)
    with pytest.raises(UserError, match="no state of an optimizer"):
        unpack(torch.zeros(8, dtype=torch.uint8), [{"key": deep}])


def test_a_state_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(UserError, match=r"keeps a Generator in its state 'noise', which cannot be sent"):
        pack([{"noise": torch.Generator()}])


def test_a_layout_whose_shapes_do_not_fit_is_refused() -> None:
    twins = Twins(torch.optim.Adafactor)
    for strides in ((1, 1), (64, 2), (1,)):
        first = replace(twins.layout.specs[0], strides=strides)
        layout = replace(twins.layout, specs=(first, *twins.layout.specs[1:]))
        with pytest.raises(UserError, match="parameter 0 does not fit its slot of 640"):
            twins.another(layout)
