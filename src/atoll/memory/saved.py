"""Saved tensors: autograd's references for backward while parameters' memory moves.

Many operations save a parameter, or a view of it, for backward: `F.linear` its weight, `w.t()` a view. A
saved tensor that lies in the memory of a chunk's parameter is packed to its origin (the parameter, dtype,
size, stride, offset), so that the chunk may leave. Backward unpacks it by deriving it again. Other tensors
are kept unchanged. Source: docs/memory.md, "How a parameter is reached".

The hooks are `torch.autograd.graph.saved_tensors_hooks`. They are entered around the forward of the model and
of each module that the script calls by itself (`watch_modules`), and by each operation that uses a parameter
(`entered`). They are not entered while other hooks are active, such as a checkpoint's: those keep a view, and
a chunk of which somebody has a view stays where it is (engine.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from atoll.core.callstack import caller, is_under_way
from atoll.memory.interrupts import uninterrupted
from atoll.tensors.torch_compat import (
    is_within_backward,
    saved_tensors_hooks_are_allowed,
    saved_tensors_hooks_in_force,
    untraced,
    version_of,
)


class ChunkOwner(Protocol):
    """An engine, as the owner of chunks."""

    def derive(self, packed: Packed) -> Tensor:
        """Return the tensor that was packed, from the parameter's present memory."""

    def version(self, place: ParameterSlot) -> int:
        """Return the version of a parameter: how often it was written into."""


@dataclass(frozen=True)
class ParameterSlot:
    """A parameter's place: slot `slot` of chunk `chunk` of `owner`."""

    owner: ChunkOwner
    chunk: int
    slot: int


@dataclass(frozen=True)
class Packed:
    """A saved tensor that lies in a parameter's memory. `size`, `stride` and `offset` count elements of
    `dtype`.

    Attributes:
        version: the parameter's version when the tensor was saved.
        whole: True if it is the parameter itself, saved while its chunk was away.
        conj: True if it stands for the conjugate of what lies there.
        neg: True if it stands for the negative.
    """

    place: ParameterSlot
    version: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool = False
    conj: bool = False
    neg: bool = False


class Addresses:
    """The parameters by the address of their memory, or of their stand-ins while their chunk is away.

    It does not keep an engine alive.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[weakref.ref[ChunkOwner], int, int, bool]] = {}

    def add(self, address: int, place: ParameterSlot, *, absent: bool = False) -> None:
        """Note that the memory of `place`, or its stand-in, begins here. Memory of no length has no
        address."""
        if address:
            self._places[address] = weakref.ref(place.owner), place.chunk, place.slot, absent

    def remove(self, address: int) -> None:
        self._places.pop(address, None)

    @untraced
    def pack(self, tensor: Tensor) -> object:
        """Return the packed form of a tensor that autograd saves."""
        try:
            address = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # no memory of its own: sparse, or made by a transform
            return tensor
        found = self._places.get(address)
        if found is None:
            return tensor, version_of(tensor)
        owner = found[0]()
        if owner is None:
            del self._places[address]
            return tensor, version_of(tensor)
        place = ParameterSlot(owner, found[1], found[2])
        return Packed(
            place,
            owner.version(place),  # the tensor's own count would be wrong for one that was derived
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            whole=found[3],
            conj=tensor.is_conj(),
            neg=tensor.is_neg(),
        )


ADDRESSES = Addresses()
_watching: list[Callable[[Tensor | ParameterSlot], None]] = []


@contextmanager
def watched(unpacked: Callable[[Tensor | ParameterSlot], None]) -> Iterator[None]:
    """Call `unpacked` with each tensor that a backward unpacks, or with its place if it lies in a chunk."""
    _watching.append(unpacked)
    try:
        yield
    finally:
        _watching.remove(unpacked)


@uninterrupted
def unpack(kept: object) -> Tensor:
    """Return a saved tensor. Raises RuntimeError, as autograd does without hooks, if it was changed since it
    was saved."""
    if isinstance(kept, Packed):
        _check_version(kept.version, kept.place.owner.version(kept.place))
        for unpacked in _watching:
            unpacked(kept.place)
        if is_within_backward():
            # With create_graph=True the node saves tensors, too. Autograd ends the context after the node.
            entered().__enter__()
        return kept.place.owner.derive(kept)
    if isinstance(kept, Tensor):
        return kept
    assert isinstance(kept, tuple)
    tensor: Tensor = kept[0]
    for unpacked in _watching:
        unpacked(tensor)
    _check_version(kept[1], version_of(tensor))
    return tensor


def _check_version(saved: int, now: int) -> None:
    if saved != now:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"it is at version {now}; expected version {saved} instead"
        )


_NOTHING = nullcontext()


def hooks_are_active() -> bool:
    """True if saved-tensor hooks are active, ours or another's."""
    return saved_tensors_hooks_in_force() is not None


def entered() -> AbstractContextManager[Any]:
    """Return a context in which tensors saved for backward do not hold their chunk; an empty one if hooks are
    active."""
    if torch.is_grad_enabled() and saved_tensors_hooks_are_allowed() and not hooks_are_active():
        return saved_tensors_hooks(ADDRESSES.pack, unpack)
    return _NOTHING


class _Open(threading.local):
    """The forwards of watched modules that are under way on this thread.

    Attributes:
        depth: how many are under way, one inside the other.
        call: the frame of the outermost one's call.
        context: the hooks that the outermost one has entered.
    """

    depth = 0
    call: FrameType | None = None
    context: AbstractContextManager[Any] = _NOTHING


_OPEN = _Open()


# Functions at module level, so that a model can be copied and pickled with its hooks.
@untraced
def _before(_module: nn.Module, _inputs: Any) -> None:
    leave_gone()
    if _OPEN.depth == 0:
        _OPEN.call = caller()
        if _OPEN.context is _NOTHING:
            _OPEN.context = entered()
            _OPEN.context.__enter__()
    _OPEN.depth += 1


@untraced
def _after(_module: nn.Module, _inputs: Any, _output: Any) -> None:
    _OPEN.depth = max(_OPEN.depth - 1, 0)
    if _OPEN.depth == 0:
        _leave()


def _leave() -> None:
    """Leave the hooks that a forward has entered.

    If another's hooks lie above them, leaving would end those instead: then a later call does it.
    """
    _OPEN.call = None
    top = saved_tensors_hooks_in_force()
    if _OPEN.context is not _NOTHING and top is not None and top[0] == ADDRESSES.pack:
        context, _OPEN.context = _OPEN.context, _NOTHING
        context.__exit__(None, None, None)


def leave_gone() -> None:
    """Leave the hooks of a forward that a KeyboardInterrupt ended: torch runs no hook after it."""
    if _OPEN.depth and not is_under_way(_OPEN.call):
        _OPEN.depth = 0
    if _OPEN.depth == 0:
        _leave()


def watch_modules(modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Enter the hooks around the forward of each of `modules` that no other of them calls."""
    handles = []
    for module in modules:
        handles += [
            module.register_forward_pre_hook(_before),
            module.register_forward_hook(_after, always_call=True),
        ]
    return handles
