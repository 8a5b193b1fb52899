"""Building a model that does not fit: a parameter leaves memory as soon as others need the room.

While `init` is active, a torch hook makes every parameter that a module registers an `InitialisedParameter`.
Its value lies in memory or in a file, and any use brings it back. So code that initialises weights runs
unchanged, in its order and with its random numbers, and later code that initialises them again
(`model.apply(...)`) finds them. Source: docs/memory.md, "Building a model that does not fit".
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from atoll.core.callstack import caller
from atoll.core.errors import UserError
from atoll.core.heap import give_back_freed_memory
from atoll.core.memory import Budgets, Memory
from atoll.core.units import format_bytes
from atoll.memory.spillfile import Piece, SpillFile
from atoll.memory.statedicts import lazily
from atoll.tensors.binding import is_dense, run_of
from atoll.tensors.torch_compat import (
    AUTOGRADS_ATTRIBUTES,
    AsPlainTensors,
    makes_parameter,
    storage_handle,
    storage_uses,
)

_OWN_USES = 2  # uses of a storage: by the parameter, and by the object that counts
# Attributes and methods that are right while a parameter's value is elsewhere.
_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "grad_fn", "ndim",
    "is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_mkldnn", "nbytes", "itemsize",
    "retains_grad", "output_nr", *AUTOGRADS_ATTRIBUTES,
)  # fmt: skip
_METHODS = (
    "requires_grad_", "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point",
    "is_complex", "__len__", "__hash__", "register_hook", "register_post_accumulate_grad_hook",
    "is_inference", "get_device",
)  # fmt: skip
_VALUELESS: set[Any] = {
    *(getattr(Tensor, name) for name in _METHODS),
    *(
        getattr(getattr(Tensor, n), does)
        for n in _ATTRIBUTES
        for does in ("__get__", "__set__", "__delete__")
    ),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
_TRIM = 8  # at most 1/8 of the host's budget is freed memory that the allocator still holds
_LAYOUT = {Tensor.stride, Tensor.is_contiguous}


class Room(Protocol):
    """A holder of values that are not in their parameters."""

    def is_agreed(self, place: Place) -> bool:
        """True if all members of a group have the value at this place already."""

    @property
    def spilled(self) -> int:
        """The length, in bytes, of the file that the budget of new tiers is to have room for."""

    def adopt(self, parameter: nn.Parameter) -> None:
        """Take in a plain parameter that a parameter of this room was copied to."""

    def pin(self, parameter: InitialisedParameter) -> None:
        """Bring the value into the parameter. It stays there until as many `unpin` as `pin`."""

    def unpin(self, parameter: InitialisedParameter) -> None: ...

    def value(self, parameter: InitialisedParameter) -> Tensor:
        """Return a copy of the value in host memory."""

    def copy_into(self, parameter: InitialisedParameter, into: Tensor) -> None:
        """Copy the value into `into`, 1-D and contiguous, in the order of memory."""

    def release(self, parameter: InitialisedParameter) -> None:
        """Make the parameter a plain `nn.Parameter` without a value."""


class Place:
    """The place of one parameter's value.

    Attributes:
        pins: uses under way, during which the value stays in the parameter.
        absent: True if the value is in `copy` or `piece`, and not in the parameter.
        copy: the value, flat, in host memory; only for a parameter on an accelerator.
        piece: the value's place in the file.
        gone: runs when the parameter is collected.
    """

    def __init__(self, room: Room, parameter: nn.Parameter) -> None:
        self.room = room
        self.parameter = weakref.ref(parameter)
        self.pins = 0
        self.note(parameter)
        self.absent = False
        self.copy: Tensor | None = None
        self.piece: Piece | None = None
        self.gone: weakref.finalize[Any, Any] | None = None

    def note(self, parameter: nn.Parameter) -> None:
        """Note the parameter's shape, strides, dtype and device, which `.data = ...` or a conversion may have
        changed."""
        self.shape, self.stride = tuple(parameter.shape), tuple(parameter.stride())
        self.dtype, self.device, self.nbytes = parameter.dtype, parameter.device, parameter.nbytes


class InitialisedParameter(nn.Parameter):
    """A parameter made under `init`. Its value lies in ordinary memory or in a file, from which any use
    brings it back.

    `take` makes it an `nn.Parameter` again.
    """

    _atoll_place: Place

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _VALUELESS:
            with AsPlainTensors():
                return func(*args, **kwargs)
        if func in _LAYOUT and args[0]._atoll_place.absent:
            place = args[0]._atoll_place
            return func(torch.empty_strided(place.shape, place.stride, device="meta"), *args[1:], **kwargs)
        if func is Tensor.detach:
            if (lazy := lazily(args[0])) is not None:
                return lazy
            if makes_parameter(caller()):
                return args[0]._again()
        used = {id(p): p for p in _initialised((args, kwargs))}.values()
        with _present(list(used)), AsPlainTensors(), _saved_apart():
            return func(*args, **kwargs)

    def stored_value(self) -> Tensor:
        """Return a copy of the value in host memory."""
        return self._atoll_place.room.value(self)

    def _again(self) -> Tensor:
        """Return a second parameter on the same memory.

        `nn.Parameter(self)`, which parametrisations call, requires that `detach()` return this class.
        """
        with _present([self]), AsPlainTensors():
            made = nn.Parameter(self.data, self.requires_grad)
            self._atoll_place.room.adopt(made)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            made = nn.Parameter(self.stored_value().to(self.device), self.requires_grad)
            self._atoll_place.room.adopt(made)
            memo[id(self)] = made
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = nn.Parameter(self.stored_value().to(self.device), self.requires_grad)
        return plain.__reduce_ex__(protocol)


class _Room:
    """The memory that parameters made under one `init` share, and the file for what exceeds it."""

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self._file: SpillFile | None = None
        self._lock = threading.RLock()
        self._present: OrderedDict[int, Place] = OrderedDict()  # by id; least recently used first
        self._held = {"host": 0, "device": 0}  # bytes of values, copies included
        self._freed = 0  # bytes, since the allocator was last asked to give them back
        if budgets.disk:
            self._file = SpillFile(budgets.folder, budgets.disk)

    def is_agreed(self, place: Place) -> bool:  # noqa: ARG002
        """False: each member has made its own values."""
        return False

    @property
    def spilled(self) -> int:
        """The length of the file, in bytes."""
        return 0 if self._file is None else self._file.end

    def adopt(self, parameter: nn.Parameter) -> None:
        """Make a parameter that has a value an `InitialisedParameter` of this room."""
        with self._lock, torch.no_grad():
            place = Place(self, parameter)
            self._make_room(parameter.device, place.nbytes)
            parameter.__class__ = InitialisedParameter
            parameter._atoll_place = place  # type: ignore[attr-defined]
            place.gone = weakref.finalize(parameter, self.forget, place)
            place.gone.atexit = False
            self._enter(place)

    def pin(self, parameter: InitialisedParameter) -> None:
        """Bring the value into the parameter. It stays there until as many `unpin` as `pin`."""
        with self._lock, torch.no_grad(), AsPlainTensors():
            place = parameter._atoll_place
            place.pins += 1
            if not place.absent:
                self._present.move_to_end(id(place))
                return
            try:
                self._make_room(place.device, place.nbytes)
                value = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=place.device)
                self._read_elsewhere(place, run_of(value))
            except BaseException:
                place.pins -= 1
                raise
            self._drop_elsewhere(place)
            parameter.data = value
            place.absent = False
            self._enter(place)

    def unpin(self, parameter: InitialisedParameter) -> None:
        with self._lock, AsPlainTensors():
            place = parameter._atoll_place
            place.pins -= 1
            if not place.absent:
                self._leave(place)
                place.note(parameter)
                self._enter(place)

    def value(self, parameter: InitialisedParameter) -> Tensor:
        """Return a copy of the value in host memory; nothing is evicted for it."""
        with self._lock, torch.no_grad(), AsPlainTensors():
            place = parameter._atoll_place
            if not place.absent:
                return parameter.data.to("cpu", copy=True)
            value = torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
            self._read_elsewhere(place, run_of(value))
            return value

    def copy_into(self, parameter: InitialisedParameter, into: Tensor) -> None:
        """Copy the value into `into`, 1-D and contiguous, in the order of memory; nothing is evicted for
        it."""
        with self._lock, torch.no_grad(), AsPlainTensors():
            place = parameter._atoll_place
            if place.absent:
                self._read_elsewhere(place, into)
            else:
                into.copy_(run_of(parameter.data))

    def _read_elsewhere(self, place: Place, into: Tensor) -> None:
        if place.copy is not None:
            into.copy_(place.copy)
            return
        assert self._file is not None
        assert place.piece is not None
        if into.device.type == "cpu" and into.dtype == place.dtype.to_real():
            self._file.copy_into(place.piece, into)
            return
        staged = torch.empty(into.numel(), dtype=place.dtype.to_real())
        self._file.copy_into(place.piece, staged)
        into.copy_(staged)

    def release(self, parameter: InitialisedParameter) -> None:
        """Make the parameter a plain `nn.Parameter` without a value."""
        with self._lock, torch.no_grad(), AsPlainTensors():
            place = parameter._atoll_place
            assert place.gone is not None
            place.gone.detach()
            self._freed += 0 if place.absent else place.nbytes
            self.forget(place)
            end_place(parameter, no_value(place))
            self._give_back()

    def forget(self, place: Place) -> None:
        """Free the room of a parameter that is gone or released."""
        with self._lock:
            if id(place) in self._present:
                self._leave(place)
            self._drop_elsewhere(place)

    def _enter(self, place: Place) -> None:
        self._present[id(place)] = place
        self._held[_tier(place.device)] += place.nbytes

    def _leave(self, place: Place) -> None:
        del self._present[id(place)]
        self._held[_tier(place.device)] -= place.nbytes

    def _drop_elsewhere(self, place: Place) -> None:
        if place.copy is not None:
            self._held["host"] -= place.copy.nbytes
            place.copy = None
        if place.piece is not None and self._file is not None:
            self._file.free(place.piece)
            place.piece = None

    def _budget(self, tier: str) -> int | None:
        return self._budgets.device if tier == "device" else self._budgets.host

    def _make_room(self, device: torch.device, nbytes: int) -> None:
        """Evict, least recently used first, until `nbytes` more fit into this device's budget. Raises
        UserError if they cannot."""
        tier = _tier(device)
        budget = self._budget(tier)
        if budget is None:
            return
        for place in list(self._present.values()):
            if self._held[tier] + nbytes <= budget:
                break
            if _tier(place.device) == tier:
                self._evict(place)
        self._give_back()
        if self._held[tier] + nbytes > budget:
            raise UserError(self._too_small(tier, nbytes))

    def _give_back(self) -> None:
        if self._budgets.host is not None and self._freed > self._budgets.host // _TRIM:
            self._freed = 0
            give_back_freed_memory()

    def _evict(self, place: Place) -> None:
        """Take the value out of its parameter, unless the parameter is in use or somebody has a view of
        it."""
        parameter = place.parameter()
        if parameter is None or place.pins:
            return
        with AsPlainTensors():
            value = parameter.data
            storage = value.untyped_storage()
            # `value` is one use more: a higher count is somebody else's view.
            is_held = storage_uses(storage_handle(storage)) > _OWN_USES + 1
            if is_held or not is_dense(value):
                return
            place.note(parameter)
            if not self._put_away(place, run_of(value)):
                return
            self._leave(place)
            self._freed += place.nbytes if _tier(place.device) == "host" else 0
            place.absent = True
            parameter.data = no_value(place)

    def _put_away(self, place: Place, value: Tensor) -> bool:
        """Keep `value` where there is room: in host memory if it comes from a device, else on disk. False if
        there is none."""
        host = self._budgets.host
        if _tier(place.device) == "device" and (host is None or self._held["host"] + value.nbytes <= host):
            place.copy = value.to("cpu")
            self._held["host"] += value.nbytes
            return True
        if self._file is None:
            return False
        place.piece = self._file.keep(value.to("cpu"))
        return True

    def _too_small(self, tier: str, nbytes: int) -> str:
        budget = self._budget(tier)
        needed = format_bytes(self._held[tier] + nbytes)
        assert budget is not None
        where = f"memory.{tier}: the budget of {format_bytes(budget)}"
        if nbytes > budget:
            return f"{where} does not hold a parameter of {format_bytes(nbytes)}; raise it to at least that"
        if self._file is None:
            return f"{where} holds no more of the model, which needs {needed} by now; raise it, or add a disk"
        return (
            f"{where} is taken by parameters that are used together, or of which views are kept; raise it to "
            f"at least {needed}"
        )


@contextmanager
def init(memory: Memory) -> Iterator[None]:
    """Build models within the block: together their parameters never hold more than the budgets of `memory`.

    Values equal those of a plain construction, to the bit. Values that exceed the host's budget lie in a file
    in the disk's folder until `fit` takes them; any use brings them back. A parameter counts on the device
    where the script makes it. Buffers are left as they are.

    Raises UserError, with the least budget that would do, for a parameter that does not fit, and, without a
    disk, for parameters that do not fit together.
    """
    room = _Room(memory.budgets())
    thread = threading.get_ident()

    def adopt(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        # Subclasses (lazy parameters) have rules of their own, and meta parameters take no memory.
        if type(parameter) is nn.Parameter and not parameter.is_meta and threading.get_ident() == thread:
            room.adopt(parameter)

    handle = register_module_parameter_registration_hook(adopt)
    try:
        yield
    finally:
        handle.remove()


def leave_in(room: Room, parameter: nn.Parameter, like: Tensor) -> Place:
    """Let the value of a plain parameter lie in `room` from now on; return its place there.

    Args:
        like: a tensor of the parameter's shape, strides and dtype.
    """
    place = Place(room, parameter)
    place.shape, place.stride, place.nbytes = tuple(like.shape), tuple(like.stride()), like.nbytes
    place.absent = True
    parameter.data = no_value(place)
    parameter.__class__ = InitialisedParameter
    parameter._atoll_place = place  # type: ignore[attr-defined]
    return place


def is_agreed(parameter: nn.Parameter) -> bool:
    """True if all members of a group have the parameter's value already."""
    if not isinstance(parameter, InitialisedParameter):
        return False
    place = parameter._atoll_place
    return place.room.is_agreed(place)


