"""A chunk of a model whose values may lie on the device, in the host's memory or on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.chunks import Chunk


class MemoryChunk:
    """One chunk and the parameters that it holds; where its values lie is the engine's and the store's.

    `names[i]`, `parameters[i]`, `shapes[i]` and `strides[i]` belong to `chunk.slots[i]`. Ask for shapes and
    strides here: an absent parameter's own strides are all 0.
    """

    def __init__(self, chunk: Chunk, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self.chunk = chunk
        self.names = list(names)
        self.parameters = list(parameters)
        self.shapes = [tuple(parameter.shape) for parameter in parameters]
        self.strides = [tuple(parameter.stride()) for parameter in parameters]
        self.dtype: torch.dtype = parameters[0].dtype
        self.device: torch.device = parameters[0].device  # where the script uses it

    @property
    def id(self) -> int:
        return self.chunk.id

    @property
    def nbytes(self) -> int:
        """Bytes that a move carries: up to the end of the last slot."""
        return self.chunk.extent * self.dtype.itemsize

    def views(self, flat: Tensor) -> list[Tensor]:
        """A view for each slot into `flat`, 1-D of the chunk's dtype with at least `chunk.extent` elements."""
        base = flat.storage_offset()
        return [
            torch.as_strided(flat, shape, stride, base + slot.offset)
            for slot, shape, stride in zip(self.chunk.slots, self.shapes, self.strides, strict=True)
        ]


class Masters(Protocol):
    """Where the values are that count: those on the device are copies."""

    def values(self, chunk: int) -> Tensor:
        """The chunk's values in host memory, flat, in its dtype on the device; waits until its last step is
        made. Good until anybody asks for another chunk."""

    def write(self, chunk: int, flat: Tensor) -> None:
        """Take over what the script has written into the chunk's values on the device."""


class Gradients(Protocol):
    """Where the gradients of chunks lie between backward and the step."""

    def arrived(self, chunk: int, slot: int, gradient: Tensor) -> None:
        """Autograd has made a gradient: keep a copy, or add it to what is there."""

    def get(self, chunk: int, slot: int) -> Tensor | None:
        """What `p.grad` is: edits of it count."""

    def set(self, chunk: int, slot: int, gradient: Tensor | None) -> None:
        """`p.grad = gradient`."""
