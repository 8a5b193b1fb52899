"""Chunks as bytes: what came in a message as a tensor, a tensor as what goes into one, and their mean."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor

# Nobody writes to what came in a message; torch cannot know.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

Part: TypeAlias = tuple[float, Tensor, bytes]  # a contribution's weight, gradients, and presence by slot


def tensor_of(payload: memoryview, dtype: torch.dtype) -> Tensor:
    """The values in a payload of the right size, in place where its address allows it."""
    if payload.nbytes == 0:
        return torch.empty(0, dtype=dtype)
    raw = torch.frombuffer(payload, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)


def payload_of(flat: Tensor) -> memoryview:
    """The memory of a 1-D contiguous tensor on the CPU, as it is."""
    raw: memoryview = flat.view(torch.uint8).numpy().data
    return raw


class Lent:
    """Values that are sent from where they lie, by messages which are let go of one by one.

    ZeroMQ drops a payload once all of it is the system's; until then the memory must not change.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat
        self._held: weakref.ref[numpy.ndarray[Any, Any]] | None = None

    def payload(self) -> memoryview:
        """The memory, as a message's payload."""
        array = self._held() if self._held is not None else None
        if array is None:
            array = self._flat.view(torch.uint8).numpy()
            self._held = weakref.ref(array)
        return array.data

    @property
    def is_held(self) -> bool:
        """Whether some message is not sent yet."""
        return self._held is not None and self._held() is not None


def weighted_mean(parts: Sequence[Part]) -> tuple[Tensor, bytes]:
    """The mean of a chunk's gradients by weight, and in which slots anyone had one.

    In order, in the chunk's own dtype, each times its share of the weight; so one contribution's mean is
    itself, to the bit. Without weight, nobody had anything.
    """
    total = sum(weight for weight, _, _ in parts)
    counted = [part for part in parts if part[0] > 0]
    if not counted:
        return torch.zeros_like(parts[0][1]), bytes(len(parts[0][2]))
    if len(counted) == 1:
        return counted[0][1], counted[0][2]
    mean = counted[0][1] * (counted[0][0] / total)
    for weight, gradients, _ in counted[1:]:
        mean.add_(gradients, alpha=weight / total)
    present = bytes(any(flags) for flags in zip(*(part[2] for part in counted), strict=True))
    return mean, present
