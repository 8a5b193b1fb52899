"""Tensors over the bytes of a received message, without a copy."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor

Payload: TypeAlias = Any  # an object with the buffer protocol: bytes, memoryview, a mapped file


class _Unlocked:
    """Read-only memory that NumPy believes to be writable.

    torch warns about tensors over read-only memory. The tensors made here are only read, so the warning is of
    no use. A warnings filter would not do: it belongs to the whole process, and others reset it.
    """

    def __init__(self, payload: Payload) -> None:
        self._array = numpy.frombuffer(payload, dtype=numpy.uint8)  # keeps the payload alive
        interface: dict[str, Any] = self._array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def bytes_in(payload: Payload) -> Tensor:
    """Return the payload's memory as a 1-D tensor of bytes. It keeps the payload alive; only read it."""
    if not memoryview(payload).nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(numpy.asarray(_Unlocked(payload)))


def tensor_of(payload: Payload, dtype: torch.dtype) -> Tensor:
    """Return the payload's values as a 1-D tensor of `dtype`; only read it.

    Copies the payload only where its address is not aligned for `dtype`. The payload's size must be a
    multiple of an element's.
    """
    raw = bytes_in(payload)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)
