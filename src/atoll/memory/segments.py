"""The step of one chunk whose values and state lie in payloads.

A chunk is stepped in flat segments: runs of slots whose update has the same dependencies.
`tensors/optimizer.py` steps chunks that never leave the device in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from atoll.memory.payloads import MASTER, VALUES, Key, spare_kind, state_kind
from atoll.memory.states import ChunkStates, Kept
from atoll.memory.stepqueue import Settings
from atoll.tensors.chunkstate import State, runs_alike
from atoll.tensors.elementwise import begin_training
from atoll.tensors.torch_compat import bare_step, drop_step_hooks
from atoll.tensors.wrapped import clone

_HOST = torch.device("cpu")
# The optimizer's own code: takes settings, parameters and their states, and returns the new states.
RunSegment: TypeAlias = Callable[
    [Settings, list[nn.Parameter], dict[nn.Parameter, State]], Mapping[nn.Parameter, State]
]
# Lends the payload of an element-wise state, by its key and dtype, to be changed.
_Place: TypeAlias = Callable[[str, torch.dtype], AbstractContextManager[Tensor]]


@dataclass(frozen=True)
class Made:
    """The result of a step that was made aside, and does not count yet.

    Attributes:
        kinds: the kinds of payload whose spare has the result.
        segments: what is to be kept of each segment.
    """

    kinds: tuple[str, ...]
    segments: list[Kept]


class Segments:
    """The segments of a chunk, and their steps.

    Args:
        states: the chunk's states.
    """

    def __init__(self, states: ChunkStates) -> None:
        self.states = states
        self._runs: list[tuple[int, int]] = []  # first and last slot of each segment
        self._cut_for: tuple[object, ...] | None = None  # the `_key` that they were cut for

    def step(self, settings: Settings, gradients: Tensor, present: tuple[bool, ...], run: RunSegment) -> None:
        """Step the slots that are `present` with `gradients`, (extent,)."""
        states = self.states
        states.changes += 1
        with ExitStack() as stack, torch.no_grad():
            values = stack.enter_context(states.pin(VALUES, writes=True))
            stepped = values
            if states.has_master:
                stepped = stack.enter_context(states.pin(MASTER, writes=True))
            if not self.is_cut_for(present, settings):
                self._cut(present, settings)
            elements = {key: stack.enter_context(states.pin_state(key)) for key in self._used()}
            for made in self._run(settings, stepped, gradients, elements, run, states.pin_state):
                states.keep(*made)
            self._round(values, stepped)

    def step_aside(self, settings: Settings, gradients: Tensor, run: RunSegment) -> Made:
        """Make a step in spare payloads, which begin as copies, and change nothing else. It counts from
        `take_made` on.

        The chunk must have been stepped before, and `is_cut_for` this step.
        """
        states, keys = self.states, self._used()
        kinds = [VALUES, *([MASTER] if states.has_master else []), *map(state_kind, keys)]
        with ExitStack() as stack, torch.no_grad():
            spare = {kind: stack.enter_context(states.pin_spare(kind)) for kind in kinds}
            for kind in kinds:
                with states.pin(kind) as present:
                    spare[kind].copy_(present)
            values = spare[VALUES]
            stepped = spare[MASTER] if states.has_master else values
            elements = {key: spare[state_kind(key)] for key in keys}
            # A new kind of state has no spare. The KeyError makes the caller step as usual.
            where: _Place = lambda key, _: nullcontext(elements[key])  # noqa: E731
            segments = self._run(settings, stepped, gradients, elements, run, where)
            self._round(values, stepped)
        return Made(tuple(kinds), segments)

    def take_made(self, made: Made, swap: Callable[[Key, Key], None]) -> None:
        """Let a step that was made aside count. Its spares become the payloads, and the old payloads the
        spares.

        Args:
            swap: exchanges two payloads.
        """
        self.states.changes += 1
        chunk = self.states.trained.chunk.id
        for kind in made.kinds:
            swap((chunk, kind), (chunk, spare_kind(kind)))
        for segment in made.segments:
            self.states.keep(*segment)

    def is_cut_for(self, present: tuple[bool, ...], settings: Settings) -> bool:
        """True if the latest step was of these slots, and no state was loaded since."""
        return bool(self._runs) and self._cut_for == self._key(present, settings)

    def _key(self, present: tuple[bool, ...], settings: Settings) -> tuple[object, ...]:
        return present, bool(settings.get("fused")), self.states.loads

    def _cut(self, present: tuple[bool, ...], settings: Settings) -> None:
        """Find the runs of slots that step alike, and give each run states of its own."""
        states = self.states
        signatures = [
            states.signature(slot) if here and states.portion.has(slot) else None
            for slot, here in enumerate(present)
        ]
        fused = bool(settings.get("fused"))
        self._runs = runs_alike(states.trained.chunk, signatures, states.dtype, _HOST, fused)
        self._cut_for = self._key(present, settings)
        for first, last in self._runs:
            states.keep((first, last), states.numbers(first), states.keys(first))

    def _used(self) -> frozenset[str]:
        """Return the keys of the segments' element-wise states."""
        return frozenset[str]().union(*(self.states.keys(first) for first, _ in self._runs))

    def _run(
        self,
        settings: Settings,
        stepped: Tensor,
        gradients: Tensor,
        elements: Mapping[str, Tensor],
        run: RunSegment,
        place: _Place,
    ) -> list[Kept]:
        """Step the segments, which lie in `stepped` and `elements`; return what is to be kept of each."""
        parameters = [self._segment(stepped, gradients, first, last) for first, last in self._runs]
        state = {
            parameter: kept
            for parameter, bounds in zip(parameters, self._runs, strict=True)
            if (kept := self._state(bounds, elements))
        }
        new = run(_settings_here(settings), parameters, {p: {**kept} for p, kept in state.items()})
        made = []
        for parameter, bounds in zip(parameters, self._runs, strict=True):
            parameter.grad = None
            made.append(self._found(bounds, state.get(parameter, {}), new.get(parameter, {}), place))
        return made

    def _segment(self, stepped: Tensor, gradients: Tensor, first: int, last: int) -> nn.Parameter:
        (start, end), begin = self.states.bounds(first, last), self.states.portion.begin
        shaped = self.states.shaped
        parameter = nn.Parameter(shaped(stepped[start:end], first))
        parameter.grad = shaped(gradients[begin + start : begin + end], first).to(parameter.dtype)
        return parameter

    def _state(self, bounds: tuple[int, int], elements: Mapping[str, Tensor]) -> State:
        """Return the optimizer's state for a segment."""
        start, end = self.states.bounds(*bounds)
        shaped, first = self.states.shaped, bounds[0]
        held = {key: shaped(elements[key][start:end], first) for key in self.states.keys(first)}
        return self.states.numbers(bounds[0]) | held

    def _found(self, bounds: tuple[int, int], before: State, after: State, place: _Place) -> Kept:
        """Return a segment's state after a step: its bounds, its numbers, and the keys of its element-wise
        states.

        An element-wise state that the optimizer replaced is copied into the payload that `place` lends.

        Args:
            bounds: first and last slot of the segment.
        """
        start, end = self.states.bounds(*bounds)
        numbers, kept, replaced = {}, set(), {}
        for key, value in after.items():
            if self.states.is_elementwise(key, value, end - start, bounds[0]):
                kept.add(key)
                if value is not before.get(key):  # cloned, as two states may have changed places
                    replaced[key] = value.clone() if before else value
            else:
                numbers[key] = value
        for key, value in replaced.items():
            with place(key, value.dtype.to_real()) as elements:
                self.states.shaped(elements[start:end], bounds[0]).copy_(value)
        return bounds, numbers, frozenset(kept)

    def _round(self, values: Tensor, stepped: Tensor) -> None:
        """Round the masters, if there are any, into the values."""
        if self.states.has_master:
            for first, last in self._runs:
                start, end = self.states.bounds(first, last)
                values[start:end].copy_(stepped[start:end])


