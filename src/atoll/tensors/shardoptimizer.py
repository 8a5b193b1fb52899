"""The user's optimizer away from the script (at a shard, in a peer's CPU side): one torch optimizer a chunk,
each stepping through `ChunkOptimizer`.

Chunks step one by one, so that one can be sent while the next is stepped. Nothing is unpickled: an
optimizer is known by its class's name, from torch.optim's element-wise classes, or from the one path that
the operator of the shard has configured, or that a node's own script has it from; what it is set to comes as
plain numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.chunks import Chunk, ChunkMap
from atoll.core.errors import PrepareError, UserError
from atoll.tensors.binding import BoundChunk
from atoll.tensors.compensation import Origins
from atoll.tensors.optimizer import ChunkOptimizer, SavedState, StepHooks, elementwise_keys
from atoll.tensors.stephooks import AroundStep

Settings: TypeAlias = dict[str, Any]  # a param group without its parameters
SlotValues: TypeAlias = list[dict[str, Any]]  # for each slot, its states that are one number

_ALLOWED = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
)  # fmt: skip
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # those with a fused implementation on CPUs
_HALF = (torch.float16, torch.bfloat16)
_PLAIN = (bool, int, float, str, type(None))


def full_name(class_: type) -> str:
    """How a class is called in a Setup: "torch.optim.adamw.AdamW"."""
    return f"{class_.__module__}.{class_.__qualname__}"


def optimizer_class(name: str, configured: str = "") -> type[torch.optim.Optimizer]:
    """The class called `name` (see `full_name`).

    `configured` is the operator's "package.module:Class" (of a node: its own script's), which alone may be
    imported. Raises UserError for any class that is neither torch.optim's own nor that one.
    """
    for allowed in _ALLOWED:
        class_: type[torch.optim.Optimizer] = getattr(torch.optim, allowed)
        if name in (full_name(class_), f"torch.optim.{allowed}"):
            return class_
    if configured:
        own = _import(configured)
        if name in (full_name(own), configured.replace(":", ".")):
            return own
    but = f", and server.optimizer names {configured!r}" if configured else ""
    raise UserError(
        f"cannot run the optimizer {name!r} outside the script: it is none of torch.optim's element-wise "
        f"ones ({', '.join(_ALLOWED)}){but}; take one of these, or with a parameter server set "
        "server.optimizer to its 'package.module:Class' on every shard"
    )


def own_path(class_: type[torch.optim.Optimizer], strategy: str) -> str:
    """The "package.module:Class" by which another process of the same user may import the script's own
    optimizer class; empty for torch.optim's element-wise ones. Raises PrepareError where it could not."""
    if any(getattr(torch.optim, allowed) is class_ for allowed in _ALLOWED):
        return ""
    if class_.__module__ == "__main__" or "<locals>" in class_.__qualname__:
        where = "in the script itself" if class_.__module__ == "__main__" else "within a function"
        facts = {"run.strategy": strategy, "steps": "home", "optimizer": class_.__name__, "defined": where}
        check("prepare", Choices(facts))
    return f"{class_.__module__}:{class_.__qualname__}"


def _import(path: str) -> type[torch.optim.Optimizer]:
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"the optimizer {path!r} cannot be imported here: {error}") from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(f"the optimizer {path!r} is no subclass of torch.optim.Optimizer")
    return found


@dataclass(frozen=True)
class _Kind:
    """What a param group's optimizer keeps, learnt by stepping one of its own on two elements."""

    elementwise: set[str]
    dtypes: Mapping[str, torch.dtype]  # of every state that is a tensor

    def tensor(self, key: str, value: Any) -> Any:
        """A slot's number as the optimizer keeps it; raises UserError for what is none."""
        if not isinstance(value, (int, float)):
            raise UserError(f"state {key!r} is a {type(value).__name__}, and not a number")
        return torch.tensor(value, dtype=self.dtypes[key]) if key in self.dtypes else value


class Trial:
    """A chunk's values and optimizer state as they were, to go back to. The memory is kept for the next."""

    def __init__(self, values: Tensor | None = None, states: Sequence[SavedState] = ()) -> None:
        """`values` and `states` are what to go back to, or the memory for it."""
        self.values, self.states = values, states

    def begin(self, flat: Tensor, stepper: ChunkOptimizer) -> None:
        """Note what the chunk is now: its values `flat`, and its state in `stepper`."""
        self.values = flat.clone() if self.values is None else self.values.copy_(flat)
        self.states = stepper.save(self.states)

    def drop(self, flat: Tensor, stepper: ChunkOptimizer) -> None:
        """Undo the steps since then."""
        assert self.values is not None
        flat.copy_(self.values)
        stepper.rewind(self.states)


