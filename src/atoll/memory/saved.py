"""What autograd saves for backward while parameters' memory moves.

Many operations save a parameter, or a view of it, for backward: `F.linear` its weight, `w.t()` a view. A
saved tensor whose memory belongs to a chunk is packed to what it was made of (the chunk, dtype, size, stride,
offset), so that the chunk may leave, and is derived again when backward unpacks it. Everything else is kept
as it is. Source: S2, "Traps that are known".

The hooks are `torch.autograd.graph.saved_tensors_hooks`. They are entered around the forward of the model and
of each of its modules that is called by itself (`SavingModules`), and by each operation that uses a parameter
(`saving`), unless hooks of somebody else are active, such as those of a checkpoint: what those keep is a view,
and a chunk with a view of it stays where it is (engine.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Place:
    """A parameter's place: slot `slot` of chunk `chunk` of `owner`."""

    owner: Owner
    chunk: int
    slot: int


class Owner(Protocol):
    """Whose chunks they are: an engine."""

    def slot_at(self, chunk: int, offset: int) -> int:
        """The slot that has the element `offset` of the chunk's memory."""

    def derive(self, packed: Packed) -> Tensor:
        """The tensor that was packed, from the chunk's memory as it lies now."""

    def version(self, chunk: int, slot: int) -> int:
        """The version of the parameter there: how often it was written into."""


@dataclass(frozen=True)
class Packed:
    """A saved tensor that lies in a chunk. Sizes, strides and the offset count elements of `dtype`; `whole`:
    it is the parameter itself, saved while its chunk was away."""

    place: Place
    version: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool = False


class Addresses:
    """Whose memory begins at an address: a chunk's, while it is resident, or what stands in for a parameter
    that is away."""

    def __init__(self) -> None:
        self.chunks: dict[int, tuple[Owner, int]] = {}
        self.absent: dict[int, Place] = {}

    def pack(self, tensor: Tensor) -> object:
        """What is kept of a tensor that is saved."""
        try:
            address = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # no memory of its own: sparse, or made by a transform
            return tensor
        resident = self.chunks.get(address)
        if resident is None:
            place = self.absent.get(address) if address else None
            if place is None:
                return tensor, tensor._version
            return Packed(place, tensor._version, tensor.dtype, (), (), 0, whole=True)
        owner, chunk = resident
        offset = tensor.storage_offset()
        slot = owner.slot_at(chunk, offset)
        return Packed(
            Place(owner, chunk, slot),
            tensor._version,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            offset,
        )


ADDRESSES = Addresses()


def unpack(kept: object) -> Tensor:
    """The tensor again. Raises RuntimeError, as autograd does without hooks, if it was changed in between."""
    if isinstance(kept, Packed):
        place = kept.place
        _check_version(kept.version, place.owner.version(place.chunk, place.slot))
        return place.owner.derive(kept)
    if isinstance(kept, Tensor):
        return kept
    assert isinstance(kept, tuple)
    tensor: Tensor = kept[0]
    _check_version(kept[1], tensor._version)
    return tensor


def _check_version(saved: int, now: int) -> None:
    if saved != now:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"it is at version {now}; expected version {saved} instead"
        )


def hooks_are_active() -> bool:
    """Whether any saved-tensor hooks are, ours or another's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextmanager
def saving() -> Iterator[None]:
    """What is saved for backward within gives its chunk free."""
    if not torch.is_grad_enabled() or hooks_are_active():
        yield
        return
    with saved_tensors_hooks(ADDRESSES.pack, unpack):
        yield


class SavingModules:
    """Enters `saving` around the forward of each of `modules` that is called by itself, not by another."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._open = threading.local()
        self._handles: list[RemovableHandle] = []
        # Functions, not bound methods: a deep copy of the model copies its hooks, and functions are shared.
        enter, leave = self._enter, self._leave

        def before(_module: nn.Module, _inputs: Any) -> None:
            enter()

        def after(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            leave()

        for module in modules:
            self._handles += [
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after, always_call=True),
            ]

    def _enter(self) -> None:
        stack: list[Any] = self._open.__dict__.setdefault("stack", [])
        context = None
        if not any(stack) and torch.is_grad_enabled() and not hooks_are_active():
            context = saved_tensors_hooks(ADDRESSES.pack, unpack)
            context.__enter__()
        stack.append(context)

    def _leave(self) -> None:
        stack: list[Any] = self._open.__dict__.setdefault("stack", [])
        context = stack.pop() if stack else None
        if context is not None:
            context.__exit__(None, None, None)

    def close(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()
