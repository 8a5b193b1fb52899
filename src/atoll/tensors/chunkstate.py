"""A chunk's optimizer state, and the segments by which the chunk steps.

A **segment** is a flat run of chunk memory whose parameters step alike. It never spans parameters that differ
in an input of their update: the param group, the presence of a gradient, and the step count. A parameter
whose gradient is None is skipped, as in plain torch.

A segment has one tensor for each per-parameter value (`step`). The script sees a separate tensor for each
parameter, as in torch: a plain optimizer that goes on from the state counts each parameter once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from atoll.chunks import Chunk
from atoll.tensors.binding import BoundChunk, carve
from atoll.tensors.torch_compat import version_of
from atoll.tensors.wrapped import clone

State: TypeAlias = dict[str, Any]
_FULL_PRECISION = (torch.float32, torch.float64)
_CACHE_LINE = 64  # bytes: the unit of torch's fused CPU kernels, and at least a vector


class Segment:
    """A run of a chunk's slots, `first` to `last` inclusive, that steps as one parameter.

    The parameter is flat, or, with `like`, one slot's tensor with the shape and strides of `like`.
    """

    def __init__(self, chunk: BoundChunk, first: int, last: int, like: Tensor | None = None) -> None:
        slots = chunk.chunk.slots
        self.chunk, self.first, self.last, self._like = chunk, first, last, like
        self.start, self.end = slots[first].offset, slots[last].offset + slots[last].numel
        self.parameter = nn.Parameter(self._part(chunk.flat))
        self._memory = chunk.flat
        self.state: State = {}
        # For each per-parameter key, [slots, ...]: each slot's own tensor, where there are several slots.
        self.own: dict[str, Tensor] = {}
        self._gradient: tuple[Tensor, Tensor] | None = None  # the chunk's gradients, and its part of them

    def follow(self) -> None:
        """Point at the chunk's memory, which may have moved since the last step."""
        if self._memory is not self.chunk.flat:
            self._memory = self.chunk.flat
            self.parameter.data = self._part(self._memory)

    def _part(self, flat: Tensor) -> Tensor:
        """Return this segment's part of a chunk's values or gradients."""
        part, like = flat[self.start : self.end], self._like
        return part if like is None else part.as_strided(like.shape, like.stride())

    def gradient(self, buffer: Tensor) -> Tensor:
        """Return this segment's part of the chunk's gradients; the view of the latest buffer is cached."""
        if self._gradient is None or self._gradient[0] is not buffer:
            self._gradient = buffer, self._part(buffer)
        return self._gradient[1]

    def forget_gradient(self) -> None:
        """Drop the reference to the latest step's gradients."""
        self._gradient = None

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.end == self.chunk.chunk.extent

    def own_of(self, key: str, value: Tensor) -> list[Tensor]:
        """Return a separate tensor with the segment's `value` for each slot; `show` updates them later."""
        count = self.last + 1 - self.first
        if count == 1:
            return [value]
        value = value.detach()
        own = self.own[key] = value.expand(count, *value.shape).clone(memory_format=torch.contiguous_format)
        like, flat = own[0], own.view(-1)
        return [carve(flat, slot * like.numel(), like) for slot in range(count)]

    def show(self) -> None:
        """Copy the segment's present values into each slot's own tensors."""
        for key, own in self.own.items():
            own.copy_(self.state[key])


@dataclass
class SavedState:
    """A copy of a chunk's optimizer state.

    Attributes:
        elements: element-wise states by key, flat, as in `ChunkState`.
        slots: each slot's states by key, with None for those in `elements`.
        segments: the list of segments at that time, compared by identity.
    """

    elements: dict[str, Tensor]
    slots: list[State]
    segments: list[Segment] | None = None


