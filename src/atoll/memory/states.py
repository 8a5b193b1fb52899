"""One chunk's values and optimizer state in payloads.

What the optimizer keeps for each element of a parameter ("exp_avg") is a payload of the chunk; what it keeps
for each parameter ("step") stays here. `segments.Segments` steps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from atoll.memory.gradients import TrainedChunk
from atoll.memory.payloads import MASTER, VALUES, Payloads, spare_kind, state_kind
from atoll.memory.portions import Portion
from atoll.memory.stepqueue import Settings
from atoll.tensors.optimizer import State, copied, elementwise_keys, signature

Kept: TypeAlias = tuple[tuple[int, int], State, frozenset[str]]  # of the first to the last of some slots
_HALF = (torch.bfloat16, torch.float16)


class ChunkStates:
    """A chunk that an optimizer trains with its param group `group`.

    `elementwise` is what `elementwise_keys` found, `dtype` what the chunk is stepped in, on the CPU: where
    that is not the values' own dtype, there is a master. With `part`, only elements `begin` to
    `end` of the chunk are held here, and `payloads` are of those; gradients are of the whole chunk.
    """

    def __init__(
        self,
        trained: TrainedChunk,
        payloads: Payloads,
        elementwise: set[str],
        group: int,
        dtype: torch.dtype,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.trained, self.group, self.dtype = trained, group, dtype
        self.portion = Portion(trained, part)
        self._payloads, self._elementwise = payloads, elementwise
        self.has_master = dtype != trained.dtype
        slots = len(trained.parameters)
        self._numbers: list[State] = [{} for _ in range(slots)]  # by slot: what is not element-wise
        self._kept: list[frozenset[str]] = [frozenset()] * slots  # by slot: what is
        self._dtypes: dict[str, torch.dtype] = {}  # by key, of the payloads that were added
        self._spares: set[str] = set()  # kinds of payload of which there is one
        self.changes = 0  # of values and state, by whomever
        self.loads = 0  # of states
        if self.has_master:
            payloads.add((trained.chunk.id, MASTER), trained.chunk.numel, dtype)

    def take_over(self) -> None:
        """The values are here."""
        if self.has_master:
            with self.pin(VALUES) as values, self.pin(MASTER, overwrites=True) as precise:
                precise.copy_(values)

    # Payloads

    def pin(
        self, kind: str, *, writes: bool = False, overwrites: bool = False
    ) -> AbstractContextManager[Tensor]:
        """The payload of this kind."""
        return self._payloads.pin((self.trained.chunk.id, kind), writes=writes, overwrites=overwrites)

    def pin_state(self, key: str, dtype: torch.dtype | None = None) -> AbstractContextManager[Tensor]:
        """The payload of the element-wise state `key`, to be changed; made, of `dtype`, if there is none."""
        if key not in self._dtypes and dtype is not None:
            self._dtypes[key] = dtype
            self._payloads.add((self.trained.chunk.id, state_kind(key)), self.trained.chunk.numel, dtype)
        return self.pin(state_kind(key), writes=True)

    def pin_spare(self, kind: str) -> AbstractContextManager[Tensor]:
        """A payload like the one of this kind, with anything in it; made, if there is none."""
        spare = spare_kind(kind)
        if kind not in self._spares:
            self._spares.add(kind)
            stepped = {VALUES: self.trained.dtype, MASTER: self.dtype}
            states = {state_kind(key): dtype for key, dtype in self._dtypes.items()}
            key = self.trained.chunk.id, spare
            self._payloads.add(key, self.trained.chunk.numel, (stepped | states)[kind])
        return self.pin(spare, overwrites=True)

    # What is kept

    @property
    def has_elements(self) -> bool:
        """True if the optimizer keeps any state for each element."""
        return any(self._kept)

    def is_elementwise(self, key: str, value: Any, numel: int) -> bool:
        """True if a state holds one value for each of `numel` elements."""
        return isinstance(value, Tensor) and (
            (key in self._elementwise and value.numel() == numel) or (value.numel() == numel > 1)
        )

    def keep(self, bounds: tuple[int, int], numbers: State, kept: frozenset[str]) -> None:
        """Let this be what is kept for each of the slots from `bounds[0]` to `bounds[1]`: the values that
        these have as a whole, and the keys of what they have for each element."""
        count = bounds[1] + 1 - bounds[0]
        self._numbers[bounds[0] : bounds[1] + 1] = [numbers] * count
        self._kept[bounds[0] : bounds[1] + 1] = [kept] * count

    def numbers(self, slot: int) -> State:
        """Return copies of the state kept for a parameter as a whole ("step")."""
        return {key: copied(value) for key, value in self._numbers[slot].items()}

    def signature(self, slot: int) -> object:
        """Return a value that is equal for two slots if they can step together."""
        return signature(self._numbers[slot] | dict.fromkeys(self._kept[slot]), self._kept[slot])

    def keys(self, slot: int) -> frozenset[str]:
        """The keys of what the optimizer keeps for each of a parameter's elements."""
        return self._kept[slot]

    def kept(self, slot: int) -> dict[str, torch.dtype]:
        """Return the dtypes of the element-wise states, by key; with a master, that too, as "master"."""
        kept = {key: self._dtypes[key] for key in sorted(self._kept[slot])}
        if self.has_master and (kept or self._numbers[slot]):
            kept[MASTER] = self.dtype
        return kept

    def elements(self, slot: int, key: str) -> Tensor:
        """A copy of what is kept under `key`, with the parameter's shape and strides; all of it is here."""
        with self.pin(MASTER if key == MASTER else state_kind(key)) as elements:
            return self.trained.part(elements, slot).clone()

    def copy_held(self, slot: int, key: str, flat: Tensor) -> None:
        """Copy what is held here of it to its place in `flat`, (extent,)."""
        start, end = self.bounds(slot, slot)
        with self.pin(MASTER if key == MASTER else state_kind(key)) as elements:
            self.portion.of(flat, slot).copy_(elements[start:end])

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        """Return the bounds of these slots in this member's payloads."""
        start, end = self.portion.bounds(first, last)
        return start - self.portion.begin, end - self.portion.begin

    # Changes by the script

    def load(self, slot: int, state: State, settings: Settings | None = None) -> None:
        """Take a parameter's state from plain torch's form; with {}, it has none.

        `settings`, its param group's, where dtypes and devices are to be as `load_state_dict` makes them.
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
            elif self.is_elementwise(key, value, self.trained.chunk.slots[slot].numel):
                kept.add(key)
                exact = not self.has_master and settings is None
                with self.pin_state(key, value.dtype if exact else self.dtype) as elements:
                    self._take(value, slot, elements)
            else:
                numbers[key] = self._number(key, value, settings)
        self.keep((slot, slot), numbers, frozenset(kept))

    def _take(self, value: Tensor, slot: int, elements: Tensor) -> None:
        """Copy what is held here of a parameter's `value`, which has its shape, into a payload."""
        start, end = self.bounds(slot, slot)
        begin = self.portion.begin
        if self.portion.is_whole(slot) and not begin:
            self.trained.part(elements, slot).copy_(value)
            return
        place, like = self.trained.chunk.slots[slot], self.trained.likes[slot]
        run = torch.empty(place.numel, dtype=elements.dtype)  # in the order of memory
        run.as_strided(like.shape, like.stride()).copy_(value)
        first = begin + start - place.offset
        elements[start:end].copy_(run[first : first + end - start])

    def _number(self, key: str, value: Any, settings: Settings | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if settings is None or not value.is_floating_point():
            return value.detach().clone()
        return value.detach().to("cpu", value.dtype if key == "step" else self.dtype, copy=True)

    def follow_values(self) -> None:
        """Somebody has changed the values. Where they are not what they were rounded to, they are the master
        now."""
        self.changes += 1
        if self.has_master:
            with self.pin(VALUES) as values, self.pin(MASTER, writes=True) as precise, torch.no_grad():
                kept = precise.to(values.dtype) == values
                torch.where(kept, precise, values.to(precise.dtype), out=precise)


def chunk_states(
    optimizer: torch.optim.Optimizer,
    chunks: Sequence[TrainedChunk],
    payloads: Payloads,
    *,
    master: bool = False,
    parts: Mapping[int, tuple[int, int]] | None = None,
) -> dict[int, ChunkStates]:
    """The states, by chunk, of those of `chunks` that `optimizer` trains.

    `payloads` say where a chunk's values and state lie. With `master`, chunks in half precision have a
    payload "master" in single precision, which is what is stepped, and the values are rounded from it. Of a
    chunk in `parts` such a part alone is here. Raises PrepareError for an optimizer that is not element-wise.
    """
    elementwise = elementwise_keys(optimizer)
    groups = group_numbers(optimizer)
    return {
        each.chunk.id: ChunkStates(
            each,
            payloads,
            elementwise,
            groups[id(each.parameters[0])],
            stepped_dtype(each.dtype, master),
            (parts or {}).get(each.chunk.id),
        )
        for each in chunks
        if id(each.parameters[0]) in groups
    }


def group_numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """By the id of each parameter, its param group's number."""
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}


def stepped_dtype(dtype: torch.dtype, master: bool) -> torch.dtype:
    """Return the dtype in which a parameter is stepped: float32 for a half one that has a master."""
    return torch.float32 if master and dtype in _HALF else dtype
