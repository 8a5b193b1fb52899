"""Payloads: the values, the gradient or the optimizer's state of a chunk.

A payload is known by (chunk, kind). `Payloads` is the interface that gradients and steps need, and that
`store.Store` offers; `TensorPayloads` keeps payloads in plain tensors of their own.
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
MASTER = "master"  # the same in single precision, where the model's dtype is a half one and the state is not
GRADIENT = "gradient"  # in the model's dtype
SUM = "sum"  # of a group's gradients, beside a member's own
_STATE = "state."  # and the key that the optimizer has for it: "state.exp_avg"
_SPARE = "spare."  # and the kind beside which it lies: what a step that does not count yet has made


def state_kind(key: str) -> str:
    """The kind of the optimizer's element-wise state `key`."""
    return _STATE + key


def spare_kind(kind: str) -> str:
    """The kind of the spare payload beside one of `kind`."""
    return _SPARE + kind


def is_spare(kind: str) -> bool:
    """True if `kind` names a spare payload."""
    return kind.startswith(_SPARE)


class Payloads(Protocol):
    """Flat memory by (chunk, kind). Its methods may be called from several threads at once."""

    def add(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        """A new payload; its first pin gives zeros."""

    def pin(
        self, key: Key, *, writes: bool = False, overwrites: bool = False
    ) -> AbstractContextManager[Tensor]:
        """The payload, (numel,), which stays where it is within.

        `writes`: it is changed; `overwrites`: nobody reads what is there, which may be anything.
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
