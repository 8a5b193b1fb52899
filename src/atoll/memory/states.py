"""One chunk's values and optimizer state in payloads.

A state that the optimizer keeps for each element ("exp_avg") is a payload of the chunk. A state that it keeps
for a parameter as a whole ("step") stays in this object. `segments.Segments` steps the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from atoll.memory.gradients import TrainedChunk
from atoll.memory.payloads import MASTER, VALUES, Payloads, spare_kind, state_kind
from atoll.memory.portions import Portion
from atoll.memory.stepqueue import Settings
from atoll.tensors.binding import dtype_as, laid
from atoll.tensors.chunkstate import State, copied, signature
from atoll.tensors.lazy import LazyTensor
from atoll.tensors.stepunit import Unit, unit_of
from atoll.tensors.wrapped import clone, is_wrapped, moved_to

# (first and last slot, states of each parameter as a whole, keys of the element-wise states)
Kept: TypeAlias = tuple[tuple[int, int], State, frozenset[str]]
_HALF = (torch.bfloat16, torch.float16)


class ChunkStates:
    """The values and states of a chunk that an optimizer trains.

    Args:
        payloads: hold the values and the element-wise states; with `part`, only that part of them.
        unit: the unit in which the optimizer steps.
        group: the number of the param group.
        dtype: the dtype in which the chunk is stepped, on the CPU. If it is not the values' own, there is a
            master.
        part: (begin, end) of the chunk's elements that are held here; None for all. Gradients are the whole
            chunk's.
        planned: where whole tensors are stepped, the states that the plan has room for, with their dtypes.
            Those of the parameter's own shape are payloads; other states stay in this object.

    Attributes:
        changes: how often values or states have changed.
        loads: how often a state was loaded.
    """

    def __init__(
        self,
        trained: TrainedChunk,
        payloads: Payloads,
        unit: Unit,
        group: int,
        dtype: torch.dtype,
        part: tuple[int, int] | None = None,
        planned: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> None:
        self._planned = planned
        self.trained, self.group, self.dtype = trained, group, dtype
        self.portion = Portion(trained, part)
        self._payloads, self._elementwise, self.by_tensor = payloads, unit.keys, unit.by_tensor
        self.has_master = dtype != trained.dtype
        slots = len(trained.parameters)
        self._numbers: list[State] = [{} for _ in range(slots)]  # by slot: states as a whole
        self._kept: list[frozenset[str]] = [frozenset()] * slots  # by slot: keys of element-wise states
        self._dtypes: dict[str, torch.dtype] = {}  # by key, of the payloads that were added
        self._spares: set[str] = set()  # kinds of payload that have a spare
        self.changes = 0
        self.loads = 0
        if self.has_master:
            payloads.add((trained.chunk.id, MASTER), trained.chunk.numel, dtype)

    def take_over(self) -> None:
        """Fill the master, if there is one, from the values, which are here by now."""
        if self.has_master:
            with self.pin(VALUES) as values, self.pin(MASTER, overwrites=True) as precise:
                precise.copy_(values)

    # Payloads

    def pin(
        self, kind: str, *, writes: bool = False, overwrites: bool = False
    ) -> AbstractContextManager[Tensor]:
        """Lend the payload of this kind."""
        return self._payloads.pin((self.trained.chunk.id, kind), writes=writes, overwrites=overwrites)

    def pin_state(self, key: str, dtype: torch.dtype | None = None) -> AbstractContextManager[Tensor]:
        """Lend the payload of the element-wise state `key`, to be changed; add it, with `dtype`, if there is
        none."""
        if key not in self._dtypes and dtype is not None:
            self._dtypes[key] = dtype
            self._payloads.add((self.trained.chunk.id, state_kind(key)), self.trained.chunk.numel, dtype)
        return self.pin(state_kind(key), writes=True)

    def pin_spare(self, kind: str) -> AbstractContextManager[Tensor]:
        """Lend the spare of a kind, with undefined content; add it if there is none."""
        spare = spare_kind(kind)
        if kind not in self._spares:
            self._spares.add(kind)
            stepped = {VALUES: self.trained.dtype, MASTER: self.dtype}
            states = {state_kind(key): dtype for key, dtype in self._dtypes.items()}
            key = self.trained.chunk.id, spare
            self._payloads.add(key, self.trained.chunk.numel, (stepped | states)[kind])
        return self.pin(spare, overwrites=True)

    # The optimizer's states

    @property
    def has_elements(self) -> bool:
        """True if the optimizer keeps any state for each element."""
        return any(self._kept)

    def is_elementwise(self, key: str, value: Any, numel: int, slot: int) -> bool:
        """True if a state holds one value for each of `numel` elements, which a payload of the chunk can
        take.

        Args:
            slot: the first of the slots with these elements.
        """
        if not isinstance(value, Tensor) or value.numel() * (1 + value.is_complex()) != numel:
            return False
        if self.by_tensor:
            plain = type(value) is Tensor or isinstance(value, LazyTensor)  # others have more than values
            like, planned = self.trained.likes[slot], self._planned.get(key)
            fits = planned is not None and value.dtype == dtype_as(planned, like)
            return plain and fits and value.shape == like.shape
        return key in self._elementwise or numel > 1

    def shaped(self, run: Tensor, slot: int) -> Tensor:
        """Return a slot's run of elements as whole tensors are stepped: with its parameter's shape, complex
        if the parameter is."""
        return laid(run, self.trained.likes[slot]) if self.by_tensor else run

    def keep(self, bounds: tuple[int, int], numbers: State, kept: frozenset[str]) -> None:
        """Set the states of each of the slots from `bounds[0]` to `bounds[1]`.

        Args:
            numbers: states of a parameter as a whole, by key.
            kept: keys of the element-wise states.
        """
        count = bounds[1] + 1 - bounds[0]
        self._numbers[bounds[0] : bounds[1] + 1] = [numbers] * count
        self._kept[bounds[0] : bounds[1] + 1] = [kept] * count

    def numbers(self, slot: int) -> State:
        """Return copies of the state kept for a parameter as a whole ("step")."""
        return {key: copied(value) for key, value in self._numbers[slot].items()}

    def signature(self, slot: int) -> object:
        """Return a value that is equal for two slots if they can step together."""
        if self.by_tensor:
            return slot
        return signature(self._numbers[slot] | dict.fromkeys(self._kept[slot]), self._kept[slot])

    def keys(self, slot: int) -> frozenset[str]:
        """Return the keys of a slot's element-wise states."""
        return self._kept[slot]

    def kept(self, slot: int) -> dict[str, torch.dtype]:
        """Return the real dtypes of a slot's element-wise states, by key; a master is among them as
        "master"."""
        kept = {key: self._dtypes[key] for key in sorted(self._kept[slot])}
        if self.has_master and (kept or self._numbers[slot]):
            kept[MASTER] = self.dtype
        return kept

    def elements(self, slot: int, key: str) -> Tensor:
        """Return a copy of the element-wise state `key`, with the parameter's shape and strides. The whole
        slot must be here."""
        with self.pin(MASTER if key == MASTER else state_kind(key)) as elements:
            return self.trained.part(elements, slot).clone()

    def copy_held(self, slot: int, key: str, flat: Tensor) -> None:
        """Copy this member's part of the element-wise state `key` to its place in `flat`, (extent,)."""
        start, end = self.bounds(slot, slot)
        with self.pin(MASTER if key == MASTER else state_kind(key)) as elements:
            self.portion.of(flat, slot).copy_(elements[start:end])

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        """Return the bounds of these slots in this member's payloads."""
        start, end = self.portion.bounds(first, last)
        return start - self.portion.begin, end - self.portion.begin

    # Changes by the script

    def load(self, slot: int, state: State, settings: Settings | None = None) -> None:
        """Load a parameter's state from plain torch's form; {} removes it.

        Args:
            settings: the parameter's param group, if dtypes and devices are to be those that
                `load_state_dict` makes.
        """
        if not self.portion.has(slot):
            return
        self.changes += 1
        self.loads += 1
        numbers, kept = {}, set()
        for key, value in state.items():
            if key == MASTER and self.has_master:
                with self.pin(MASTER, writes=True) as precise:
                    self._take(value, slot, precise)
                continue
            exact = not self.has_master and settings is None
            if self.by_tensor and not exact and key != "step" and _has_fractions(value):
                value = value.to(self.dtype)  # as torch's own load does
            if self.is_elementwise(key, value, self.trained.chunk.slots[slot].numel, slot):
                kept.add(key)
                own = value.dtype.to_real() if exact or self.by_tensor else self.dtype
                with self.pin_state(key, own) as elements:
                    self._take(value, slot, elements)
            else:
                numbers[key] = self._number(key, value, settings)
        self.keep((slot, slot), numbers, frozenset(kept))

    def _take(self, value: Tensor, slot: int, elements: Tensor) -> None:
        """Copy this member's part of a parameter's `value`, which has the parameter's shape, into a
        payload."""
        start, end = self.bounds(slot, slot)
        begin = self.portion.begin
        if self.portion.is_whole(slot) and not begin:
            self.trained.part(elements, slot).copy_(value)
            return
        place, like = self.trained.chunk.slots[slot], self.trained.likes[slot]
        run = torch.empty(place.numel, dtype=elements.dtype)  # in the order of memory
        laid(run, like).copy_(value)
        first = begin + start - place.offset
        elements[start:end].copy_(run[first : first + end - start])

    def _number(self, key: str, value: Any, settings: Settings | None) -> Any:
        if not isinstance(value, Tensor):
            return copied(value)
        if settings is None or not value.is_floating_point():
            return clone(value) if is_wrapped(value) else value.detach().clone()
        dtype = value.dtype if key == "step" else self.dtype
        if is_wrapped(value):
            value = value if value.dtype == dtype else value.to(dtype)  # as torch's own load does
            return clone(moved_to(value, torch.device("cpu")))
        return value.detach().to("cpu", dtype, copy=True)

    def follow_values(self) -> None:
        """Update the master where values were changed: where a value is not its master rounded."""
        self.changes += 1
        if self.has_master:
            with self.pin(VALUES) as values, self.pin(MASTER, writes=True) as precise, torch.no_grad():
                kept = precise.to(values.dtype) == values
                torch.where(kept, precise, values.to(precise.dtype), out=precise)


