"""Payloads: the values, the gradient or the optimizer's state of a chunk.

A payload is known by (chunk, kind). `Payloads` is the interface that gradients and steps need.
`store.PayloadStore` implements it, and `TensorPayloads` does with a plain tensor for each payload.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Key: TypeAlias = tuple[int, str]  # chunk id, kind

VALUES = "values"  # in the model's dtype
MASTER = "master"  # values in single precision, for a model in half precision
GRADIENT = "gradient"  # in the model's dtype
SUM = "sum"  # the sum of a group's gradients, beside a member's own gradients
_STATE = "state."  # prefix of the optimizer's key: "state.exp_avg"
_SPARE = "spare."  # prefix of another kind: holds that kind's result of a step that does not count yet


def state_kind(key: str) -> str:
    """Return the kind of the optimizer's element-wise state `key`."""
    return _STATE + key


def spare_kind(kind: str) -> str:
    """Return the kind of the spare payload beside one of `kind`."""
    return _SPARE + kind


def is_spare(kind: str) -> bool:
    """True if `kind` names a spare payload."""
    return kind.startswith(_SPARE)


class Payloads(Protocol):
    """Flat memory by (chunk, kind). Its methods may be called from several threads at once."""

    def add(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        """Add a payload of `numel` elements. Its first pin gives zeros."""

    def pin(
        self, key: Key, *, writes: bool = False, overwrites: bool = False
    ) -> AbstractContextManager[Tensor]:
        """Lend the payload, (numel,), which does not move within the context.

        Args:
            writes: True if the caller changes it.
            overwrites: True if nobody reads the old content, which may then be undefined.
        """

    def drop(self, key: Key) -> None:
        """Discard a payload's content. The key stays known; its next pin gives zeros."""


class TensorPayloads:
    """Payloads in tensors of their own on one device, with no budget."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._sizes: dict[Key, tuple[int, torch.dtype]] = {}
        self._memory: dict[Key, Tensor] = {}
        self._pins: dict[Key, int] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads."""
        return sum(memory.nbytes for memory in self._memory.values())

    def add(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        if key in self._sizes:
            raise ValueError(f"payload {key} is added twice")
        self._sizes[key] = numel, dtype

    @contextmanager
    def pin(self, key: Key, *, writes: bool = False, overwrites: bool = False) -> Iterator[Tensor]:
        del writes  # nothing is written back from here
        with self._lock:
            if key not in self._memory:
                numel, dtype = self._sizes[key]
                make = torch.empty if overwrites else torch.zeros
                self._memory[key] = make(numel, dtype=dtype, device=self.device)
            self._pins[key] = self._pins.get(key, 0) + 1
            memory = self._memory[key]
        try:
            yield memory
        finally:
            with self._lock:
                self._pins[key] -= 1

    def drop(self, key: Key) -> None:
        with self._lock:
            if self._pins.get(key):
                raise ValueError(f"payload {key} is dropped while it is pinned")
            self._memory.pop(key, None)
