"""The user's optimizer, which steps chunk by chunk where their state lies.

The optimizer object stays the user's own. Its `step` runs on no parameter that lies in a chunk. It notes the
optimizer's hyperparameters and attributes. A thread (memory/modelsteps.py) then runs the same code, on a copy
of the optimizer, for flat segments of one chunk after another, in host memory. `step` returns at once;
whoever needs a chunk's values waits in the queue of steps (memory/stepqueue.py). Source: docs/memory.md, "The
step".
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.errors import PrepareError
from atoll.core.heap import give_back_freed_memory
from atoll.memory.gradients import ModelGradients
from atoll.memory.interrupts import uninterrupted
from atoll.memory.plainstate import PlainState, States
from atoll.memory.segments import RunSegment, Segments, here, noted, run_step
from atoll.memory.speculation import Ahead, Spares, Speculation, can_be_stepped_ahead
from atoll.memory.states import ChunkStates
from atoll.memory.stepqueue import StepCall, StepQueue
from atoll.tensors.optimizer import call_closure_now, check_groups
from atoll.tensors.stephooks import AroundStep, Handle
from atoll.tensors.stepunit import unit_of
from atoll.tensors.torch_compat import has_compiled
from atoll.tensors.wrapped import is_wrapped

_STEPPED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # optimizers that have a ChunkStepper


class ChunkStepper:
    """Makes `optimizer` step chunks, on the thread of the model's `ModelSteps`.

    Args:
        optimizer: one of the model's optimizers.
        states: the chunks that it steps, with their states and values, by chunk.
        gradients: the chunks' gradients.
        steps: the queue of steps.
        before: called on the script's thread in `optimizer.step()`, with the chunks about to be stepped. It
            must bring their payloads "values" up to date, and take copies elsewhere for out of date. Returns
            the order to step them in, by their next use.
        after: called when `optimizer.step()` is about to return.
        shown: the states of chunks of which others step some or all; the script's `step` leaves these out
            too.
        spares: lets chunks be stepped during backward (speculation.py); `gradient_came` is then to be called
            for each gradient.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        states: Mapping[int, ChunkStates],
        gradients: ModelGradients,
        steps: StepQueue,
        before: Callable[[Sequence[int]], Sequence[int]],
        after: Callable[[], None],
        *,
        shown: Mapping[int, States] | None = None,
        spares: Spares | None = None,
    ) -> None:
        self.optimizer, self._gradients, self._steps = optimizer, gradients, steps
        self._before_step, self._after_step = before, after
        self._group_parameters = [list(group["params"]) for group in optimizer.param_groups]
        for each in states.values():
            each.take_over()
        self._chunks = {chunk: Segments(each) for chunk, each in states.items()}
        self._left_out = False  # the param groups lack the chunks' parameters, while `step` runs
        self._next: StepCall | None = None  # the step that is about to begin
        self._ahead: dict[int, Ahead] = {}  # by chunk, steps that were made ahead of the latest `step`
        self.speculation: Speculation | None = None
        if spares is not None and can_be_stepped_ahead(optimizer):
            self.speculation = Speculation(
                optimizer, self._chunks, gradients, spares, steps.condition, self._own_code
            )
        self.state = PlainState(optimizer, {**states, **(shown or {})}, steps)
        self.state.take_over()
        self._around_step = AroundStep(optimizer, self._before, self._after)
        self._handles: list[Handle] = [
            self._around_step,
            optimizer.register_state_dict_pre_hook(lambda _: self.restore()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.restore()),
            *self.state.watch(),
        ]
        self._wrapped = [name for name in ("zero_grad", "add_param_group") if name not in vars(optimizer)]
        for name in self._wrapped:
            setattr(optimizer, name, self._with_all_parameters(getattr(optimizer, name)))
        _STEPPED.add(optimizer)

    def gradient_came(self, chunk: int, slot: int) -> None:
        """Note that a gradient of the model has come, or is on its way to its chunk."""
        if self.speculation is not None and not self._steps.is_closed and not has_compiled():
            self.speculation.came(chunk, slot)

    def leave(self) -> None:
        """Leave the optimizer to the user as a plain one. Its state is not given back."""
        for handle in self._handles:
            handle.remove()
        for name in self._wrapped:
            delattr(self.optimizer, name)
        _STEPPED.discard(self.optimizer)

    # The optimizer's step, on the script's thread.

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.restore()
        args, kwargs = call_closure_now(args, kwargs)
        self._note(optimizer)
        return args, kwargs

    @uninterrupted
    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what is to be stepped, and leave the chunks' parameters out of the optimizer's own step."""
        check_groups(optimizer, self._group_parameters, "the optimizer was fitted")
        self._steps.wait_all(chunks=self._chunks)
        self.state.take_over()  # states that the script has set
        present = {}
        for chunk in self._chunks:
            if any(self._gradients.present(chunk)):
                present[chunk] = self._gradients.begin_step(chunk)
        groups = [noted(group, without="params") for group in optimizer.param_groups]
        self._next = StepCall(noted(optimizer.__dict__), groups, present, self._step_chunk)
        self._left_out = True
        for group, parameters in zip(optimizer.param_groups, self._group_parameters, strict=True):
            group["params"] = [p for p in parameters if not self.state.has(p)]

    def _after(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._next is not None:  # else the step itself has had the parameters put back
            self._begin_step()

    @uninterrupted
    def _begin_step(self) -> None:
        """Hand the noted step to the stepping thread."""
        step = self._next
        assert step is not None
        try:
            order = self._before_step(list(step.present))
            self._next = None
        finally:
            self.restore()
        # The version counters tell autograd that values saved for backward have changed.
        torch.autograd.graph.increment_version(
            [
                parameter
                for chunk, present in step.present.items()
                for parameter, here in zip(
                    self._chunks[chunk].states.trained.parameters, present, strict=True
                )
                if here
            ]
        )
        if self.speculation is not None:
            self._ahead = self.speculation.accepted(step.own, step.groups, step.present)
        # Chunks stepped ahead come first: their payloads only change places, so waits for them are short.
        self._steps.begin(step, sorted(order, key=lambda chunk: chunk not in self._ahead))
        self._after_step()
        if self.speculation is not None:
            self.speculation.step_ended()
        if has_compiled():  # no step may overlap with what is compiled next
            self._steps.wait_over()

    def _with_all_parameters(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the optimizer that first puts all parameters back into the param groups.

        A step that raised may have left some out: torch runs no hook after it.
        """

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not self._around_step.is_under_way:
                self.restore()
            return function(*args, **kwargs)

        return called

    def restore(self) -> None:
        """Undo what a failed step left behind: torch runs no hook at its end."""
        failed, self._next = self._next, None
        for chunk in failed.present if failed is not None else ():
            self._gradients.end_step(chunk)
        if self._left_out:
            self._left_out = False
            for group, parameters in zip(self.optimizer.param_groups, self._group_parameters, strict=True):
                group["params"] = list(parameters)

    # The chunks' steps, on the stepping thread.

    def _step_chunk(self, step: StepCall, chunk: int) -> None:
        ahead = self._ahead.pop(chunk, None)
        if self.speculation is not None and self.speculation.confirm(ahead):
            self._gradients.end_step(chunk)
        else:
            self._step_now(step, chunk, self._chunks[chunk])

    def _step_now(self, step: StepCall, chunk: int, segments: Segments) -> None:
        states = segments.states
        had_state = states.has_elements
        with self._gradients.stepped_with(chunk) as gradients:
            began = time.monotonic()
            run = self._own_code(step.own)
            segments.step(step.groups[states.group], gradients, step.present[chunk], run)
            if self.speculation is not None:
                self.speculation.took(chunk, time.monotonic() - began)
        if states.has_elements and not had_state:
            give_back_freed_memory()  # the new states were copied into payloads; free them chunk by chunk

    def _own_code(self, own: Mapping[str, Any]) -> RunSegment:
        """Return the optimizer's own code, with these attributes of the optimizer, on the CPU."""
        return partial(run_step, type(self.optimizer), here(own))


