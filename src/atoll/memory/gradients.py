"""Gradients of chunks that do not stay on the device.

As autograd finishes a parameter's gradient, a hook moves it into its chunk's payload "gradient" and takes it
away from the device. What the script reads as `p.grad` is a `ServedGradient`: it has the gradient's shape,
dtype and device, and no memory; whatever is done with it is done with the payload, for as long as the call
lasts. So `torch.nn.utils.clip_grad_norm_` works, and never holds all gradients. Source: S2, "What users of
rival systems suffer from": gradient accumulation that drops gradients; no clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.chunks import Chunk
from atoll.core.errors import UserError
from atoll.memory.payloads import GRADIENT, Payloads, pinned


class TrainedChunk:
    """A chunk that receives gradients: `names[i]` and `parameters[i]` belong to `chunk.slots[i]`.

    To be made while the parameters have memory: their shapes and strides are noted.
    """

    def __init__(self, chunk: Chunk, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self.chunk, self.names, self.parameters = chunk, list(names), list(parameters)
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.shapes = [(tuple(p.shape), tuple(p.stride())) for p in parameters]

    def part(self, flat: Tensor, slot: int) -> Tensor:
        """The part of `flat`, (extent,), that is slot `slot`'s, with its parameter's shape and strides."""
        shape, strides = self.shapes[slot]
        return flat.as_strided(shape, strides, flat.storage_offset() + self.chunk.slots[slot].offset)

    def run(self, flat: Tensor, slot: int) -> Tensor:
        """The same, 1-D, in the order of memory."""
        place = self.chunk.slots[slot]
        return flat[place.offset : place.offset + place.numel]


@dataclass
class _Kept:
    """A gradient of which somebody has a view: `tensor` is what it is a view of."""

    tensor: Tensor
    pins: ExitStack  # ends when the view's time is over


class _ChunkGradients:
    """What is known of one chunk's gradients; their values are in the payload."""

    def __init__(self, trained: TrainedChunk, payloads: Payloads) -> None:
        self.trained, self.payloads = trained, payloads
        self.present = [False] * len(trained.parameters)
        # What the values in the payload are still to be multiplied by, and in which slots.
        self.factors: list[tuple[Tensor, list[bool]]] = []
        self.norms: dict[int, Tensor] = {}  # by slot, of the gradients as they now are
        self.wait: Callable[[int], None] = lambda _: None  # until its step under way is made
        self.kept: dict[int, _Kept] = {}  # by slot
        self.stepping = False

    @contextmanager
    def borrow(self, *, writes: bool) -> Iterator[Tensor]:
        """The gradients, (extent,), as they are to be read; the padding between slots is zero."""
        chunk, dtype = self.trained.chunk, self.trained.dtype
        made = not self.payloads.has(chunk.id, GRADIENT)
        factors, self.factors = self.factors, []
        with pinned(
            self.payloads, chunk.id, GRADIENT, dtype, chunk.extent, writes=writes or made or bool(factors)
        ) as flat:
            if made:
                self._clear_padding(flat)
            for factor, present in factors:
                for slot, here in enumerate(present):
                    if here:
                        self.trained.run(flat, slot).mul_(factor)
            yield flat

    def _clear_padding(self, flat: Tensor) -> None:
        end = 0
        for slot in self.trained.chunk.slots:
            flat[end : slot.offset].zero_()
            end = slot.offset + slot.numel

    def release(self) -> None:
        """Forget the payload if nothing in it counts any more."""
        if not any(self.present) and not self.stepping and not self.kept:
            self.factors, self.norms = [], {}
            self.payloads.drop(self.trained.chunk.id, GRADIENT)


class Gradients:
    """The gradients of all chunks that are trained.

    `payloads(chunk)` says where a chunk's lie. `arrived(chunk, slot)` is told of each gradient that backward
    has finished, on autograd's thread, after it has moved. Tensors given and taken have the parameter's
    shape, dtype and device.
    """

    def __init__(
        self,
        chunks: Sequence[TrainedChunk],
        payloads: Callable[[int], Payloads],
        arrived: Callable[[int, int], None] = lambda chunk, slot: None,
    ) -> None:
        self._chunks = {each.chunk.id: _ChunkGradients(each, payloads(each.chunk.id)) for each in chunks}
        self._arrived = arrived
        self._places = {
            id(parameter): (each.chunk.id, slot)
            for each in chunks
            for slot, parameter in enumerate(each.parameters)
        }
        self._measures: float | None = None  # the kind of norm that is taken as gradients come
        self.norm_before: float | None = None  # the latest global norm, before clipping
        self._handles = []
        for each in chunks:
            for slot, parameter in enumerate(each.parameters):
                hook = self._hook(each.chunk.id, slot)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                if _own_gradient(parameter) is not None:
                    self._take(each.chunk.id, slot)

    def close(self) -> None:
        """Leave the gradients to the parameters as plain tensors."""

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """What `parameter.grad` is: None, or a `ServedGradient`. Reading it waits for nothing."""

    def write(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """`parameter.grad = gradient`; its values are copied."""

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """torch.nn.utils.clip_grad_norm_ of all gradients, to the bit; returns the norm before.

        Gradients are read a chunk at a time, and are multiplied as they are next read: by the step.
        """

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The global norm, a scalar on the CPU: per-parameter norms, combined in registration order."""