def _has_fractions(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def chunk_states(
    optimizer: torch.optim.Optimizer,
    chunks: Sequence[TrainedChunk],
    payloads: Payloads,
    *,
    master: bool = False,
    parts: Mapping[int, tuple[int, int]] | None = None,
    planned: Callable[[torch.dtype], Mapping[str, torch.dtype]] = lambda _: {},
) -> dict[int, ChunkStates]:
    """Return the states, by chunk, of those of `chunks` that `optimizer` trains.

    Args:
        payloads: hold the chunks' values and states.
        master: True gives chunks in half precision a payload "master" in single precision. The master is
            stepped, and the values are rounded from it.
        parts: for some chunks, the (begin, end) of the elements that are held here.
        planned: returns the states that the plan has room for, with their dtypes, by the stepped dtype.

    """
    unit = unit_of(optimizer)
    groups = group_numbers(optimizer)
    dtypes = {stepped_dtype(each.dtype, master) for each in chunks} if unit.by_tensor else ()
    known = {dtype: planned(dtype) for dtype in dtypes}
    return {
        each.chunk.id: ChunkStates(
            each,
            payloads,
            unit,
            groups[id(each.parameters[0])],
            stepped_dtype(each.dtype, master),
            (parts or {}).get(each.chunk.id),
            known.get(stepped_dtype(each.dtype, master), {}),
        )
        for each in chunks
        if id(each.parameters[0]) in groups
    }


def group_numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the number of each parameter's param group, by the parameter's id."""
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}


def stepped_dtype(dtype: torch.dtype, master: bool) -> torch.dtype:
    """Return the dtype in which a parameter is stepped: float32 for a half one that has a master."""
    return torch.float32 if master and dtype in _HALF else dtype