class ChunkState:
    """A chunk's optimizer state: a flat tensor for each per-element state, and per-slot values.

    `by_tensor`: each slot is a segment of its parameter's shape, and all its states are per-slot values.
    """

    def __init__(self, chunk: BoundChunk, by_tensor: bool = False) -> None:
        self.chunk, self._by_tensor = chunk, by_tensor
        self.elements: dict[str, Tensor] = {}  # key -> [chunk.extent]
        self.slots: list[State] = [
            {} for _ in chunk.chunk.slots
        ]  # each slot's values; element-wise ones as views
        self.segments: list[Segment] = []
        self.present: tuple[bool, ...] | None = None  # the presence that `segments` were cut for
        self._shown: list[Any] = []  # the slots' values as the script last saw them, slot after slot
        self._shown_counts: list[int] = []  # number of values of each slot
        self._shown_own: list[Tensor] = []  # those values that repeat a segment's value

    def cut(self, present: tuple[bool, ...], fused: bool) -> None:
        """Make the segments for the slots that have a gradient; `fused` is the param group's setting."""
        self.dissolve()
        signatures = [self._signature(slot) if here else None for slot, here in enumerate(present)]
        flat = self.chunk.flat
        runs = runs_alike(self.chunk.chunk, signatures, flat.dtype, flat.device, fused)
        self.segments = [self._segment(first, last) for first, last in runs]
        self.present = present
        self.note_shown()

    def _signature(self, slot: int) -> object:
        return slot if self._by_tensor else signature(self.slots[slot], self.elements)

    def _segment(self, first: int, last: int) -> Segment:
        segment = Segment(self.chunk, first, last, self.chunk.parameters[first] if self._by_tensor else None)
        for key, value in self.slots[first].items():
            if key in self.elements:
                segment.state[key] = self.elements[key][segment.start : segment.end]
            else:
                segment.state[key] = copied(value)
        self._share(segment)
        return segment

    def dissolve(self) -> None:
        """Copy each segment's values into its slots and drop the segments: new segments may differ."""
        for segment in self.segments:
            segment.show()
        self.segments, self.present = [], None

    def is_edited(self) -> bool:
        """True if the script has replaced or overwritten a value in a slot's state."""
        if any(map(version_of, self._shown_own)) or list(map(len, self.slots)) != self._shown_counts:
            return True
        return not all(map(is_, chain.from_iterable(map(dict.values, self.slots)), self._shown))

    def note_shown(self) -> None:
        """Record the slots' present values as those that the script sees."""
        self._shown = list(chain.from_iterable(map(dict.values, self.slots)))
        self._shown_counts = list(map(len, self.slots))
        self._shown_own = [
            self.slots[slot][key]
            for segment in self.segments
            for key in segment.own
            for slot in range(segment.first, segment.last + 1)
        ]

    def adopt(self, segment: Segment, state: State, elementwise: set[str]) -> bool:
        """Take over the optimizer's `state` of a segment.

        Returns:
            True if keys were added or dropped, or element-wise tensors replaced: the slots' dicts then hold
            new entries.
        """
        changed = state.keys() != segment.state.keys()
        renewed: State = {}
        replaced: dict[str, Tensor] = {}
        for key, value in state.items():
            if value is segment.state.get(key):
                continue
            per_element = (
                not self._by_tensor
                and isinstance(value, Tensor)
                and (key in elementwise or (value.numel() > 1 and value.shape == segment.parameter.shape))
            )
            if per_element:
                # A copy, since an optimizer may swap two tensors of its state.
                replaced[key] = value.clone() if segment.state else value
            else:
                renewed[key] = value
        for key, value in replaced.items():
            state[key] = self._hold(segment, key, value)
            changed = True
        segment.state = state
        if changed:
            self._share(segment)
            return True
        numbers = {key: value for key, value in renewed.items() if key not in segment.own}
        for slot in range(segment.first, segment.last + 1) if numbers else ():
            self.slots[slot].update(numbers)
        segment.show()
        if numbers:
            self.note_shown()
        return False

    def _hold(self, segment: Segment, key: str, value: Tensor) -> Tensor:
        """Put a segment's new element-wise tensor into the chunk's, and return the segment's part."""
        flat = self.elements.get(key)
        if flat is None and segment.is_whole:
            self.elements[key] = value
            return value
        if flat is None:
            flat = self.elements[key] = value.new_zeros(self.chunk.chunk.extent)
        part = flat[segment.start : segment.end]
        part.copy_(value)
        return part

    def _share(self, segment: Segment) -> None:
        """Show the segment's state in the user's view of each slot's state."""
        segment.own.clear()
        own = {
            key: segment.own_of(key, value)
            for key, value in segment.state.items()
            if key not in self.elements and isinstance(value, Tensor)
        }
        for slot in range(segment.first, segment.last + 1):
            view: State = {}
            offset = self.chunk.chunk.slots[slot].offset
            for key, value in segment.state.items():
                if key in self.elements:
                    view[key] = carve(self.elements[key], offset, self.chunk.parameters[slot])
                else:
                    view[key] = own[key][slot - segment.first] if key in own else value
            self.slots[slot].clear()
            self.slots[slot].update(view)

    def save(self, into: SavedState | None) -> SavedState:
        """Return a copy of the state, in the memory of the earlier copy `into` where it has room."""
        memory = into.elements if into is not None else {}
        elements = {
            key: memory[key].copy_(values) if key in memory else values.clone()
            for key, values in self.elements.items()
        }
        slots = [
            {key: None if key in self.elements else copied(value) for key, value in slot.items()}
            for slot in self.slots
        ]
        return SavedState(elements, slots, self.segments)

    def rewind(self, saved: SavedState) -> None:
        """Restore the state `saved`. Only optimizer steps may have changed the state since."""
        for key, values in saved.elements.items():
            self.elements[key].copy_(values)
        if self.segments is not saved.segments:  # cut later: slots in one segment may have differed before
            self.dissolve()
        for segment in self.segments:
            before = saved.slots[segment.first]
            for key in segment.own.keys() - before.keys():
                del segment.own[key]
            slots = self.slots[segment.first : segment.last + 1]
            self._be_again(before, [segment.state, *slots], following=segment.own)
            segment.show()
        for slot, before in zip(self.slots, saved.slots, strict=True) if not self.segments else ():
            self._be_again(before, [slot], following=())
        self.note_shown()

    def _be_again(self, before: State, states: Sequence[State], following: Collection[str]) -> None:
        """Restore per-parameter values from `before` into `states`: a segment's state and its slots'.

        Leaves per-element values to `rewind`, and slots' keys in `following` to `Segment.show`.
        """
        for key in list(states[0]):
            value = copied(before.get(key))
            for state in states:
                if key not in before:  # added by the first step
                    del state[key]
                elif key not in self.elements and (state is states[0] or key not in following):
                    state[key] = value

    def copy(self, other: ChunkState) -> None:
        """Copy the state of `other`, a chunk with an equal layout."""
        self.dissolve()
        for key in self.elements.keys() - other.elements.keys():
            del self.elements[key]
        for key, values in other.elements.items():
            if key in self.elements:
                self.elements[key].copy_(values)
            else:
                self.elements[key] = values.clone()
        for index, (slot, theirs) in enumerate(zip(self.slots, other.slots, strict=True)):
            offset, parameter = self.chunk.chunk.slots[index].offset, self.chunk.parameters[index]
            slot.clear()
            for key, value in theirs.items():
                flat = self.elements.get(key)
                slot[key] = copied(value) if flat is None else carve(flat, offset, parameter)

    def load(self, slot: int, state: State, elementwise: set[str]) -> None:
        """Take a parameter's state from plain torch's form."""
        view: State = {}
        for key, value in state.items():
            if key in elementwise and isinstance(value, Tensor):
                flat = self.elements.get(key)
                if flat is None:
                    dtype = value.dtype.to_real()
                    flat = torch.zeros(self.chunk.chunk.extent, dtype=dtype, device=self.chunk.flat.device)
                    self.elements[key] = flat
                view[key] = carve(flat, self.chunk.chunk.slots[slot].offset, self.chunk.parameters[slot])
                view[key].copy_(value)
            else:
                view[key] = copied(value)  # a loaded state may share one tensor among parameters
        self.slots[slot].clear()
        self.slots[slot].update(view)