def room_place(parameter: InitialisedParameter) -> Place:
    """Return the place of the parameter's value."""
    return parameter._atoll_place


def end_place(parameter: InitialisedParameter, value: Tensor) -> None:
    """Make the parameter a plain `nn.Parameter` with this value."""
    with AsPlainTensors():
        del parameter._atoll_place
        parameter.data = value
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def take(parameter: nn.Parameter, into: Tensor) -> None:
    """Copy a parameter's value into `into`, wherever the value lies, and free the parameter's own memory.

    The parameter is then an `nn.Parameter` without a value (NaN, strides 0) until its `data` is set.

    Args:
        into: 1-D, contiguous, of the size and the real dtype of `run_of(parameter)`, whose elements it gets.
    """
    if isinstance(parameter, InitialisedParameter):
        room = parameter._atoll_place.room
        room.copy_into(parameter, into)
        room.release(parameter)
        return
    with torch.no_grad():
        into.copy_(run_of(parameter.data))
        parameter.data = _stand_in(tuple(parameter.shape), parameter.dtype, parameter.device)


def let_go(parameter: nn.Parameter) -> None:
    """Free a parameter's value, which somebody else keeps. The parameter is left as `take` leaves it."""
    if isinstance(parameter, InitialisedParameter):
        parameter._atoll_place.room.release(parameter)
        return
    parameter.data = _stand_in(tuple(parameter.shape), parameter.dtype, parameter.device)


