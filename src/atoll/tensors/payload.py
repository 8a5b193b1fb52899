"""What came in a message as a tensor, in place."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor

Payload: TypeAlias = Any  # whatever has the buffer protocol: bytes, memoryview, a mapping of a file


class _Unlocked:
    """Read-only memory as NumPy takes it for one that may be written to, and so torch takes it without the
    warning that it cannot keep anybody from writing. Nobody does: who makes a tensor of it only reads.

    A filter of warnings would not do: it is the whole process's, and others put it back or clear it.
    """

    def __init__(self, payload: Payload) -> None:
        self._held = numpy.frombuffer(payload, dtype=numpy.uint8)
        told: dict[str, Any] = self._held.__array_interface__
        self.__array_interface__ = {**told, "data": (told["data"][0], False)}


def bytes_in(payload: Payload) -> Tensor:
    """The memory of a payload as a tensor of bytes, 1-D, which is only read; it keeps the payload."""
    if not memoryview(payload).nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(numpy.asarray(_Unlocked(payload)))


def tensor_of(payload: Payload, dtype: torch.dtype) -> Tensor:
    """The values in a payload of the right size, in place where its address allows it; only to be read."""
    raw = bytes_in(payload)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)
