"""The user's optimizer, stepping chunk by chunk or by its parameters.

The optimizer object stays the user's own. Just before its `step` runs, its parameters are exchanged for
**segments** (`tensors/chunkstate.py`). Just after, they are exchanged back. The optimizer's own code thus
computes the update, by its usual implementation (fused, foreach or loop), on few large tensors in place of
many small ones. Every element-wise optimizer works.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.tensors.binding import BoundChunk
from atoll.tensors.chunkstate import ChunkState, SavedState, Segment, State
from atoll.tensors.lazy import read_whole
from atoll.tensors.stephooks import AroundStep, Handle
from atoll.tensors.tensorfile import storage_key
from atoll.tensors.wrapped import clone, is_wrapped

CHANGE_BEFORE = "add and remove parameters and groups before it"
LOAD, CHANGE = "optimizer.load_state_dict", "a change of optimizer.state"  # calls that load a state
PREPARE_AGAIN = "call session.prepare again after the change, on every worker"


@dataclass(frozen=True)
class StepHooks:
    """Functions around each optimizer step.

    `before()` runs first, `accept(gradients)` returns False to leave the step out, and `after()` runs last.
    `mean(loss)` returns the workers' mean of a closure's result, after `before()`. `way_out` says what to do
    about param groups that the script has changed. `evaluates(again)` runs before the optimizer calls a
    closure; `again`: not for the first time in this step. `has_batch()` returns True if a backward has left
    gradients that no step has used.

    Where steps are made elsewhere, `begin_load(give, call)` runs before the script's own `load_state_dict`
    (`call` is LOAD), and before its change of `optimizer.state` counts (CHANGE). `give` returns the
    state_dict that the script brings, once all workers are in the call; what `begin_load` returns is loaded.
    `end_load(call)` runs after it.
    """

    before: Callable[[], None]
    accept: Callable[[Sequence[Tensor]], bool]
    after: Callable[[], None]
    mean: Callable[[Any], Any] = lambda loss: loss
    way_out: str = PREPARE_AGAIN
    evaluates: Callable[[bool], None] = lambda again: None  # noqa: ARG005
    has_batch: Callable[[], bool] = lambda: False
    begin_load: Callable[[Callable[[], State], str], State] = lambda give, call: give()  # noqa: ARG005
    end_load: Callable[[str], None] = lambda call: None  # noqa: ARG005


class ParameterOptimizer:
    """Calls the hooks around steps of `optimizer`, which steps its parameters itself, not segments.

    `calls_closure`: the optimizer itself calls the closure that a step is given, perhaps several times, and
    perhaps after it has moved the parameters. Each call gives it the workers' mean of the gradients, and that
    of the loss. Gradients that are there before the step are reduced first.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, hooks: StepHooks, *, calls_closure: bool = False
    ) -> None:
        self.optimizer, self._hooks, self._calls_closure = optimizer, hooks, calls_closure
        self._group_parameters = [list(group["params"]) for group in optimizer.param_groups]
        self._left_out = False  # the param groups are emptied for a step that was not accepted
        self._evaluated_before = False  # in this step
        own_tensors(optimizer.state.values())
        self._handles: list[Handle] = [
            AroundStep(optimizer, self._before, self._after),
            optimizer.register_load_state_dict_post_hook(lambda _: own_tensors(optimizer.state.values())),
        ]

    def close(self) -> None:
        """Leave the optimizer to the user as a plain one."""
        self.restore()
        for handle in self._handles:
            handle.remove()

    def restore(self) -> None:
        """Refill param groups that a failed step has left empty."""
        if self._left_out:
            self._left_out = False
            for group, parameters in zip(self.optimizer.param_groups, self._group_parameters, strict=True):
                group["params"] = list(parameters)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.restore()
        if (kwargs or len(args) > 1) and self._calls_closure and closure_of(args, kwargs) is not None:
            self._evaluated_before = False
            check_groups(optimizer, self._group_parameters, way_out=self._hooks.way_out)
            if self._hooks.has_batch():
                self._evaluate(lambda: None)
            return with_closure(args, kwargs, self._evaluated)
        if kwargs or len(args) > 1:
            args, kwargs = call_closure_now(args, kwargs)
        check_groups(optimizer, self._group_parameters, way_out=self._hooks.way_out)
        if not self._is_accepted():
            self._leave_out()
        return args, kwargs

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Return the closure's result, with the gradients reduced."""
        again, self._evaluated_before = self._evaluated_before, True
        self._hooks.evaluates(again)
        with torch.enable_grad():
            loss = closure()
        if not self._is_accepted():
            if again:  # the optimizer may have moved the parameters
                raise UserError(
                    f"{type(self.optimizer).__name__}.step() calls its closure several times, and "
                    "sync.nonfinite 'skip' cannot leave out a part of a step; set sync.nonfinite to stop or "
                    "allow"
                )
            self._leave_out()
        return loss

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        return self._hooks.mean(self._evaluate(closure))

    def _is_accepted(self) -> bool:
        """Have the gradients reduced; return True if the step is to be made with them."""
        self._hooks.before()
        gradients = []
        for parameters in self._group_parameters:
            for parameter in parameters:
                if (gradient := parameter.grad) is not None:
                    gradients.append(gradient)
        return self._hooks.accept(gradients)

    def loading(self) -> AbstractContextManager[None]:
        """Return an empty context: a load by the session needs no preparation."""
        return nullcontext()

    def give_back(self, *_: Any, **__: Any) -> None:
        """Do nothing: the state has never left."""

    def bring_changes(self) -> None:
        """Bring what the script has changed in `optimizer.state` to where the steps are made. They are made
        here, with that state."""

    def _leave_out(self) -> None:
        self._left_out = True
        for group in self.optimizer.param_groups:
            group["params"] = []

    def _after(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.restore()
        self._hooks.after()


class ChunkOptimizer:
    """Makes `optimizer` step the segments of `chunks`.

    Args:
        optimizer: the script's optimizer.
        chunks: the chunks that may be stepped; those with parameters in no param group are left alone.
        elementwise: keys of per-element state, from `unit_of`.
        hooks: the functions around each step.
        gradients: returns a chunk's gradients as a flat tensor, and for each slot whether there is one (zeros
            if not); called after `hooks.before`. None: a gradient is sparse. From then on the optimizer steps
            the parameters themselves, by their `p.grad`.
        by_tensor: segments are whole parameters, each of its own shape.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        chunks: Sequence[BoundChunk],
        elementwise: set[str],
        hooks: StepHooks,
        gradients: Callable[[BoundChunk], tuple[Tensor, tuple[bool, ...]] | None],
        *,
        by_tensor: bool = False,
    ) -> None:
        self.optimizer, self._hooks, self._gradients = optimizer, hooks, gradients
        self._group_parameters = [list(group["params"]) for group in optimizer.param_groups]
        group_of = {p: index for index, params in enumerate(self._group_parameters) for p in params}
        self._states = [ChunkState(chunk, by_tensor) for chunk in chunks if chunk.parameters[0] in group_of]
        self._group_of_chunk = [group_of[state.chunk.parameters[0]] for state in self._states]
        self._elementwise = elementwise
        self._user_state: defaultdict[Any, Any] | None = None  # the optimizer's own state during an exchange
        self._by_parameter = False  # True: no segments any more
        self._import()
        self._handles: list[Handle] = [
            AroundStep(optimizer, self._exchange, self._exchange_back),
            optimizer.register_load_state_dict_post_hook(lambda _: self._import()),
            optimizer.register_state_dict_pre_hook(lambda _: self.restore()),
        ]

    @property
    def segments(self) -> list[Segment]:
        """The segments of the latest step, chunk by chunk."""
        return [segment for chunk_state in self._states for segment in chunk_state.segments]

    def close(self) -> None:
        """Leave the optimizer to the user as a plain one, with its state per parameter."""
        self.restore()
        if self._state_was_replaced():
            self._import()
        self._give_up_segments()
        for handle in self._handles:
            handle.remove()

    def _give_up_segments(self) -> None:
        if not self._by_parameter:
            for chunk_state in self._states:
                chunk_state.dissolve()
            self._publish()

    def loading(self) -> AbstractContextManager[None]:
        """Return an empty context: a load by the session needs no preparation."""
        return nullcontext()

    def give_back(self, *_: Any, **__: Any) -> None:
        """Do nothing: the state has never left."""

    def bring_changes(self) -> None:
        """Bring what the script has changed in `optimizer.state` to where the steps are made. They are made
        here, with that state."""

    def save(self, into: Sequence[SavedState] = ()) -> list[SavedState]:
        """Return copies of all chunks' states for `rewind`, in the memory of an earlier result `into`."""
        self.restore()
        if self._state_was_replaced():
            self._import()
        return [state.save(into[index] if into else None) for index, state in enumerate(self._states)]

    def rewind(self, saved: Sequence[SavedState]) -> None:
        """Restore the states that `save` returned; parameters' values stay as they are.

        Only steps, or a load of the state that they made, may have changed the state since.
        """
        self.restore()
        if self._state_was_replaced():
            self._import()
        for state, before in zip(self._states, saved, strict=True):
            state.rewind(before)

    def copy(self, other: ChunkOptimizer) -> None:
        """Copy the state of `other`, whose chunks have an equal layout; not the parameters' values."""
        for each in (self, other):
            each.restore()
            if each._state_was_replaced():
                each._import()
        for state, theirs in zip(self._states, other._states, strict=True):
            state.copy(theirs)
        self._publish()

    def restore(self) -> None:
        """Undo an exchange that a failing step left behind."""
        if self._user_state is not None:
            for group, parameters in zip(self.optimizer.param_groups, self._group_parameters, strict=True):
                group["params"] = list(parameters)
            self.optimizer.state = self._user_state
            self._user_state = None

    def _import(self) -> None:
        """Take over the optimizer's state as it stands: at the start, and after `load_state_dict`."""
        self.restore()
        if self._by_parameter:
            own_tensors(self.optimizer.state.values())
            return
        for chunk_state in self._states:
            chunk_state.segments, chunk_state.present = [], None
            chunk_state.elements.clear()
            for slot, parameter in enumerate(chunk_state.chunk.parameters):
                chunk_state.load(slot, self.optimizer.state.get(parameter, {}), self._elementwise)
        self._publish()

    def _publish(self) -> None:
        """Show the state per parameter, where the user and `state_dict` look for it."""
        for chunk_state in self._states:
            for parameter, state in zip(chunk_state.chunk.parameters, chunk_state.slots, strict=True):
                if state:
                    self.optimizer.state[parameter] = state
            chunk_state.note_shown()

    def _exchange(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The step's pre-hook: parameters and state out, segments in."""
        self.restore()
        if kwargs or len(args) > 1:
            args, kwargs = call_closure_now(args, kwargs)
        check_groups(optimizer, self._group_parameters, way_out=self._hooks.way_out)
        if self._state_was_replaced():
            self._import()
        self._hooks.before()
        found = [] if self._by_parameter else [self._gradients(state.chunk) for state in self._states]
        dense = [each for each in found if each is not None]
        if self._by_parameter or len(dense) < len(found):
            self._give_up_segments()
            self._by_parameter = True
            self._begin_by_parameter()
            return args, kwargs
        segments: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        flat_state: defaultdict[Any, Any] = defaultdict(dict)
        buffers = []
        for chunk_state, group, (buffer, present) in zip(
            self._states, self._group_of_chunk, dense, strict=True
        ):
            if present != chunk_state.present:
                chunk_state.cut(present, bool(optimizer.param_groups[group].get("fused")))
            buffers.append(buffer)
            for segment in chunk_state.segments:
                segment.follow()
                segment.parameter.grad = segment.gradient(buffer)
                segments[group].append(segment.parameter)
                if segment.state:
                    flat_state[segment.parameter] = dict(segment.state)
        accepted = self._hooks.accept(buffers)
        self._user_state = optimizer.state
        optimizer.state = flat_state
        for group_dict, flats in zip(optimizer.param_groups, segments, strict=True):
            group_dict["params"] = flats if accepted else []
        return args, kwargs

    def _begin_by_parameter(self) -> None:
        """Let the optimizer step its parameters, or none of them if the step is not accepted."""
        parameters = [parameter for group in self._group_parameters for parameter in group]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not self._hooks.accept(gradients):
            self._user_state = self.optimizer.state  # `restore` refills the groups
            for group in self.optimizer.param_groups:
                group["params"] = []

    def _exchange_back(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """The step's post-hook: segments out, parameters and state in."""
        flat_state = optimizer.state
        self.restore()
        if self._by_parameter:
            self._hooks.after()
            return
        changed = False
        stepped: list[Tensor] = []
        for chunk_state in self._states:
            for segment in chunk_state.segments:
                segment.parameter.grad = None
                if segment.parameter in flat_state:
                    changed |= chunk_state.adopt(segment, flat_state[segment.parameter], self._elementwise)
                stepped += chunk_state.chunk.parameters[segment.first : segment.last + 1]
        # Each parameter's version counter is its own: without this, autograd could not tell that a
        # value saved for backward was overwritten by the step.
        torch.autograd.graph.increment_version(stepped)
        if changed:
            self._publish()
        self._hooks.after()

    def _state_was_replaced(self) -> bool:
        """True if the script has cleared the optimizer's state, replaced entries or overwritten values."""
        state = self.optimizer.state
        for chunk_state in self._states if not self._by_parameter else ():
            if chunk_state.is_edited():
                return True
            parameters, slots = chunk_state.chunk.parameters, chunk_state.slots
            if not all(map(is_, map(state.get, parameters), slots)) and any(
                state.get(parameter) is not slot
                for parameter, slot in zip(parameters, slots, strict=True)
                if slot or parameter in state
            ):
                return True
        return False


def check_groups(
    optimizer: torch.optim.Optimizer,
    known: Sequence[Sequence[Tensor]],
    since: str = "session.prepare",
    way_out: str = CHANGE_BEFORE,
) -> None:
    """Raise UserError if the param groups' parameters differ from `known`, which `since` has seen."""
    if len(optimizer.param_groups) < len(known):
        raise UserError(f"a param group of the optimizer was removed after {since}; {way_out}")
    for index, group in enumerate(optimizer.param_groups):
        expected = known[index] if index < len(known) else []
        if len(expected) != len(group["params"]) or not all(map(is_, expected, group["params"])):
            raise UserError(f"the optimizer's param group {index} was changed after {since}; {way_out}")


def call_closure_now(args: tuple[Any, ...], kwargs: State) -> tuple[tuple[Any, ...], State]:
    """Run the closure of `step(closure)` while the parameters are in place; returns arguments for the step.

    In them a function that returns the closure's result replaces the closure. It raises UserError if the
    optimizer calls it twice.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    calls = count()

    def evaluated(_closure: Callable[[], Any]) -> Any:
        if next(calls):
            raise UserError(
                f"{type(args[0]).__name__}.step() calls its closure several times, and here the closure runs "
                "once, before the step; under strategy ring or hierarchical without budgets, "
                "session.prepare(..., step='tensor') lets the optimizer call it"
            )
        return loss

    return with_closure(args, kwargs, evaluated)


def closure_of(args: tuple[Any, ...], kwargs: State) -> Any:
    """Return the closure that a call of `step` has; None if it has none."""
    # args[0] is the optimizer itself: torch hands the hooks the call of an unbound method.
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def with_closure(
    args: tuple[Any, ...], kwargs: State, evaluate: Callable[[Callable[[], Any]], Any]
) -> tuple[tuple[Any, ...], State]:
    """Return the arguments of `step` with a closure that returns `evaluate` of the script's closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": partial(evaluate, kwargs["closure"])}
    return (args[0], partial(evaluate, args[1]), *args[2:]) if len(args) > 1 else args, kwargs


def own_tensors(states: Iterable[State]) -> None:
    """Give each parameter's state tensors of its own, as in plain torch.

    A loaded state may share one tensor among several parameters. A plain optimizer would then add up their
    step counts.
    """
    seen: set[object] = set()
    for state in states:
        for key, value in state.items():
            if not isinstance(value, Tensor) or not value.numel():
                continue
            if is_wrapped(value):
                state[key] = value = read_whole(value)  # torch's load has kept lazy parts
            place = storage_key(value)
            if place in seen:
                state[key] = clone(value)
            seen.add(place)