def resident_bytes(parameters: Sequence[nn.Parameter]) -> int:
    """Return the bytes of these parameters that lie in memory now.

    Taking over chunks with the most such bytes first keeps the total within the budgets.
    """
    return sum(
        0 if isinstance(p, InitialisedParameter) and p._atoll_place.absent else p.nbytes for p in parameters
    )


def spilled_to(parameters: Sequence[nn.Parameter]) -> int:
    """Return the end, in the file, of the last of these values; 0 if none lies in a file.

    Taking the values that lie last first lets the file become shorter.
    """
    pieces = [p._atoll_place.piece for p in parameters if isinstance(p, InitialisedParameter)]
    return max((piece.begin + piece.nbytes for piece in pieces if piece is not None), default=0)


def spilled_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the total length of the files that hold values of these parameters."""
    rooms = {p._atoll_place.room for p in parameters if isinstance(p, InitialisedParameter)}
    return sum(room.spilled for room in rooms)


@contextmanager
def _present(parameters: Sequence[InitialisedParameter]) -> Iterator[None]:
    """Pin the values of all these parameters at once, within the block."""
    pinned: list[InitialisedParameter] = []
    try:
        for parameter in parameters:
            parameter._atoll_place.room.pin(parameter)
            pinned.append(parameter)
        yield
    finally:
        for parameter in pinned:
            parameter._atoll_place.room.unpin(parameter)


def _saved_apart() -> AbstractContextManager[object]:
    """Return hooks that let autograd save a view of a parameter's memory in place of the parameter.

    The parameter's own memory may be taken away before backward. A view keeps it.
    """
    if not torch.is_grad_enabled():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_detached, lambda tensor: tensor)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _initialised(value: Any) -> Iterator[InitialisedParameter]:
    """Yield the parameters made under `init` among a call's arguments, nested ones included."""
    if isinstance(value, InitialisedParameter):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _initialised(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _initialised(item)


def no_value(place: Place) -> Tensor:
    return _stand_in(place.shape, place.dtype, place.device)


def _stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of `shape` over one element, NaN or 0: a use that `init` missed finds NaN, and never
    freed memory."""
    fill: Any = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(shape)


def _tier(device: torch.device) -> str:
    return "host" if device.type == "cpu" else "device"
