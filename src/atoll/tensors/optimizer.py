"""The user's optimizer, stepping chunk by chunk.

The optimizer object stays the user's own. Just before its `step` runs, its parameters are exchanged for
**segments**, flat runs of chunk memory whose parameters step alike. Just after, they are exchanged back. The
optimizer's own code thus computes the update, by its usual implementation (fused, foreach or loop), on few
large tensors in place of many small ones. Every element-wise optimizer works.

A segment never spans parameters that differ in an input of their update: the param group, the presence of a
gradient, and the step count. A parameter whose gradient is None is skipped, as in plain torch.

A segment has one tensor for each per-parameter value (`step`). The script sees a separate tensor for each
parameter, as in torch: a plain optimizer that goes on from the state counts each parameter once.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from atoll.chunks import Chunk
from atoll.core.errors import UserError
from atoll.tensors.binding import BoundChunk, carve
from atoll.tensors.lazy import read_whole
from atoll.tensors.modes import ShownInModes
from atoll.tensors.stephooks import AroundStep, Handle
from atoll.tensors.stepunit import tensor_bytes
from atoll.tensors.tensorfile import storage_key
from atoll.tensors.torch_compat import version_of
from atoll.tensors.torch_scaling import (
    forget_scaling_left_to,
    infinity_left_to,
    inverse_of,
    leave_scaling_to,
    note_scale,
    scale_left_to,
    unscale,
)
from atoll.tensors.wrapped import clone, is_wrapped

State: TypeAlias = dict[str, Any]
CHANGE_BEFORE = "add and remove parameters and groups before it"
PREPARE_AGAIN = "call session.prepare again after the change, on every worker"
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


@dataclass(frozen=True)
class StepHooks:
    """Functions around each optimizer step.

    `before()` runs first, `accept(gradients)` returns False to leave the step out, and `after()` runs last.
    `mean(loss)` returns the workers' mean of a closure's result, after `before()`. `way_out` says what to do
    about param groups that the script has changed. `evaluates(again)` runs before the optimizer calls a
    closure; `again`: not for the first time in this step. `has_batch()` returns True if a backward has left
    gradients that no step has used.

    Where steps are made elsewhere, `begin_load(state_dict)` runs before the script's own `load_state_dict`
    and returns what to load, and `end_load()` runs after it.
    """

    before: Callable[[], None]
    accept: Callable[[Sequence[Tensor]], bool]
    after: Callable[[], None]
    mean: Callable[[Any], Any] = lambda loss: loss
    way_out: str = PREPARE_AGAIN
    evaluates: Callable[[bool], None] = lambda again: None  # noqa: ARG005
    has_batch: Callable[[], bool] = lambda: False
    begin_load: Callable[[State], State] = lambda state_dict: state_dict
    end_load: Callable[[], None] = lambda: None


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

    def _leave_out(self) -> None:
        self._left_out = True
        for group in self.optimizer.param_groups:
            group["params"] = []

    def _after(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self.restore()
        self._hooks.after()


class RemoteOptimizer(ParameterOptimizer):
    """An optimizer whose steps are made elsewhere: its own code steps no parameter.

    A load_state_dict by the script is passed to `hooks`, which bring the loaded state to where the steps are
    made. The session, which brings it itself, loads inside `loading`.

    A GradScaler lets a fused optimizer's kernel divide the gradients and skip a step with infinities
    (`optimizer.grad_scale`, `optimizer.found_inf`). No kernel runs here, so both are done before `make`.

    `train()` and `eval()` of a schedule-free optimizer find the state here, and move the parameters here.

    Args:
        optimizer: the script's optimizer.
        hooks: the functions around each step.
        make: makes a step, after the pre-hooks and before `hooks.after`; called with False for a step that
            is not accepted, and with the settings.
        settings: returns the settings of a step before the optimizer's own code runs, which may count steps
            in its param groups.
        fetch: returns the state of each parameter, when the script asks for the optimizer's state_dict.
        home: says where the state lives, for messages.
        keeps_state: warn when the script uses the optimizer after a `close` without `give_back`, since it
            then begins with an empty state.
        counts_skips: have a GradScaler leave division and skip to this optimizer even if it is not fused. A
            skipped step is then still made, as one that is not accepted, since other workers wait for it.
        elsewhere: the parameters that are stepped there; None: all. Others are frozen, and keep their state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        hooks: StepHooks,
        *,
        make: Callable[[bool, Any], None],
        settings: Callable[[], Any],
        fetch: Callable[[], dict[nn.Parameter, State]],
        home: str,
        keeps_state: bool = True,
        counts_skips: bool = False,
        elsewhere: Collection[nn.Parameter] | None = None,
    ) -> None:
        super().__init__(optimizer, hooks)
        self._keeps_state, self._elsewhere = keeps_state, elsewhere
        self._make, self._fetch, self._home = make, fetch, home
        self._settings, self._sent = settings, None
        self._take_scaling_back = leave_scaling_to(optimizer) if counts_skips else None
        self._accepted, self._is_loading, self._is_back = True, False, False
        self._why_lost = "an error ended the session: go on from a checkpoint (session.save, session.load)"
        self._handles += [
            optimizer.register_state_dict_pre_hook(lambda _: self._show()),
            optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: self._before_load(state_dict)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._after_load()),
            ShownInModes(optimizer, self._show, self._forget),
        ]

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Leave load_state_dict inside the `with` block to the session, which brings the state to its
        home."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False

    def _before_load(self, state_dict: State) -> State:
        self.restore()
        return state_dict if self._is_loading else self._hooks.begin_load(state_dict)

    def _after_load(self) -> None:
        if not self._is_loading:
            self._hooks.end_load()

    def takes_states(self, take: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Pass each state_dict to `take` before a load; the optimizer loads the dict that `take` returns."""
        self._handles.append(
            self.optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: take(state_dict))
        )

    def give_back(
        self,
        lacks_room: Callable[[int], str] = lambda _nbytes: "",
        read: Callable[[Any], Any] = read_whole,
        *,
        comes_later: bool = False,
    ) -> None:
        """Bring the optimizer's state here, so that the script may go on with a plain optimizer.

        Args:
            lacks_room: returns the reason why this worker has no room for a state of that many bytes, or "".
                Without room the state stays away, and a warning gives the reason when the script uses the
                optimizer.
            read: returns what is kept here of each value of the state, given that value, which may be lazy.
            comes_later: True on a worker that has yet to enter the run, and has no state of it until then.
        """
        if comes_later:
            self._is_back = True
            return
        self._show()
        states = self.optimizer.state
        why = lacks_room(sum(map(tensor_bytes, states.values())))
        if why:
            states.clear()
            self._why_lost = f"{why}: save it inside the session (session.save), or raise the budgets"
            return
        for state in states.values():
            for key, value in state.items():
                state[key] = read(value)
        self._is_back = True

    def close(self) -> None:
        super().close()
        if self._keeps_state and not self._is_back:
            _tell_of_lost_state(self.optimizer, self._home, self._why_lost)
        if self._take_scaling_back is not None:
            self._take_scaling_back()

    def _forget(self) -> None:
        """Drop the state here of parameters that are stepped elsewhere."""
        for parameter in list(self.optimizer.state):
            if self._elsewhere is None or parameter in self._elsewhere:
                del self.optimizer.state[parameter]

    def _show(self) -> None:
        self.restore()
        self._forget()
        for parameter, state in self._fetch().items():
            self.optimizer.state[parameter] = state

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = super()._before(optimizer, args, kwargs)
        self._accepted = not self._left_out and not infinity_left_to(self.optimizer)
        if self._accepted:
            self._divide_by_scale()
        forget_scaling_left_to(optimizer)  # both are done; some optimizers' loops refuse them
        self._sent = self._settings()
        self._leave_out()
        return args, kwargs

    def _divide_by_scale(self) -> None:
        """Divide gradients whose division a GradScaler has left to the optimizer."""
        scale = scale_left_to(self.optimizer)
        if scale is None:
            return
        by_place: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameters in self._group_parameters:
            for parameter in parameters:
                if parameter.grad is not None:
                    by_place[parameter.grad.device, parameter.grad.dtype].append(parameter.grad)
        inverse = inverse_of(scale)
        note_scale(self.optimizer, inverse)
        with torch.no_grad():
            for (device, _), gradients in by_place.items():
                found = torch.zeros((), device=device)
                unscale(gradients, found, inverse.to(device))

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.restore()
        self._forget()  # a state that state_dict has fetched is out of date
        self._make(self._accepted, self._sent)
        super()._after(optimizer, args, kwargs)


def _tell_of_lost_state(optimizer: torch.optim.Optimizer, home: str, why: str) -> None:
    """Warn once if a script uses an optimizer after its session, without its state and without a load.

    Args:
        optimizer: the script's optimizer.
        home: says where the state lived.
        why: the reason why the state did not come back, with a remedy.
    """
    handles: list[Handle] = []

    def forget() -> None:
        for handle in handles:
            handle.remove()

    def tell(*_: Any) -> None:
        forget()
        if not any(optimizer.state.values()):
            warnings.warn(
                f"{type(optimizer).__name__} is used after its session, and begins anew: {home}, and did not "
                f"come back, since {why}",
                RuntimeWarning,
                stacklevel=4,
            )

    handles += [
        optimizer.register_step_pre_hook(tell),
        optimizer.register_state_dict_pre_hook(tell),
        optimizer.register_load_state_dict_post_hook(lambda _: forget()),
    ]


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
