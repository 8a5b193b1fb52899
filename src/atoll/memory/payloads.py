"""What of a chunk lies somewhere by itself: its values, its gradient, its optimizer's state.

A payload is known by (chunk, kind). `Payloads` is what gradients and steps need of whoever holds them;
`TensorPayloads` holds them in plain tensors of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

VALUES = "values"  # in the model's dtype
MASTER = "master"  # the same in single precision, where the model's dtype is a half one and the state is not
GRADIENT = "gradient"  # in the model's dtype
_STATE = "state."  # and the key that the optimizer has for it: "state.exp_avg"


def state_kind(key: str) -> str:
    """The kind of the optimizer's element-wise state `key`."""
    return _STATE + key


class Payloads(Protocol):
    """Memory by (chunk, kind). Its methods may be called from several threads at once."""

    def has(self, chunk: int, kind: str) -> bool:
        """Whether there is such a payload, wherever it lies."""

    def pin(self, chunk: int, kind: str, nbytes: int = 0, *, writes: bool = False) -> Tensor:
        """Its memory, uint8 (nbytes,), which stays where it is until `unpin`; pins count.

        One that is not there is made, of `nbytes`, with anything in it. `writes`: it may be changed.
        """

    def unpin(self, chunk: int, kind: str) -> None:
        """Let go of one pin."""

    def drop(self, chunk: int, kind: str) -> None:
        """Forget a payload that nobody has pinned, if it is there."""


@contextmanager
def pinned(
    payloads: Payloads, chunk: int, kind: str, dtype: torch.dtype, numel: int, *, writes: bool = False
) -> Iterator[Tensor]:
    """A payload's values, (numel,), pinned within; made if it is not there."""
    memory = payloads.pin(chunk, kind, numel * dtype.itemsize, writes=writes)
    try:
        yield memory[: numel * dtype.itemsize].view(dtype)
    finally:
        payloads.unpin(chunk, kind)


class TensorPayloads:
    """Payloads in tensors of their own on one device, with no budget."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._memory: dict[tuple[int, str], Tensor] = {}
        self._pins: dict[tuple[int, str], int] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads."""
        return sum(memory.nbytes for memory in self._memory.values())

    def has(self, chunk: int, kind: str) -> bool:
        return (chunk, kind) in self._memory

    def pin(self, chunk: int, kind: str, nbytes: int = 0, *, writes: bool = False) -> Tensor:
        with self._lock:
            memory = self._memory.get((chunk, kind))
            if memory is None:
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                self._memory[chunk, kind] = memory
            self._pins[chunk, kind] = self._pins.get((chunk, kind), 0) + 1
            return memory

    def unpin(self, chunk: int, kind: str) -> None:
        with self._lock:
            self._pins[chunk, kind] -= 1

    def drop(self, chunk: int, kind: str) -> None:
        with self._lock:
            if self._pins.pop((chunk, kind), 0):
                raise AssertionError(f"payload {kind!r} of chunk {chunk} is dropped while it is pinned")
            self._memory.pop((chunk, kind), None)
