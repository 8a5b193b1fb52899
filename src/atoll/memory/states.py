"""One chunk's optimizer state in payloads, and its step.

What the optimizer keeps for each element of a parameter ("exp_avg") is a payload of the chunk; what it keeps
for each parameter ("step") stays here. A chunk is stepped in flat segments, runs of slots whose update
depends on the same things; tensors/optimizer.py does the same with chunks that never leave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from atoll.memory.gradients import TrainedChunk
from atoll.memory.payloads import MASTER, VALUES, Key, Payloads, spare_kind, state_kind
from atoll.tensors.optimizer import State, comparable, copied, runs_alike
from atoll.tensors.torch_compat import bare_step, drop_step_hooks

Settings: TypeAlias = dict[str, Any]  # a param group without its parameters
# The optimizer's own code: takes settings, parameters and their state, and gives their state.
Run: TypeAlias = Callable[
    [Settings, list[nn.Parameter], dict[nn.Parameter, State]], Mapping[nn.Parameter, State]
]
# The payload of an element-wise state, to be changed, by its key and dtype.
_Place: TypeAlias = Callable[[str, torch.dtype], AbstractContextManager[Tensor]]


@dataclass(frozen=True)
class Made:
    """A step that was made beside what counts: the kinds of payload that have a spare with what comes of it,
    and for each segment what is kept then."""

    kinds: tuple[str, ...]
    segments: list[tuple[tuple[int, int], State, frozenset[str]]]


class ChunkStates:
    """A chunk that an optimizer trains with its param group `group`.

    `elementwise` is what `elementwise_keys` found, `device` and `dtype` where and what it is stepped
    in: where that is not the values' own dtype, there is a master. With `part`, only elements `begin` to
    `end` of the chunk are held here, and `payloads` are of those; gradients are of the whole chunk.
    """

    def __init__(
        self,
        trained: TrainedChunk,
        payloads: Payloads,
        elementwise: set[str],
        group: int,
        device: torch.device,
        dtype: torch.dtype,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.begin, self.end = (0, trained.extent) if part is None else part
        self.trained, self.group, self._device = trained, group, device
        self._payloads, self._elementwise, self.dtype = payloads, elementwise, dtype
        self._master = dtype if dtype != trained.dtype else None
        slots = len(trained.parameters)
        self._numbers: list[State] = [{} for _ in range(slots)]  # by slot: what is not element-wise
        self._kept: list[frozenset[str]] = [frozenset()] * slots  # by slot: what is
        self._dtypes: dict[str, torch.dtype] = {}  # by key, of the payloads that were added
        self._runs: list[tuple[int, int]] = []  # first and last slot of each segment
        self._cut_for: tuple[object, ...] | None = None  # what they were cut for
        self._spares: set[str] = set()  # kinds of payload of which there is one
        self.changes = 0  # of values and state, by whomever
        if self._master is not None:
            payloads.add((trained.chunk.id, MASTER), trained.chunk.numel, dtype)
            with self._pin(VALUES) as values, self._pin(MASTER, overwrites=True) as precise:
                precise.copy_(values)

    def _pin(
        self, kind: str, *, writes: bool = False, overwrites: bool = False
    ) -> AbstractContextManager[Tensor]:
        return self._payloads.pin((self.trained.chunk.id, kind), writes=writes, overwrites=overwrites)

    def step(
        self,
        settings: Settings,
        gradients: Tensor,
        present: tuple[bool, ...],
        run: Run,
    ) -> None:
        """Step the slots that are `present` with `gradients`, (extent,)."""
        self.changes += 1
        with ExitStack() as stack, torch.no_grad():
            values = stack.enter_context(self._pin(VALUES, writes=True))
            stepped = values
            if self._master is not None:
                stepped = stack.enter_context(self._pin(MASTER, writes=True))
            if not self.is_cut_for(present, settings):
                self._cut(present, bool(settings.get("fused")))
            elements = {
                key: stack.enter_context(self._pin(state_kind(key), writes=True)) for key in self._used()
            }
            for made in self._run(settings, stepped, gradients, elements, run, self._elements):
                self._keep(*made)
            self._round(values, stepped)

    def step_aside(self, settings: Settings, gradients: Tensor, run: Run) -> Made:
        """Make the same step beside what is there, of which nothing is changed: in spare payloads, which
        begin as copies. For who was stepped before, and `is_cut_for` the step. It counts from `take_made` on.
        """
        keys = self._used()
        kinds = [VALUES, *([MASTER] if self._master is not None else []), *map(state_kind, keys)]
        with ExitStack() as stack, torch.no_grad():
            spare = {kind: stack.enter_context(self._spare(kind)) for kind in kinds}
            for kind in kinds:
                with self._pin(kind) as present:
                    spare[kind].copy_(present)
            values = spare[VALUES]
            stepped = spare[MASTER] if self._master is not None else values
            elements = {key: spare[state_kind(key)] for key in keys}
            # A kind of state that is new has no spare: that is an error, and the step is made as usual.
            where: _Place = lambda key, _: nullcontext(elements[key])  # noqa: E731
            segments = self._run(settings, stepped, gradients, elements, run, where)
            self._round(values, stepped)
        return Made(tuple(kinds), segments)

    def take_made(self, made: Made, swap: Callable[[Key, Key], None]) -> None:
        """What was made beside counts now; what counted is the spare. `swap` exchanges two payloads."""
        self.changes += 1
        for kind in made.kinds:
            swap((self.trained.chunk.id, kind), (self.trained.chunk.id, spare_kind(kind)))
        for segment in made.segments:
            self._keep(*segment)

    def _spare(self, kind: str) -> AbstractContextManager[Tensor]:
        """A payload like the one of this kind, with anything in it; made, if there is none."""
        spare = spare_kind(kind)
        if kind not in self._spares:
            self._spares.add(kind)
            stepped = {VALUES: self.trained.dtype, MASTER: self.dtype}
            states = {state_kind(key): dtype for key, dtype in self._dtypes.items()}
            key = self.trained.chunk.id, spare
            self._payloads.add(key, self.trained.chunk.numel, (stepped | states)[kind])
        return self._pin(spare, overwrites=True)

    def is_cut_for(self, present: tuple[bool, ...], settings: Settings) -> bool:
        """Whether the latest step was of the same slots, and nothing was loaded since."""
        return bool(self._runs) and self._cut_for == (present, bool(settings.get("fused")))

    def _used(self) -> frozenset[str]:
        """The keys of what the segments keep for each element."""
        return frozenset[str]().union(*(self._kept[first] for first, _ in self._runs))

    def _run(
        self,
        settings: Settings,
        stepped: Tensor,
        gradients: Tensor,
        elements: Mapping[str, Tensor],
        run: Run,
        place: _Place,
    ) -> list[tuple[tuple[int, int], State, frozenset[str]]]:
        """Step the segments, which lie in `stepped` and `elements`; what is then to be kept of each."""
        parameters = [self._segment(stepped, gradients, first, last) for first, last in self._runs]
        state = self._segment_states(parameters, elements)
        new = run(self._settings(settings), parameters, {p: {**kept} for p, kept in state.items()})
        made = []
        for parameter, bounds in zip(parameters, self._runs, strict=True):
            parameter.grad = None
            made.append(self._found(bounds, state.get(parameter, {}), new.get(parameter, {}), place))
        return made

    def _round(self, values: Tensor, stepped: Tensor) -> None:
        """Where there is a master, the values are what it is rounded to."""
        if self._master is not None:
            for first, last in self._runs:
                start, end = self._bounds(first, last)
                values[start:end].copy_(stepped[start:end])

    @property
    def has_elements(self) -> bool:
        """Whether anything is kept for each element."""
        return any(self._kept)

    def there(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """These, with tensors where the chunk is stepped: a fused step copies a GradScaler's `found_inf` from
        the script's device without waiting for the copy."""
        return {k: v.to(self._device) if isinstance(v, Tensor) else v for k, v in values.items()}

    def _settings(self, settings: Settings) -> Settings:
        """Settings as they are where the chunk is stepped."""
        there = self.there(settings)
        if self._device.type == "cpu" and there.get("capturable"):  # of graphs on the script's device
            there["capturable"] = False
        return there

    def has(self, slot: int) -> bool:
        """Whether any of a slot is held here; of one without elements, its place."""
        if not self.trained.extent:  # parameters without elements alone: whoever steps them has them
            return True
        begin, end = self.trained.place(slot)
        return begin < self.end and end > self.begin

    def _bounds(self, first: int, last: int) -> tuple[int, int]:
        """Where these slots lie in the payloads that are here."""
        slots = self.trained.chunk.slots
        start, end = slots[first].offset, slots[last].offset + slots[last].numel
        return max(start, self.begin) - self.begin, min(end, self.end) - self.begin

    def _segment(self, stepped: Tensor, gradients: Tensor, first: int, last: int) -> nn.Parameter:
        start, end = self._bounds(first, last)
        parameter = nn.Parameter(stepped[start:end])
        parameter.grad = gradients[self.begin + start : self.begin + end].to(self.dtype)
        return parameter

    def _segment_states(
        self, parameters: Sequence[nn.Parameter], elements: Mapping[str, Tensor]
    ) -> dict[nn.Parameter, State]:
        """What the optimizer keeps for each segment, where it keeps anything."""
        states: dict[nn.Parameter, State] = {}
        for parameter, (first, last) in zip(parameters, self._runs, strict=True):
            start, end = self._bounds(first, last)
            state = {key: copied(value) for key, value in self._numbers[first].items()}
            state.update({key: elements[key][start:end] for key in self._kept[first]})
            if state:
                states[parameter] = state
        return states

    def _cut(self, present: tuple[bool, ...], fused: bool) -> None:
        """Find the runs of slots that step alike, and let each have numbers of its own."""
        signatures = [
            (self._kept[slot], [(k, comparable(v, False)) for k, v in sorted(self._numbers[slot].items())])
            if here and self.has(slot)
            else None
            for slot, here in enumerate(present)
        ]
        self._runs = runs_alike(self.trained.chunk, signatures, self.dtype, self._device, fused)
        self._cut_for = present, fused
        for first, end in self._runs:
            numbers = {key: copied(value) for key, value in self._numbers[first].items()}
            self._numbers[first : end + 1] = [numbers] * (end + 1 - first)

    def _found(
        self, bounds: tuple[int, int], before: State, after: State, place: _Place
    ) -> tuple[tuple[int, int], State, frozenset[str]]:
        """What the optimizer now has for the segment from slot `bounds[0]` to `bounds[1]`: numbers, and the
        keys of what it has for each element, which is put where `place` says."""
        start, end = self._bounds(*bounds)
        numbers, kept, replaced = {}, set(), {}
        for key, value in after.items():
            if self._is_elementwise(key, value, end - start):
                kept.add(key)
                if value is not before.get(key):  # a copy, where two may have changed places
                    replaced[key] = value.clone() if before else value
            else:
                numbers[key] = value
        for key, value in replaced.items():
            with place(key, value.dtype) as elements:
                elements[start:end].copy_(value)
        return bounds, numbers, frozenset(kept)

    def _keep(self, bounds: tuple[int, int], numbers: State, kept: frozenset[str]) -> None:
        count = bounds[1] + 1 - bounds[0]
        self._numbers[bounds[0] : bounds[1] + 1] = [numbers] * count
        self._kept[bounds[0] : bounds[1] + 1] = [kept] * count

    def _is_elementwise(self, key: str, value: Any, numel: int) -> bool:
        return isinstance(value, Tensor) and (
            (key in self._elementwise and value.numel() == numel) or (value.numel() == numel > 1)
        )

    def _elements(self, key: str, dtype: torch.dtype) -> AbstractContextManager[Tensor]:
        """The payload of the element-wise state `key`, to be changed; made, of `dtype`, if there is none."""
        if key not in self._dtypes:
            self._dtypes[key] = dtype
            self._payloads.add((self.trained.chunk.id, state_kind(key)), self.trained.chunk.numel, dtype)
        return self._pin(state_kind(key), writes=True)

    def numbers(self, slot: int) -> State:
        """What is kept for a parameter as a whole ("step"), in copies."""
        return {key: copied(value) for key, value in self._numbers[slot].items()}

    def kept(self, slot: int) -> dict[str, torch.dtype]:
        """What is kept for each of its elements, by key; with a master, that too, as "master"."""
        kept = {key: self._dtypes[key] for key in sorted(self._kept[slot])}
        if self._master is not None and (kept or self._numbers[slot]):
            kept[MASTER] = self._master
        return kept

    def elements(self, slot: int, key: str) -> Tensor:
        """A copy of what is kept under `key`, with the parameter's shape and strides; all of it is here."""
        with self._pin(MASTER if key == MASTER else state_kind(key)) as elements:
            return self.trained.part(elements, slot).clone()

    def copy_held(self, slot: int, key: str, flat: Tensor) -> None:
        """Copy what is held here of it to its place in `flat`, (extent,)."""
        start, end = self._bounds(slot, slot)
        with self._pin(MASTER if key == MASTER else state_kind(key)) as elements:
            flat[self.begin + start : self.begin + end].copy_(elements[start:end])

    def load(self, slot: int, state: State, settings: Settings | None = None) -> None:
        """Take a parameter's state from plain torch's form; with {}, it has none.

        `settings`, its param group's, where dtypes and devices are to be as `load_state_dict` makes them.
        """
        if not self.has(slot):
            return
        self.changes += 1
        numbers, kept = {}, set()
        for key, value in state.items():
            if key == MASTER and self._master is not None:
                with self._pin(MASTER, writes=True) as precise:
                    self._take(value, slot, precise)
            elif self._is_elementwise(key, value, self.trained.chunk.slots[slot].numel):
                kept.add(key)
                self._load_elements(key, value, slot, settings is not None)
            else:
                numbers[key] = self._number(key, value, settings)
        self._numbers[slot], self._kept[slot] = numbers, frozenset(kept)
        self._cut_for = None

    def _load_elements(self, key: str, value: Tensor, slot: int, cast: bool) -> None:
        exact = self._master is None and not cast
        with self._elements(key, value.dtype if exact else self.dtype) as elements:
            self._take(value, slot, elements)

    def _take(self, value: Tensor, slot: int, elements: Tensor) -> None:
        """Copy what is held here of a parameter's `value`, which has its shape, into a payload."""
        start, end = self._bounds(slot, slot)
        if end - start == self.trained.chunk.slots[slot].numel and not self.begin:
            self.trained.part(elements, slot).copy_(value)
            return
        place, like = self.trained.chunk.slots[slot], self.trained.likes[slot]
        run = torch.empty(place.numel, dtype=elements.dtype)  # in the order of memory
        run.as_strided(like.shape, like.stride()).copy_(value)
        first = self.begin + start - place.offset
        elements[start:end].copy_(run[first : first + end - start])

    def _number(self, key: str, value: Any, settings: Settings | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if settings is None or not value.is_floating_point():
            return value.detach().clone()
        if key != "step":
            return value.detach().to(self._device, self.dtype, copy=True)
        counts_there = settings.get("fused") or settings.get("capturable")
        return value.detach().to(self._device if counts_there else "cpu", copy=True)

    def follow_values(self) -> None:
        """Somebody has changed the values. Where they are not what they were rounded to, they are the master
        now."""
        self.changes += 1
        if self._master is None:
            return
        with self._pin(VALUES) as values, self._pin(MASTER, writes=True) as precise, torch.no_grad():
            torch.where(precise.to(values.dtype) == values, precise, values.to(precise.dtype), out=precise)


def run_step(
    class_: type[torch.optim.Optimizer],
    own: Mapping[str, Any],
    settings: Settings,
    parameters: list[nn.Parameter],
    state: dict[nn.Parameter, State],
) -> Mapping[nn.Parameter, State]:
    """An optimizer's own code on `parameters`; gives what it then keeps for them.

    `own` are the attributes of the optimizer whose step it is.
    """
    copy = object.__new__(class_)
    copy.__dict__.update(noted(own))
    drop_step_hooks(copy)
    copy.param_groups = [{**noted(settings), "params": parameters}]
    states: defaultdict[Any, State] = defaultdict(dict, state)
    copy.state = states
    bare_step(class_)(copy)  # hooks on all optimizers have run for the script's own call
    return states


def noted(values: Mapping[str, Any], without: str = "") -> Settings:
    """A copy that no later change of `values` shows in."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in values.items()
        if key != without
    }
