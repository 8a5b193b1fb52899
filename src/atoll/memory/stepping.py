"""The user's optimizer, stepping chunk by chunk where their state lies.

The optimizer object stays the user's own. Its `step` runs on no parameter that lies in a chunk; its
hyperparameters and its own attributes are noted, and on a thread of this module's the same code then steps a
copy of it on flat segments of one chunk after another, in host memory. `step` returns at once; whoever needs
a chunk's values calls `wait_stepped` first. Source: docs/memory.md, "The step".
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.core.errors import DeadlineError, RunError
from atoll.core.heap import give_back_freed_memory
from atoll.memory.calls import caller, is_under_way
from atoll.memory.gradients import Gradients, TrainedChunk
from atoll.memory.interrupts import uninterrupted
from atoll.memory.ondemand import StatesOnDemand
from atoll.memory.payloads import Payloads
from atoll.memory.speculation import Ahead, Spares, Speculation, can_be_stepped_ahead
from atoll.memory.states import ChunkStates, Run, Settings, noted, run_step
from atoll.tensors.lazy import LazyTensor, read_whole
from atoll.tensors.optimizer import State, call_closure_now, check_groups, elementwise_keys
from atoll.tensors.stephooks import AroundStep, Handle
from atoll.tensors.torch_compat import tree_map_only

_DEADLINE = 600.0  # seconds: the slowest disk has stepped a chunk by then
_HALF = (torch.bfloat16, torch.float16)
_STEPPED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # those that have a Stepper


@dataclass(frozen=True)
class StepCalls:
    """What a `Stepper` asks and tells.

    `before(chunks)`: `optimizer.step()` was called on the script's thread, and these chunks are about to be
    stepped: their payloads "values" must be up to date, and any copy elsewhere will be old. It gives the
    order to step them in, that of their next use. `stepped(chunk)`: its payloads are new; on the stepping
    thread, and it must not wait for the script's. `after()`: `optimizer.step()` is about to return.
    """

    before: Callable[[Sequence[int]], Sequence[int]]
    stepped: Callable[[int], None]
    after: Callable[[], None]


class States(Protocol):
    """The states of a chunk's parameters, as the script sees them: of `ChunkStates`, or of a chunk of which
    other members step a part (memory/foreign.py)."""

    trained: TrainedChunk
    group: int  # of the optimizer's

    def numbers(self, slot: int) -> State:
        """What is kept for a parameter as a whole, in copies."""

    def kept(self, slot: int) -> dict[str, torch.dtype]:
        """What is kept for each of its elements, by key."""

    def elements(self, slot: int, key: str) -> Tensor:
        """A copy of what is kept under `key`, with the parameter's shape and strides."""

    def load(self, slot: int, state: State, settings: Settings | None = None) -> None:
        """Take a parameter's state from plain torch's form."""


@dataclass
class StepFigures:
    """What stepping has cost so far."""

    steps: int = 0  # of the optimizer
    chunks: int = 0  # stepped
    seconds: float = 0.0  # spent on stepping them
    waited: float = 0.0  # seconds that `wait_stepped` has waited


@dataclass
class _Step:
    """A call of `optimizer.step()`: what it found, for the chunks that are still to be stepped."""

    own: dict[str, Any]  # the optimizer's attributes
    groups: list[Settings]
    present: dict[int, tuple[bool, ...]]
    waiting: deque[int] = field(default_factory=deque)
    under_way: int | None = None
    ahead: dict[int, Ahead] = field(default_factory=dict)  # by chunk, what was made of it before the call

    def has(self, chunk: int) -> bool:
        return chunk == self.under_way or chunk in self.waiting

    @property
    def is_over(self) -> bool:
        return self.under_way is None and not self.waiting