def here(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with tensors on the CPU, where chunks are stepped.

    A fused step would copy a GradScaler's `found_inf` from the script's device without waiting for the copy.
    """
    return {k: v.to(_HOST) if isinstance(v, Tensor) else v for k, v in values.items()}


def _settings_here(settings: Settings) -> Settings:
    settings = here(settings)
    if settings.get("capturable"):  # only for graphs on an accelerator
        settings["capturable"] = False
    return settings


def run_step(
    class_: type[torch.optim.Optimizer],
    own: Mapping[str, Any],
    settings: Settings,
    parameters: list[nn.Parameter],
    state: dict[nn.Parameter, State],
    *,
    is_trial: bool = False,
) -> Mapping[nn.Parameter, State]:
    """Run an optimizer's own code on `parameters`; return the states that it then keeps for them.

    Args:
        class_: the optimizer's class.
        own: the optimizer's attributes.
        settings: the param group, without its parameters.
        state: the parameters' states.
        is_trial: True for a step before the script has said that it trains.
    """
    copy = object.__new__(class_)
    copy.__dict__.update(noted(own))
    drop_step_hooks(copy)
    copy.param_groups = [{**noted(settings), "params": parameters}]
    states: defaultdict[Any, State] = defaultdict(dict, state)
    copy.state = states
    if is_trial:
        begin_training(copy)
    bare_step(class_)(copy)  # global optimizer hooks have run for the script's own call
    return states


def noted(values: Mapping[str, Any], without: str = "") -> Settings:
    """Return a copy of `values`, with tensors cloned, in which later changes do not show. `without` names a
    key to leave out."""
    return {
        key: clone(value) if isinstance(value, Tensor) else value
        for key, value in values.items()
        if key != without
    }
