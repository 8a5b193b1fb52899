"""A small model for the tests of a node's CPU side: plain torch's parameters and optimizer, their layout, and
contributions of several nodes to an iteration, the same each time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from atoll.chunks import ChunkMap, lay_out
from atoll.exchange.globalparameters import Contribution, GlobalParameters
from atoll.tensors.binding import BoundChunk, specs_of
from atoll.tensors.shardoptimizer import full_name
from atoll.wire.device import Clip
from atoll.wire.messages import Hyperparameters, plain_hyperparameters

SHAPES = [(33, 5), (33,), (), (65, 7), (0,), (7,), (128, 16), (19,)]
FROZEN, UNTRAINED = 5, 7  # indices: one that has no gradient, and one whose gradient no optimizer takes
WEIGHTS = (3.0, 5.0, 8.0)


class PeerModel:
    """Parameters of SHAPES in as many param groups as `settings`; FROZEN and UNTRAINED are in none."""

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        settings: list[dict[str, Any]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = {
            f"p{index}": nn.Parameter(torch.randn(shape, generator=generator).to(dtype), index != FROZEN)
            for index, shape in enumerate(SHAPES)
        }
        self.every = list(self.parameters.values())
        self.trained = [p for i, p in enumerate(self.every) if i not in (FROZEN, UNTRAINED)]
        groups = [
            {"params": self.trained[index :: len(settings)], **group} for index, group in enumerate(settings)
        ]
        self.plain = kind(groups, **settings[0])
        group_of = {p: str(i) for i, group in enumerate(self.plain.param_groups) for p in group["params"]}
        self.layout: ChunkMap = lay_out(specs_of(self.parameters, group_of), chunk_bytes=1024)

    def hyperparameters(self) -> Hyperparameters:
        """The plain optimizer's, as they come over the wire."""
        decoded: Hyperparameters = msgspec.msgpack.decode(
            msgspec.msgpack.encode(plain_hyperparameters(self.plain.param_groups))
        )
        return decoded

    def globals(self, *, fused: bool = True, threads: int = 1) -> GlobalParameters:
        """Global parameters with the plain ones' values, at iteration 0."""
        made = GlobalParameters(
            self.layout, full_name(type(self.plain)), self.hyperparameters(), fused=fused, threads=threads
        )
        for chunk in self.layout.chunks:
            made.set_values(chunk.id, self.flat(chunk.id, [p.detach() for p in self.every]))
        return made

    def flat(self, chunk: int, tensors: Sequence[Tensor]) -> Tensor:
        """A chunk's values, of one tensor for each parameter."""
        laid = self.layout.chunks[chunk]
        flat = torch.zeros(laid.extent, dtype=getattr(torch, laid.dtype))
        for slot in laid.slots:
            flat[slot.offset : slot.offset + slot.numel] = tensors[slot.parameter].reshape(-1)
        return flat

    def bound(self) -> list[BoundChunk]:
        """The parameters as chunks, as a worker has them; they keep their values."""
        made = []
        for chunk in self.layout.chunks:
            names = [str(slot.parameter) for slot in chunk.slots]
            made.append(BoundChunk(chunk, names, [self.every[slot.parameter] for slot in chunk.slots]))
            made[-1].bind(torch.zeros(chunk.numel, dtype=getattr(torch, chunk.dtype)))
        return made

    def gradients(self, iteration: int, node: int, missing: Sequence[int] = ()) -> list[Tensor | None]:
        """A node's gradient of each parameter; None for the frozen one and for `missing`."""
        generator = torch.Generator().manual_seed(1000 * iteration + node)
        drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
        return [
            None if index in missing or index == FROZEN else gradient.to(self.every[0].dtype)
            for index, gradient in enumerate(drawn)
        ]

    def contribution(
        self,
        iteration: int,
        node: int,
        *,
        missing: Sequence[int] = (),
        weight: float | None = None,
        clip: Clip | None = None,
    ) -> Contribution:
        """That node's contribution with the plain optimizer's hyperparameters of now."""
        gradients = self.gradients(iteration, node, missing)
        filled = [torch.zeros(s) if g is None else g for g, s in zip(gradients, SHAPES, strict=True)]
        chunks = self.layout.trainable
        weight = WEIGHTS[node] if weight is None else weight
        return Contribution(
            node=node,
            incarnation=0,
            samples=WEIGHTS[node],
            weight=weight,
            gradients={chunk.id: self.flat(chunk.id, filled) for chunk in chunks},
            present={
                chunk.id: bytes(gradients[slot.parameter] is not None for slot in chunk.slots)
                for chunk in chunks
            },
            hyperparameters=self.hyperparameters(),
            clip=clip,
        )

    def step_plain(self, gradients: Sequence[Tensor | None], clip: Clip | None = None) -> Tensor | None:
        """Plain torch's step; returns the norm before clipping."""
        for parameter, gradient in zip(self.every, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        norm = None
        if clip is not None:
            large = clip.norm_type == math.inf  # torch knows no largest of none
            those = [p for p in self.every if p.numel() or not large]
            norm = nn.utils.clip_grad_norm_(those, clip.max_norm, clip.norm_type)
        self.plain.step()
        return norm

    def mean(self, parts: Sequence[tuple[float, Sequence[Tensor | None]]]) -> list[Tensor | None]:
        """Plain torch's mean by weight, one parameter at a time, in order; zeros where a node has none."""
        total = sum(weight for weight, _ in parts)
        means: list[Tensor | None] = []
        for index, shape in enumerate(SHAPES):
            own = [(w, gradients[index]) for w, gradients in parts]
            if all(gradient is None for _, gradient in own):
                means.append(None)
                continue
            filled = [(w, torch.zeros(shape).to(self.every[0].dtype) if g is None else g) for w, g in own]
            if len(filled) == 1:
                means.append(filled[0][1])
                continue
            mean = filled[0][1] * (filled[0][0] / total)
            for weight, gradient in filled[1:]:
                mean = mean.add(gradient, alpha=weight / total)
            means.append(mean)
        return means

    def assert_equal(self, parameters: GlobalParameters) -> None:
        """The global parameters are plain torch's, bit for bit."""
        for chunk in self.layout.chunks:
            assert torch.equal(
                parameters.values(chunk.id), self.flat(chunk.id, [p.detach() for p in self.every])
            ), chunk.id
