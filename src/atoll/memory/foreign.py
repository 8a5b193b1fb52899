"""The optimizer's state of chunks of which other members step a part. It is read from them, and never changed
here.

A member describes the chunk's state in one word (`described`), which covers all of the chunk's parameters of
which the member holds something: values kept for a parameter as a whole ("step"), and the keys and dtypes of
the element-wise states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from atoll.core.decoding import from_msgpack
from atoll.core.errors import RunError, UserError
from atoll.memory.gradients import TrainedChunk
from atoll.memory.payloads import MASTER, state_kind
from atoll.memory.sharing import FetchCache, Sharing
from atoll.memory.states import ChunkStates
from atoll.memory.stepqueue import Settings
from atoll.tensors.optimizer import State

_MOST_BYTES = 2**20  # of one `_Number`: a state kept for a parameter as a whole is a scalar or little more


class _Number(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that the optimizer keeps for a parameter as a whole."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Value: TypeAlias = _Number | bool | int | float | str | None


class _Slot(msgspec.Struct, frozen=True):
    """The description of one parameter's state.

    Attributes:
        numbers: values kept for the parameter as a whole, by key.
        kept: dtypes of the element-wise states, by key.
    """

    numbers: dict[str, Value]
    kept: dict[str, str]


def described(states: ChunkStates) -> bytes:
    """Return the description of the states of a chunk's parameters, as bytes that `SharedStates` reads."""
    slots = [
        _Slot(
            {
                key: _told(key, value, states.trained.names[slot])
                for key, value in states.numbers(slot).items()
            },
            {key: str(dtype).removeprefix("torch.") for key, dtype in states.kept(slot).items()},
        )
        for slot in range(len(states.trained.parameters))
    ]
    return msgspec.msgpack.encode(slots)


def _told(key: str, value: Any, name: str) -> Value:
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _Number(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(
        f"the optimizer keeps a {type(value).__name__} as {key!r} for {name!r}, which other workers cannot "
        "be told; it can keep tensors, numbers and texts"
    )


class SharedStates:
    """The `States` of a chunk of which other members step a part, for an optimizer's `ChunkStepper` and for
    checkpoints.

    Args:
        cache: fetches the other members' parts.
        group: the number of the chunk's param group.
        own: the states that this member steps; None if it steps nothing of the chunk.
    """

    def __init__(
        self,
        trained: TrainedChunk,
        sharing: Sharing,
        cache: FetchCache,
        group: int = 0,
        own: ChunkStates | None = None,
    ) -> None:
        self.trained, self.group, self._sharing, self._cache, self._own = trained, group, sharing, cache, own
        self._known: dict[int, Sequence[_Slot]] = {}  # the descriptions, by holder
        self._count = -1  # the value of `sharing.count` at which they were fetched

    def numbers(self, slot: int) -> State:
        """Return copies of the state kept for a parameter as a whole."""
        if self._own is not None and self._own.portion.has(slot):
            return self._own.numbers(slot)
        return {key: _heard(value) for key, value in self._told(slot).numbers.items()}

    def kept(self, slot: int) -> dict[str, torch.dtype]:
        """Return the dtypes of the element-wise states, by key."""
        if self._own is not None and self._own.portion.has(slot):
            return self._own.kept(slot)
        return {key: _dtype(name) for key, name in self._told(slot).kept.items()}

    def elements(self, slot: int, key: str) -> Tensor:
        """Return a copy of the element-wise state `key`, with the parameter's shape and strides."""
        kind = MASTER if key == MASTER else state_kind(key)
        flat = self._cache.fetched(self.trained, slot, kind, self.kept(slot)[key])
        if self._own is not None and self._own.portion.has(slot):
            self._own.copy_held(slot, key, flat)
        return self.trained.part(flat, slot).clone()

    def load(self, slot: int, state: State, settings: Settings | None = None) -> None:
        """Load the part of a state that is held here; the other members' scripts load their parts."""
        if self._own is not None:
            self._own.load(slot, state, settings)

    def _told(self, slot: int) -> _Slot:
        """Return the description of a slot by a member that holds some of its parameter."""
        begin, end = self.trained.place(slot)
        others = self._cache.parts[self.trained.chunk.id]
        if not self.trained.extent:  # no parameter has elements: one member has the chunk
            return self._slots(others[0].member)[slot]
        holder = next(part.member for part in others if part.begin < end and begin < part.end)
        return self._slots(holder)[slot]

    def _slots(self, holder: int) -> Sequence[_Slot]:
        if self._count != self._sharing.count:
            self._known, self._count = {}, self._sharing.count
        if holder not in self._known:
            chunk, count = self.trained.chunk.id, len(self.trained.parameters)
            word = self._sharing.description(chunk, holder)
            who = f"worker {holder}'s word on {self._sharing.words(chunk)}"
            try:
                slots = from_msgpack(word, list[_Slot]) if word else [_Slot({}, {})] * count
            except msgspec.MsgspecError as error:
                raise RunError(f"{who}: {error}") from None
            if len(slots) != count:
                raise RunError(f"{who} speaks of {len(slots)} parameters, and it has {count}")
            self._known[holder] = slots
        return self._known[holder]


def _heard(value: Value) -> Any:
    if not isinstance(value, _Number):
        return value
    dtype, numel = _dtype(value.dtype), 1
    for size in value.shape:
        numel *= size
    if numel < 0 or numel * dtype.itemsize != len(value.data) or len(value.data) > _MOST_BYTES:
        raise RunError(
            f"a number of an optimizer's state has {len(value.data)} bytes for {value.shape} of {dtype}"
        )
    return (
        torch.frombuffer(bytearray(value.data), dtype=dtype).view(value.shape)
        if numel
        else torch.empty(value.shape, dtype=dtype)
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RunError(f"an optimizer's state is of {name!r}, which is no dtype")
    return dtype