def runs_alike(
    chunk: Chunk,
    signatures: Sequence[object],
    dtype: torch.dtype,
    device: torch.device,
    fused: bool,
) -> list[tuple[int, int]]:
    """Return the first and last slot of each run of neighbouring slots that step alike.

    Args:
        chunk: the chunk with the slots.
        signatures: by slot, a value that is equal for slots that step alike; None: the slot is not stepped.
        dtype: the precision of the step.
        device: the device of the step.
        fused: the param group's setting.
    """
    runs: list[tuple[int, int]] = []
    before: object = None
    for slot, signature in enumerate(signatures):
        if signature is not None and signature == before:
            runs[-1] = runs[-1][0], slot
        elif signature is not None:
            runs.append((slot, slot))
        ends = _ends_run(chunk.slots[slot].numel * dtype.itemsize, dtype, device, fused)
        before = None if ends else signature
    return runs


def _ends_run(nbytes: int, dtype: torch.dtype, device: torch.device, fused: bool) -> bool:
    """True if a run must end after a parameter of `nbytes`, to round as plain torch does.

    On a CPU, fused kernels and half precision round differently in a vector loop and in the scalar loop
    that finishes it (docs/notes/optimizers.md). Fused kernels work by whole cache lines, so a run may go on
    after a parameter that fills its last line. In half precision each parameter is a run of its own.
    """
    if device.type != "cpu":
        return False
    if dtype not in _FULL_PRECISION:
        return True
    return fused and nbytes % _CACHE_LINE != 0


def copied(value: Any) -> Any:
    """Return a copy of a state, in which later changes of the state do not show."""
    if isinstance(value, Tensor):
        return clone(value)
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return {key: copied(each) for key, each in value.items()} if type(value) is dict else value


def signature(state: State, elementwise: Collection[str]) -> tuple[object, ...]:
    """Return a value that is equal for slots that may share a segment.

    It consists of the state's keys and the per-parameter values.
    """
    return tuple(
        (key, None if key in elementwise else _comparable(value)) for key, value in sorted(state.items())
    )


def _comparable(value: Any) -> object:
    """Return a value that equals another slot's if and only if the two may share a segment."""
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.numel() == 1 else id(value)