class Stepper:
    """Makes `optimizer` step those of `chunks` that it trains.

    `payloads(chunk)` says where a chunk's values, gradient and state lie; "values" must be there. `at_once`
    are chunks that are stepped before `step` returns, by the thread that calls it: those on an accelerator.
    With `master`, chunks in half precision have a payload "master" in single precision, which is what is
    stepped, and the values are rounded from it. Where `parts(chunk)` are not None, of the chunks such a part
    alone is here; `shared(chunk, group, own)` are then the states of those of `shared_chunks`, of which
    others step some (`own`: what is stepped here) or all: the script's `step` leaves these out too. With
    `spares`, chunks may be stepped during backward (speculation.py); who gives them tells `gradient_came`.
    Raises PrepareError for an optimizer that is not element-wise.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        chunks: Sequence[TrainedChunk],
        gradients: Gradients,
        payloads: Callable[[int], Payloads],
        calls: StepCalls,
        *,
        at_once: Collection[int] = (),
        master: bool = False,
        parts: Callable[[int], tuple[int, int] | None] = lambda _: None,
        shared_chunks: Sequence[TrainedChunk] = (),
        shared: Callable[[TrainedChunk, int, ChunkStates | None], States] | None = None,
        spares: Spares | None = None,
    ) -> None:
        elementwise = elementwise_keys(optimizer)
        self.optimizer, self._gradients, self._calls = optimizer, gradients, calls
        self._at_once = frozenset(at_once)
        self._group_parameters = [list(group["params"]) for group in optimizer.param_groups]
        group_of = {id(p): index for index, params in enumerate(self._group_parameters) for p in params}
        self._chunks = {
            each.chunk.id: ChunkStates(
                each,
                payloads(each.chunk.id),
                elementwise,
                group_of[id(each.parameters[0])],
                each.device if each.chunk.id in self._at_once else torch.device("cpu"),
                stepped_dtype(each.dtype, master),
                parts(each.chunk.id),
            )
            for each in chunks
            if id(each.parameters[0]) in group_of
        }
        shown: dict[int, States] = {**self._chunks}
        if shared is not None:
            shown |= {
                each.chunk.id: shared(each, group_of[id(each.parameters[0])], self._chunks.get(each.chunk.id))
                for each in shared_chunks
                if id(each.parameters[0]) in group_of
            }
        self._slots = {
            id(parameter): (states, index)
            for states in shown.values()
            for index, parameter in enumerate(states.trained.parameters)
        }
        self.figures = StepFigures()
        self._loading = False  # a `load_state_dict` runs whose states have been taken
        self._call: FrameType | None = None  # of `step`, while it runs
        self._left_out = False  # the param groups are empty, while `step` runs
        self._step: _Step | None = None  # the latest
        self._next: _Step | None = None  # what `step` is about to begin
        self._failed: dict[int, BaseException] = {}  # by chunk, what its step has raised
        self._untold: BaseException | None = None  # the first of them, until the script has been told
        self._condition = threading.Condition()
        self._closing = self._closed = False
        self.speculation: Speculation | None = None
        if spares is not None and can_be_stepped_ahead(optimizer):
            self.speculation = Speculation(
                optimizer, self._chunks, gradients, spares, self._condition, self._own_code
            )
        # In the order of the param groups, as plain torch has the states.
        self._parameters = [p for group in self._group_parameters for p in group if id(p) in self._slots]
        self._shown = StatesOnDemand(self._parameters, self._plain)
        self._held: set[nn.Parameter] = set()  # whose states the script held before a `state_dict`
        self._take_over()
        for chunk in self._chunks:
            gradients.steps_wait(chunk, self.wait_stepped)
        self._handles: list[Handle] = [
            AroundStep(optimizer, self._before, self._after),
            optimizer.register_state_dict_pre_hook(lambda _: self._before_state_dict()),
            optimizer.register_state_dict_post_hook(lambda _, __: self._shown.keep(self._held)),
            optimizer.register_load_state_dict_pre_hook(lambda _, state: self._load(state)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._loaded()),
        ]
        self._wrapped = [name for name in ("zero_grad", "add_param_group") if name not in vars(optimizer)]
        for name in self._wrapped:
            setattr(optimizer, name, self._with_all_parameters(getattr(optimizer, name)))
        _STEPPED.add(optimizer)
        self._thread = threading.Thread(target=self._work, name="atoll-stepping", daemon=True)
        self._thread.start()
        atexit.register(self._end)  # a thread that the interpreter's end meets in torch aborts the process

    def wait_stepped(self, chunk: int, seconds: float = _DEADLINE, *, tells: bool = True) -> None:
        """Wait until no step of this chunk is under way or still to come; the next to be stepped is it.

        Raises DeadlineError after `seconds`, whatever this chunk's step has raised (where it `tells`, the
        script has been told by that), and RunError where the steps have ended before it came.
        """
        with self._condition:
            step = self._step
            if step is not None and chunk in step.waiting:
                step.waiting.remove(chunk)
                step.waiting.appendleft(chunk)
            what = self._chunks[chunk].trained.words if chunk in self._chunks else "a parameter"
            self._wait(lambda: step is None or not step.has(chunk), seconds, what)
            if chunk in self._failed and not self._closing:
                if not tells:
                    raise self._failed[chunk]
                self._tell(self._failed[chunk])

    def wait_all(self, seconds: float = _DEADLINE) -> None:
        """The same for all chunks."""
        self.wait_over(seconds)
        for error in self._failed.values():
            self._tell(error)

    def wait_over(self, seconds: float = _DEADLINE) -> None:
        """The same, whatever a step has raised."""
        with self._condition:
            step = self._step
            self._wait(lambda: step is None or step.is_over, seconds, "all parameters")

    def _tell(self, error: BaseException) -> None:
        self._untold = None
        raise error

    def _wait(self, over: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for `over`, holding the condition. Raises RunError where nobody steps any more."""
        began = time.monotonic()
        while not over():
            if self._closed and (self._step is None or self._step.under_way is None):
                raise RunError(
                    f"the optimizer's step of {what} will not come: the session ended before it; use the "
                    "model inside the session"
                )
            left = began + seconds - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"waited {seconds:.0f} s for the optimizer's step of {what}, which has not ended: the "
                    "disk of memory.disk is too slow or stands still"
                )
            self._condition.wait(left)
        self.figures.waited += time.monotonic() - began

    def states_of(self, chunk: int) -> ChunkStates | None:
        """What is kept for a chunk that is stepped here; None for others."""
        return self._chunks.get(chunk)

    def values_edited(self, chunk: int) -> None:
        """The script has changed the payload "values": take over into "master" what it changed."""
        if chunk in self._chunks:
            self.wait_stepped(chunk)
            self._chunks[chunk].follow_values()

    def gradient_came(self, chunk: int, slot: int) -> None:
        """A gradient has come, or is on its way to its chunk."""
        if self.speculation is not None and not self._closed:
            self.speculation.came(chunk, slot)

    def close(self) -> None:
        """Make what is under way, and leave the optimizer to the user as a plain one with its state.

        Raises, at the end, what a step has raised and nobody was told of.
        """
        if self._closed:
            return
        try:
            self._restore()
            self.wait_over()
            self._closing = True  # from here on, failed chunks are read as their step has left them
            self._take_over()
            self.optimizer.state = defaultdict(dict, self._shown.items())
        finally:
            self._leave()
        if self._untold is not None:
            self._tell(self._untold)

    def abandon(self, why: str) -> None:
        """Leave the optimizer without its state: who reads the state gets a UserError with `why`."""
        self._restore()
        self._closing = True
        self._leave()
        self._shown.lose(why)

    def state_bytes(self) -> int:
        """Return the bytes that plain torch takes for what is kept for each element.

        No step may be under way.
        """
        return sum(
            states.trained.chunk.slots[slot].numel * dtype.itemsize
            for states, slot in self._slots.values()
            for dtype in states.kept(slot).values()
        )

    def _leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        for name in self._wrapped:
            delattr(self.optimizer, name)
        _STEPPED.discard(self.optimizer)
        self._end()
        atexit.unregister(self._end)

    def _end(self) -> None:
        """End the thread, once it has stepped the chunk that it is at."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join(_DEADLINE)

    # The optimizer's step, on the script's thread.

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        call = caller()
        if self._is_stepping():  # a subclass's step that calls its superclass's, which torch hooks too
            return args, kwargs
        self._restore()
        self._call = call
        args, kwargs = call_closure_now(args, kwargs)
        self._note(optimizer)
        return args, kwargs

    @uninterrupted
    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        """What is to be stepped, and leave the chunks' parameters out of the optimizer's own step."""
        check_groups(optimizer, self._group_parameters, "the optimizer was fitted")
        self.wait_all()
        self._take_over()  # what the script has put there
        present = {}
        for chunk in self._chunks:
            if any(self._gradients.present(chunk)):
                present[chunk] = self._gradients.begin_step(chunk)
        groups = [noted(group, without="params") for group in optimizer.param_groups]
        self._next = _Step(noted(optimizer.__dict__), groups, present)
        self._leave_out()

    def _after(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if caller() is not self._call:
            return
        self._begin_step()

    @uninterrupted
    def _begin_step(self) -> None:
        """Hand what was noted to the stepping thread."""
        step = self._next
        assert step is not None
        try:
            order = self._calls.before(list(step.present))
            self._next = None
        finally:
            self._restore()
        # Each parameter's version counter tells autograd that a value saved for backward is another now.
        torch.autograd.graph.increment_version(
            [
                parameter
                for chunk, present in step.present.items()
                for parameter, here in zip(self._chunks[chunk].trained.parameters, present, strict=True)
                if here
            ]
        )
        self.figures.steps += 1
        if self.speculation is not None:
            step.ahead = self.speculation.accepted(step.own, step.groups, step.present)
        for chunk in order:
            if chunk in self._at_once:
                self._step_chunk(step, chunk)
        with self._condition:
            later = [chunk for chunk in order if chunk not in self._at_once]
            # Those first that were made ahead: they only change places, and nobody is to wait for others.
            step.waiting.extend(sorted(later, key=lambda chunk: chunk not in step.ahead))
            self._step = step
            self._condition.notify_all()
        self._calls.after()
        if self.speculation is not None:
            self.speculation.step_ended()

    def _is_stepping(self) -> bool:
        """Whether this is called by a step that is under way: one that raised is not."""
        return is_under_way(self._call)

    def _with_all_parameters(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the optimizer that is to find all parameters in the groups, whatever became of the last
        step: torch runs no hook after one that raised."""

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not self._is_stepping():
                self._restore()
            return function(*args, **kwargs)

        return called

    def _leave_out(self) -> None:
        self._left_out = True
        for group, parameters in zip(self.optimizer.param_groups, self._group_parameters, strict=True):
            group["params"] = [p for p in parameters if id(p) not in self._slots]

    def _restore(self) -> None:
        """Undo what a step that failed left behind: torch calls nobody at its end."""
        self._call = None
        failed, self._next = self._next, None
        for chunk in failed.present if failed is not None else ():
            self._gradients.end_step(chunk)
        if self._left_out:
            self._left_out = False
            for group, parameters in zip(self.optimizer.param_groups, self._group_parameters, strict=True):
                group["params"] = list(parameters)

    # The chunks' steps, on the stepping thread.

    def _work(self) -> None:
        while True:
            step, ahead, chunk = None, None, -1
            with self._condition:
                while not (self._closed or self._has_step or self._has_ahead):
                    self._condition.wait()
                if self._closed:
                    return
                if self._step is not None and self._step.waiting:
                    step = self._step
                    chunk = step.under_way = step.waiting.popleft()
                elif self.speculation is not None:
                    ahead = self.speculation.begin()
            if self.speculation is not None and ahead is not None:
                self.speculation.make(ahead)
            if step is not None:
                self._try_step(step, chunk)

    def _try_step(self, step: _Step, chunk: int) -> None:
        try:
            self._step_chunk(step, chunk)
        except BaseException as error:  # whatever it is, the script's thread is to raise it
            self._failed[chunk] = error
            self._untold = self._untold or error
        with self._condition:
            step.under_way = None
            self._condition.notify_all()

    @property
    def _has_step(self) -> bool:
        return self._step is not None and bool(self._step.waiting)

    @property
    def _has_ahead(self) -> bool:
        return self.speculation is not None and self.speculation.has_next

    def _step_chunk(self, step: _Step, chunk: int) -> None:
        began = time.monotonic()
        if self.speculation is not None and self.speculation.confirm(step.ahead.pop(chunk, None)):
            self._gradients.end_step(chunk)
        else:
            self._step_now(step, chunk, self._chunks[chunk])
        self.figures.chunks += 1
        self.figures.seconds += time.monotonic() - began
        self._calls.stepped(chunk)

    def _step_now(self, step: _Step, chunk: int, states: ChunkStates) -> None:
        had_state = states.has_elements
        with self._gradients.stepped_with(chunk) as gradients:
            began = time.monotonic()
            run = self._own_code(states, step.own)
            states.step(step.groups[states.group], gradients, step.present[chunk], run)
            if self.speculation is not None:
                self.speculation.took(chunk, time.monotonic() - began)
        if states.has_elements and not had_state:
            give_back_freed_memory()  # what the optimizer has made, and lies in payloads now: chunk by chunk

    def _own_code(self, states: ChunkStates, own: Mapping[str, Any]) -> Run:
        """The optimizer's own, with these attributes of it, where the chunk is stepped."""
        return partial(run_step, type(self.optimizer), states.there(own))

    # The state, as plain torch shows it.

    @uninterrupted
    def _plain(self, parameter: nn.Parameter) -> State:
        """A copy of one parameter's state as plain torch has it."""
        states, slot = self._slots[id(parameter)]
        self.wait_stepped(states.trained.chunk.id)
        return {
            **self._numbers(states, slot),
            **{key: self._elements(states, slot, key) for key in states.kept(slot)},
        }

    def _numbers(self, states: States, slot: int) -> State:
        """What is kept for a parameter as a whole, where plain torch has it: a step count that kernels read
        lies on the parameter's device."""
        group = self.optimizer.param_groups[states.group]
        if not (group.get("fused") or group.get("capturable")):
            return states.numbers(slot)
        device = states.trained.device
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in states.numbers(slot).items()}

    def _elements(self, states: States, slot: int, key: str) -> Tensor:
        """A copy of what is kept for each element, on the parameter's device."""
        return states.elements(slot, key).to(states.trained.device)

    def _lazy(self, parameter: nn.Parameter) -> State:
        """The same, with tensors that are copied when they are read."""
        states, slot = self._slots[id(parameter)]
        self.wait_stepped(states.trained.chunk.id)
        lazy = {
            key: LazyTensor(
                partial(self._read, parameter, key), parameter.shape, dtype, states.trained.device
            )
            for key, dtype in states.kept(slot).items()
        }
        return {**self._numbers(states, slot), **lazy}

    @uninterrupted
    def _read(self, parameter: nn.Parameter, key: str) -> Tensor:
        if self._closed:
            kept: Tensor = self.optimizer.state[parameter][key]
            return kept.clone()
        states, slot = self._slots[id(parameter)]
        self.wait_stepped(states.trained.chunk.id)
        return self._elements(states, slot, key)

    def _show(self) -> None:
        shown: Any = self._shown
        self.optimizer.state = shown

    def _take_over(self) -> None:
        """Move into payloads the states that the script has put into `optimizer.state`, or changed there."""
        if self.optimizer.state is not self._shown:  # the script's own: what is not there is nowhere
            self._shown.become(self.optimizer.state, whole=True)
            self._show()
        changed = self._shown.taken()
        for parameter, state in changed.items():
            states, slot = self._slots[id(parameter)]
            states.load(slot, state)

    def _before_state_dict(self) -> None:
        self._restore()
        self._held = self._shown.held()
        self._shown.fill(self._lazy)

    @uninterrupted
    def _load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Before `load_state_dict`: take the states, in their own precision, and leave it the rest."""
        self._restore()
        self.wait_all()
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        if [len(each) for each in saved] != [len(each) for each in self._group_parameters]:
            return state_dict  # torch says what is wrong
        rest = dict(state_dict["state"])  # torch keeps the tensors of what it is left
        for indices, parameters, group in zip(
            saved, self._group_parameters, state_dict["param_groups"], strict=True
        ):
            for index, parameter in zip(indices, parameters, strict=True):
                if id(parameter) in self._slots:
                    states, slot = self._slots[id(parameter)]
                    states.load(slot, rest.pop(index, {}), group)
        self._loading = True
        return {**state_dict, "state": tree_map_only(LazyTensor, read_whole, rest)}

    def _loaded(self) -> None:
        """After `load_state_dict`, which has made a state of what it was left."""
        if self._loading:
            self._loading = False
            self._shown.become(self.optimizer.state, whole=False)
            self._show()


def has_stepper(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a `Stepper` that is not closed steps it."""
    return optimizer in _STEPPED


def stepped_dtype(dtype: torch.dtype, master: bool) -> torch.dtype:
    """What a parameter of `dtype` is stepped in: single precision for a half one that has a master."""
    return torch.float32 if master and dtype in _HALF else dtype


def state_dtypes(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What the optimizer keeps for each element of a parameter of `dtype`, by key: for sizes in a plan.

    Raises PrepareError for an optimizer that is not element-wise.
    """
    elementwise = elementwise_keys(optimizer)
    own = noted(optimizer.__dict__)
    found: dict[str, torch.dtype] = {}
    for group in optimizer.param_groups:
        parameter = nn.Parameter(torch.zeros(2, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        kept = run_step(type(optimizer), own, noted(group, without="params"), [parameter], {})
        state = kept.get(parameter, {})
        found.update({key: state[key].dtype for key in elementwise if isinstance(state.get(key), Tensor)})
    return found