def has_stepper(optimizer: torch.optim.Optimizer) -> bool:
    """True if an open `ChunkStepper` steps the optimizer."""
    return optimizer in _STEPPED


def state_dtypes(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes of the states of a parameter of `dtype` that are as large as it, by key, for a
    plan."""
    unit = unit_of(optimizer)
    own = noted(optimizer.__dict__)
    found: dict[str, torch.dtype] = {}
    for group in optimizer.param_groups:
        # Large enough for an optimizer that quantises the states of large parameters.
        parameter = nn.Parameter(torch.zeros((64, 64) if unit.by_tensor else (2,), dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        try:
            settings = noted(group, without="params")
            kept = run_step(type(optimizer), own, settings, [parameter], {}, is_trial=True)
        except Exception as error:  # whatever an unknown optimizer raises
            raise PrepareError(
                f"optimizer {type(optimizer).__name__} raised in a trial of its step, which budgets of "
                f"memory need ({str(error).partition('. ')[0]}); have it ready before session.prepare, or "
                "leave the budgets out"
            ) from error
        state = kept.get(parameter, {})
        plain = {k: v for k, v in state.items() if isinstance(v, Tensor) and not is_wrapped(v)}
        sized = {k: v for k, v in plain.items() if v.shape == parameter.shape}
        found.update({key: value.dtype for key, value in sized.items() if unit.by_tensor or key in unit.keys})
    return found
