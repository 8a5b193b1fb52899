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
from atoll.tensors.chunkstate import State, copied
from atoll.tensors.dtypes import dtype_named
from atoll.tensors.packing import pack, unpack

_Told: TypeAlias = tuple[State, dict[str, torch.dtype]]  # numbers and element-wise states' dtypes, by key


class _Slot(msgspec.Struct, frozen=True):
    """The description of one parameter's state.

    Attributes:
        numbers: values kept for the parameter as a whole, by key, as words (`tensors/packing.py`).
        kept: dtypes of the element-wise states, by key.
    """

    numbers: dict[str, Any]
    kept: dict[str, str]


class _Description(msgspec.Struct, frozen=True):
    """The description of the states of a chunk's parameters; `packed` has the bytes of their numbers."""

    slots: list[_Slot]
    packed: bytes = b""


def described(states: ChunkStates) -> bytes:
    """Return the description of the states of a chunk's parameters, as bytes that `SharedStates` reads."""
    slots = range(len(states.trained.parameters))
    packed, words = pack([states.numbers(slot) for slot in slots])
    kept = [
        {key: str(dtype).removeprefix("torch.") for key, dtype in states.kept(slot).items()} for slot in slots
    ]
    return msgspec.msgpack.encode(_Description(list(map(_Slot, words, kept)), packed.numpy().tobytes()))


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
        self._known: dict[int, Sequence[_Told]] = {}  # what the descriptions say, by holder
        self._count = -1  # the value of `sharing.count` at which they were fetched

    def numbers(self, slot: int) -> State:
        """Return copies of the state kept for a parameter as a whole."""
        if self._own is not None and self._own.portion.has(slot):
            return self._own.numbers(slot)
        return {key: copied(value) for key, value in self._told(slot)[0].items()}

    def kept(self, slot: int) -> dict[str, torch.dtype]:
        """Return the real dtypes of the element-wise states, by key."""
        if self._own is not None and self._own.portion.has(slot):
            return self._own.kept(slot)
        return self._told(slot)[1]

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

    def _told(self, slot: int) -> _Told:
        """Return what a member that holds some of a slot's parameter says of it."""
        begin, end = self.trained.place(slot)
        others = self._cache.parts[self.trained.chunk.id]
        if not self.trained.extent:  # no parameter has elements: one member has the chunk
            return self._slots(others[0].member)[slot]
        holder = next(part.member for part in others if part.begin < end and begin < part.end)
        return self._slots(holder)[slot]

    def _slots(self, holder: int) -> Sequence[_Told]:
        if self._count != self._sharing.count:
            self._known, self._count = {}, self._sharing.count
        if holder not in self._known:
            chunk, count = self.trained.chunk.id, len(self.trained.parameters)
            word = self._sharing.description(chunk, holder)
            who = f"worker {holder}'s word on {self._sharing.words(chunk)}"
            try:
                self._known[holder] = _heard(word) if word else [({}, {})] * count
            except (msgspec.MsgspecError, UserError) as error:
                raise RunError(f"{who}: {error}") from None
            found = len(self._known[holder])
            if found != count:
                del self._known[holder]
                raise RunError(f"{who} speaks of {found} parameters, and it has {count}")
        return self._known[holder]


def _heard(word: bytes) -> list[_Told]:
    said = from_msgpack(word, _Description)
    packed = torch.empty(0, dtype=torch.uint8)
    if said.packed:
        packed = torch.frombuffer(bytearray(said.packed), dtype=torch.uint8)
    numbers = unpack(packed, [each.numbers for each in said.slots])
    kept = [{key: _dtype(name) for key, name in each.kept.items()} for each in said.slots]
    return list(zip(numbers, kept, strict=True))


def _dtype(name: str) -> torch.dtype:
    try:
        return dtype_named(name)
    except ValueError as error:
        raise UserError(f"an optimizer's state is of {error}") from None