class _OpenStep:
    """What it takes to make a chunk's latest step again with more contributions: their mean so far, in which
    slots anyone had a gradient, and the values and the state from before. The memory is kept for the next.
    """

    def __init__(self) -> None:
        self.mean: Tensor | None = None  # None: no contribution has had a gradient for this chunk
        self.present: tuple[bool, ...] = ()
        self.trial = Trial()
        self.stepped = False  # the trial is from before the step
        self._memory: Tensor | None = None

    def clear(self) -> None:
        """No step is open."""
        self.mean, self.present, self.stepped = None, (), False

    def add(self, gradients: Tensor, present: tuple[bool, ...], part: float) -> None:
        """Move the mean by `part` of the way to `gradients`; where nobody had any, they count as zeros."""
        if self.mean is None and part == 1:
            self.mean, self.present = gradients, present  # as it came: it is only read
            return
        if self._memory is None:
            self._memory = torch.empty_like(gradients)
        if self.mean is None:
            self.mean, self.present = torch.mul(gradients, part, out=self._memory), present
            return
        self.mean = torch.lerp(self.mean, gradients, part, out=self._memory)
        self.present = tuple(map(any, zip(self.present, present, strict=True)))


class Scratch:
    """Memory by name, each as long as the longest asked for so far: for one chunk at a time, whichever."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that it has taken so far."""
        return sum(memory.nbytes for memory in self._memory.values())

    def part(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for `numel` values, 1-D, with what was left there."""
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < numel * dtype.itemsize:
            memory = self._memory[name] = torch.empty(numel * dtype.itemsize, dtype=torch.uint8)
        return memory[: numel * dtype.itemsize].view(dtype)


class _HeldChunk:
    """One chunk, its optimizer, and what steps it; `settings` is None where nothing trains it."""

    def __init__(self, chunk: Chunk, class_: type[torch.optim.Optimizer], settings: Settings | None) -> None:
        dtype = getattr(torch, chunk.dtype)
        self.chunk = chunk
        # Flat parameters: the update is element-wise, so shapes and strides are the workers' own affair.
        self.parameters = [
            nn.Parameter(torch.zeros(slot.numel, dtype=dtype), requires_grad=dtype.is_floating_point)
            for slot in chunk.slots
        ]
        self.bound = BoundChunk(chunk, [str(slot.parameter) for slot in chunk.slots], self.parameters)
        self.bound.bind(torch.zeros(chunk.numel, dtype=dtype))
        self.flat = self.bound.flat[: chunk.extent]  # its values, where they lie now
        self.nbytes = self.flat.nbytes
        self.kind: _Kind | None = None
        self.open = _OpenStep()
        if settings is not None:
            self._gradients: tuple[Tensor, tuple[bool, ...]] | None = None
            self.optimizer = _make(class_, self.parameters, settings)
            self.settings = settings

    def move(self) -> None:
        """Let the values lie elsewhere from now on."""
        self.bound.move()
        self.flat = self.bound.flat[: self.chunk.extent]

    def begin(self, kind: _Kind) -> None:
        """Let the chunk be stepped; `kind` is what its param group's optimizer keeps."""
        self.kind = kind
        hooks = StepHooks(before=_nothing, accept=lambda _: True, after=_nothing)
        self.stepper = ChunkOptimizer(
            self.optimizer, [self.bound], kind.elementwise, hooks, lambda _: self._given()
        )
        if isinstance(self.optimizer, torch.optim.SGD):  # after the stepper's: of what it steps
            AroundStep(self.optimizer, _unfuse if self.flat.dtype in _HALF else _unfuse_mixed)

    def step(self, gradients: Tensor, present: tuple[bool, ...]) -> None:
        self._gradients = gradients, present
        try:
            self.optimizer.step()
        finally:
            self._gradients = None
            self.stepper.restore()
            for segment in self.stepper.segments:  # they are others' memory, to be used again
                segment.forget_gradient()
            self.optimizer.param_groups[0].update(self.settings)

    def _given(self) -> tuple[Tensor, tuple[bool, ...]]:
        assert self._gradients is not None
        return self._gradients

    def contribute(self, gradients: Tensor, present: tuple[bool, ...], part: float, closes: bool) -> None:
        """Make the open step with one more contribution, anew where it was made before."""
        step = self.open
        if part == 1 and closes and not step.stepped:  # nothing came before, and nothing will come
            self.step(gradients, present)
            return
        step.add(gradients, present, part)
        if step.stepped:
            step.trial.drop(self.flat, self.stepper)
        elif not closes:
            step.trial.begin(self.flat, self.stepper)
            step.stepped = True
        assert step.mean is not None
        self.step(step.mean, step.present)

    @contextlib.contextmanager
    def undone(self, scratch: Scratch) -> Iterator[None]:
        assert self.kind is not None
        numel, dtypes = self.chunk.extent, self.kind.dtypes
        into = {key: scratch.part(f"state.{key}", numel, dtypes[key]) for key in self.kind.elementwise}
        trial = Trial(scratch.part("values", numel, self.flat.dtype), [SavedState(into, [])])
        trial.begin(self.flat, self.stepper)
        try:
            yield
        finally:
            trial.drop(self.flat, self.stepper)

    def copy(self, other: _HeldChunk) -> None:
        """Have the values and the state that `other` has."""
        self.open.clear()
        self.flat.copy_(other.flat)
        self.stepper.copy(other.stepper)

    def apply(self, settings: Settings) -> None:
        """Have the next step use `settings`."""
        if settings is not self.settings:
            self.optimizer.param_groups[0].update(settings)
            self.settings = settings


class ShardOptimizer:
    """The chunks `held` (ids) of a layout at one shard or one peer, and their optimizers.

    `hyperparameters` are the param groups, in order, in the form of wire.messages.plain_hyperparameters. All
    tensors given and returned are flat, of a chunk's extent and on the CPU.

    With `fused`, a param group that leaves the implementation to torch (fused=None) uses torch's fused one
    where there is one. It is faster, and in single precision rounds differently from the loop that torch
    would choose. SGD never steps half precision by a fused kernel, even where a script asks for one: the
    script's device may have other kernels. Raises UserError for an optimizer that cannot run here.
    """

    def __init__(
        self,
        layout: ChunkMap,
        held: Sequence[int],
        optimizer: str,
        hyperparameters: Sequence[Mapping[str, Any]],
        *,
        configured: str = "",
        fused: bool = False,
    ) -> None:
        self.layout, self._fused = layout, fused
        self._class = optimizer_class(optimizer, configured)
        self._groups = [self._settings(group) for group in hyperparameters]
        self._given = [dict(group) for group in hyperparameters]
        self.origins: Origins | None = None  # what each contributor went on from, where delay is compensated
        self._group_of: dict[int, int] = {}
        self._chunks: dict[int, _HeldChunk] = {}
        kinds: dict[tuple[int, str], _Kind] = {}
        for id_ in held:
            chunk = layout.chunks[id_]
            group = self._group_index(chunk)
            settings = None if group is None else self._groups[group]
            made = self._chunks[id_] = _HeldChunk(chunk, self._class, settings)
            if group is None:
                continue
            self._group_of[id_] = group
            if (group, chunk.dtype) not in kinds:
                kinds[group, chunk.dtype] = _probe(
                    self._class, made.optimizer, self._groups[group], chunk.dtype
                )
            made.begin(kinds[group, chunk.dtype])

    @property
    def chunks(self) -> tuple[int, ...]:
        """The ids of the chunks held."""
        return tuple(self._chunks)

    def slots(self, chunk: int) -> int:
        """How many parameters lie in a chunk."""
        return len(self._chunks[chunk].chunk.slots)

    def nbytes(self, chunk: int) -> int:
        """Bytes of a chunk's values, and so of its gradients."""
        return self._chunks[chunk].nbytes

    def dtype(self, chunk: int) -> torch.dtype:
        return self._chunks[chunk].flat.dtype

    def trains(self, chunk: int) -> bool:
        """Whether an optimizer steps the chunk."""
        return chunk in self._group_of

    def step(
        self,
        chunk: int,
        gradients: Tensor,
        present: Iterable[bool | int],
        hyperparameters: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Step one chunk with `gradients`, those of the slots where `present` says so.

        `hyperparameters` are all param groups'; None keeps those of the step before.
        """
        if hyperparameters is not None:
            self.set_hyperparameters(hyperparameters)
        self.step_by(chunk, gradients, present, self._groups)

    def step_by(
        self, chunk: int, gradients: Tensor, present: Iterable[bool | int], settings: Sequence[Settings]
    ) -> None:
        """As `step`, with what `settings` has made of hyperparameters, whichever were used before. Several
        threads may step as many chunks at once."""
        held, here = self._chunks[chunk], tuple(bool(flag) for flag in present)
        held.open.clear()
        if not any(here):  # no parameter would change, nor any step count
            return
        held.apply(settings[self._group_of[chunk]])
        held.step(gradients, here)

    def settings(self, hyperparameters: Sequence[Mapping[str, Any]]) -> list[Settings]:
        """Hyperparameters in the form that `step_by` takes; raises UserError as `check_hyperparameters`."""
        self.check_hyperparameters(hyperparameters)
        return [self._settings(group) for group in hyperparameters]

    @contextlib.contextmanager
    def undone(self, chunk: int, scratch: Scratch) -> Iterator[None]:
        """Within, a chunk that is trained may be stepped; at the end its values and its state are what they
        were. `scratch` holds them meanwhile, under "values" and "state.KEY"."""
        with self._chunks[chunk].undone(scratch):
            yield

    def copy(self, chunk: int, other: ShardOptimizer) -> None:
        """Have the values and the state that another one of the same layout and optimizer has of a chunk that
        is trained; its next steps are `other`'s then, bit for bit."""
        self._chunks[chunk].copy(other._chunks[chunk])

    def contribute(
        self,
        chunk: int,
        gradients: Tensor,
        present: Iterable[bool | int],
        part: float,
        *,
        opens: bool,
        closes: bool,
        hyperparameters: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Step one chunk with the mean of several contributions, of which this is one.

        The first `opens` the step, the last `closes` it; in between the step is made again with each, from
        the values and the state before it. `part` is this contribution's share of the weight so far.
        Gradients are zeros where `present` says that there are none. Other arguments as in `step`.
        """
        if hyperparameters is not None:
            self.set_hyperparameters(hyperparameters)
        held, here = self._chunks[chunk], tuple(bool(flag) for flag in present)
        if opens:
            held.open.clear()
        if part > 0 and (any(here) or held.open.mean is not None):
            held.apply(self._groups[self._group_of[chunk]])
            held.contribute(gradients, here, part, closes)
        if closes:
            held.open.clear()

    def set_hyperparameters(self, hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        """Have later steps use these param groups; raises UserError for what is no form of those before."""
        self.check_hyperparameters(hyperparameters)
        for index, group in enumerate(hyperparameters):
            if group != self._given[index]:
                self._groups[index] = self._settings(group)
                self._given[index] = dict(group)

    def check_hyperparameters(self, hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        """Raise UserError for what `step` would not take."""
        if len(hyperparameters) != len(self._groups):
            raise UserError(
                f"hyperparameters of {len(hyperparameters)} param groups, where the run has "
                f"{len(self._groups)}"
            )
        for index, group in enumerate(hyperparameters):
            if group != self._given[index]:
                _check_alike(self._settings(group), self._groups[index])

    @property
    def hyperparameters(self) -> list[dict[str, Any]]:
        """The param groups, as they were given last."""
        return [dict(group) for group in self._given]

    def values(self, chunk: int) -> Tensor:
        """A chunk's parameters where they lie: the next step changes them."""
        return self._chunks[chunk].flat

    def base(self, chunk: int, opens: bool) -> Tensor:
        """The values that the next contribution's step is made from, where they lie; it `opens` the step or
        joins the one that is open."""
        held = self._chunks[chunk]
        before = held.open.trial.values if held.open.stepped and not opens else None
        return held.flat if before is None else before

    def move(self, chunk: int) -> None:
        """Let a chunk lie in new memory: what `values` gave before stays as it is."""
        self._chunks[chunk].move()

    def set_values(self, chunk: int, values: Tensor) -> None:
        self._chunks[chunk].open.clear()
        self._chunks[chunk].flat.copy_(values)

    def state_dtypes(self, chunk: int) -> dict[str, torch.dtype]:
        """What the optimizer keeps for each element of a chunk ("exp_avg"), by dtype."""
        kind = self._chunks[chunk].kind
        return {} if kind is None else {key: kind.dtypes[key] for key in sorted(kind.elementwise)}

    def number_dtypes(self, chunk: int) -> dict[str, torch.dtype]:
        """What it keeps for each parameter of a chunk as a tensor of one number ("step"), by dtype."""
        kind = self._chunks[chunk].kind
        rest = {} if kind is None else kind.dtypes
        return {key: dtype for key, dtype in rest.items() if kind and key not in kind.elementwise}

    def state_dtype(self, chunk: int, key: str) -> torch.dtype:
        """The dtype of an element-wise state; raises UserError if the optimizer keeps none called `key`."""
        kind = self._chunks[chunk].kind
        if kind is None or key not in kind.elementwise:
            raise UserError(f"{self._class.__name__} keeps no state called {key!r} for each element")
        return kind.dtypes[key]

    def state(self, chunk: int) -> tuple[dict[str, Tensor], SlotValues]:
        """Copies of a chunk's optimizer state: its element-wise ones flat, and the numbers of each slot.

        A slot that lacks one of the former has zeros there, and None under its key among its numbers.
        """
        held = self._chunks[chunk]
        elements: dict[str, Tensor] = {}
        slots: SlotValues = []
        if held.kind is None:
            return elements, [{} for _ in held.chunk.slots]
        for slot, parameter in zip(held.chunk.slots, held.parameters, strict=True):
            values: dict[str, Any] = {}
            for key, value in held.optimizer.state.get(parameter, {}).items():
                if key in held.kind.elementwise and isinstance(value, Tensor):
                    if key not in elements:
                        elements[key] = torch.zeros(held.chunk.extent, dtype=value.dtype)
                    elements[key][slot.offset : slot.offset + slot.numel] = value.reshape(-1)
                elif key not in held.kind.elementwise:
                    values[key] = value.item() if isinstance(value, Tensor) else value
            slots.append(values)
        for values, parameter in zip(slots, held.parameters, strict=True):
            has = held.optimizer.state.get(parameter, {})
            values.update({key: None for key in elements if not isinstance(has.get(key), Tensor)})
        return elements, slots

    def set_state(
        self, chunk: int, elements: Mapping[str, Tensor], slots: Sequence[Mapping[str, Any]]
    ) -> None:
        """Put what `state` gave in the place of a chunk's optimizer state.

        A slot without a number, where others have some, has no state at all.
        """
        held = self._chunks[chunk]
        if held.kind is None:
            return
        held.open = _OpenStep()
        slots = slots or [{}] * len(held.parameters)
        if len(slots) != len(held.parameters):
            raise UserError(f"chunk {chunk}: states of {len(slots)} parameters for {len(held.parameters)}")
        counted = any(value is not None for values in slots for value in values.values())
        held.optimizer.state.clear()
        for slot, parameter, values in zip(held.chunk.slots, held.parameters, slots, strict=True):
            if counted and all(value is None for value in values.values()):
                continue
            state = {
                key: flat[slot.offset : slot.offset + slot.numel].clone()
                for key, flat in elements.items()
                if not (key in values and values[key] is None)
            }
            state.update(
                {
                    key: held.kind.tensor(key, value)
                    for key, value in values.items()
                    if key not in elements and value is not None
                }
            )
            if state:
                held.optimizer.state[parameter] = state

    def open_step(self, chunk: int) -> tuple[dict[str, Tensor], list[bool], SlotValues] | None:
        """Copies of what an open step is made again from, or None where no step has yet been made.

        That is the `mean` so far and the `values` before it, and the element-wise state before it under
        "state." and its key; then in which slots anyone had a gradient, and each slot's state before it, as
        far as it is numbers (None: it is among the tensors).
        """
        step = self._chunks[chunk].open
        if not step.stepped:
            return None
        assert step.mean is not None
        assert step.trial.values is not None
        (state,) = step.trial.states
        tensors = {"mean": step.mean.clone(), "values": step.trial.values.clone()}
        tensors.update({f"state.{key}": values.clone() for key, values in state.elements.items()})
        numbers = [
            {key: value.item() if isinstance(value, Tensor) else value for key, value in slot.items()}
            for slot in state.slots
        ]
        return tensors, list(step.present), numbers

    def set_open_step(
        self, chunk: int, tensors: Mapping[str, Tensor], present: Sequence[bool], slots: SlotValues
    ) -> None:
        """Let the step go on that `open_step` described, after `set_values` and `set_state`."""
        held = self._chunks[chunk]
        assert held.kind is not None
        step = held.open = _OpenStep()
        step.mean, step.present, step.stepped = tensors["mean"].clone(), tuple(present), True
        elements = {
            key.removeprefix("state."): values.clone()
            for key, values in tensors.items()
            if key.startswith("state.")
        }
        numbers = [
            {key: None if value is None else held.kind.tensor(key, value) for key, value in slot.items()}
            for slot in slots
        ]
        step.trial = Trial(tensors["values"].clone(), [SavedState(elements, numbers)])

    def _group_index(self, chunk: Chunk) -> int | None:
        group = self.layout.groups[chunk.group]
        if not group.trainable or not group.settings:
            return None
        if not (group.settings.isdigit() and int(group.settings) < len(self._groups)):
            raise UserError(
                f"chunk {chunk.id} is of param group {group.settings!r}; there are {len(self._groups)}"
            )
        return int(group.settings)

    def _settings(self, group: Mapping[str, Any]) -> Settings:
        """A param group as it was sent, in the form that torch has it, for a CPU."""
        settings = {key: _torch_value(key, value) for key, value in group.items() if key != "params"}
        for key in ("capturable", "differentiable"):  # of graphs on the worker's device: nothing here
            if settings.get(key):
                settings[key] = False
        if "fused" in settings:
            has = self._class.__name__ in _FUSED
            left_to_torch = settings["fused"] is None and not settings.get("foreach")
            if settings["fused"] and not has:
                settings["fused"] = None
            elif self._fused and left_to_torch and has:
                settings["fused"] = True
        return settings


def _torch_value(key: str, value: Any) -> Any:
    """A hyperparameter that came as MessagePack; raises UserError for what is no number or a few of them."""
    if isinstance(value, (list, tuple)):
        return tuple(_torch_value(key, part) for part in value)
    if not isinstance(value, _PLAIN):
        raise UserError(f"hyperparameter {key!r} is a {type(value).__name__}, and not a plain number")
    return value


def _check_alike(settings: Settings, before: Settings) -> None:
    """Raise UserError where a hyperparameter is gone, or has become something of another kind."""
    for key, value in before.items():
        if key not in settings or not _is_alike(settings[key], value):
            raise UserError(f"hyperparameter {key!r} was {value!r} and is now {settings.get(key)!r}")


def _is_alike(now: Any, before: Any) -> bool:
    if isinstance(before, tuple):
        return isinstance(now, tuple) and len(now) == len(before) and all(map(_is_alike, now, before))
    if before is None or isinstance(before, str):
        return not isinstance(now, tuple)
    return isinstance(now, (int, float)) or (now is None and isinstance(before, bool))


def _make(
    class_: type[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], settings: Settings
) -> torch.optim.Optimizer:
    """An optimizer of `parameters` in one param group, which holds exactly `settings`."""
    try:
        taken = inspect.signature(class_).parameters
        # A group also holds what is no argument, such as what a scheduler puts there.
        made = class_(list(parameters), **{key: value for key, value in settings.items() if key in taken})
    except Exception as error:  # whatever an optimizer raises on settings that are not its own
        raise UserError(
            f"{class_.__name__} cannot be made with the hyperparameters given: "
            f"{type(error).__name__}: {error}".splitlines()[0]
        ) from None
    made.param_groups[0].update(settings)
    return made


def _probe(
    class_: type[torch.optim.Optimizer], optimizer: torch.optim.Optimizer, settings: Settings, dtype: str
) -> _Kind:
    """Find what the optimizer keeps; raises UserError if it is not element-wise."""
    try:
        elementwise = elementwise_keys(optimizer)
        parameter = nn.Parameter(torch.zeros(2, dtype=getattr(torch, dtype)))
        trial = _make(class_, [parameter], settings)
        parameter.grad = torch.ones_like(parameter)
        trial.step()
    except PrepareError as error:
        raise UserError(f"outside the script it cannot be run: {error}") from None
    dtypes = {key: value.dtype for key, value in trial.state[parameter].items() if isinstance(value, Tensor)}
    return _Kind(elementwise, {**dict.fromkeys(elementwise, parameter.dtype), **dtypes})


def _unfuse_mixed(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """torch's fused SGD takes parameters of which all have a momentum, or none: where some have their first
    gradient, this step is made without it."""
    (group,) = optimizer.param_groups
    if group.get("fused") and group.get("momentum"):
        have = {"momentum_buffer" in optimizer.state.get(each, {}) for each in group["params"]}
        group["fused"] = len(have) < 2


def _unfuse(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Switch off the fused kernel: torch's fused SGD for CPUs (2.13) steps only part of half-precision
    tensors.

    It changes only the elements behind the last full vector.
    """
    (group,) = optimizer.param_groups
    if group.get("fused"):
        group["fused"] = False


def warm_up() -> None:
    """Have torch load what optimizers need at their first step.

    These are 800 modules, which take a second or two of a core, several on a busy machine. Others would wait
    for them.
    """
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.0).step()


def _nothing() -> None:
    pass
