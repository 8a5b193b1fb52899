"""The user's optimizer outside the script, at a shard or in a node's CPU side: one torch optimizer a chunk.

Chunks step one by one, so that one can be sent while the next is stepped. Nothing is unpickled:
hyperparameters come as plain numbers, and an optimizer is known by its class's name. The class is one of
torch.optim's, or the one that the shard's operator has configured or the node's own script imports. An
optimizer that is not element-wise steps tensors of the parameters' own shapes, which the layout has.
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
from atoll.chunks import Chunk, ChunkMap, ParameterSpec, Slot
from atoll.core.errors import UserError
from atoll.core.optimizerkind import OptimizerKind
from atoll.core.scriptmodule import module_of
from atoll.tensors.binding import BoundChunk
from atoll.tensors.chunkstate import SavedState
from atoll.tensors.compensation import Origins
from atoll.tensors.elementwise import NotElementwiseError, begin_training, elementwise_state_keys
from atoll.tensors.optimizer import ChunkOptimizer, StepHooks
from atoll.tensors.packing import PACKED, pack, unpack
from atoll.tensors.paramgroups import GroupSettings, ParamGroups
from atoll.tensors.stephooks import AroundStep
from atoll.tensors.stepunit import tensor_bytes

SlotValues: TypeAlias = list[dict[str, Any]]  # for each slot, its states that are one number

_ALLOWED = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
    "Adafactor", "Muon",  # by whole tensors; an old torch has no Muon
)  # fmt: skip
_MOST_STATES = 64  # bytes an element of a state from outside, where whole tensors are stepped
_HALF = (torch.float16, torch.bfloat16)


def full_name(class_: type) -> str:
    """Return a class's name as a Setup gives it: "torch.optim.adamw.AdamW"."""
    return f"{module_of(class_)}.{class_.__qualname__}"


def optimizer_class(name: str, configured: str = "") -> type[torch.optim.Optimizer]:
    """Return the class called `name` (see `full_name`).

    `configured` is the "package.module:Class" that the shard's operator allows, or that a node's own script
    uses; no other module is imported. Raises UserError for other classes that are not torch.optim's.
    """
    for allowed in _ALLOWED:
        class_: type[torch.optim.Optimizer] | None = getattr(torch.optim, allowed, None)
        if class_ is not None and name in (full_name(class_), f"torch.optim.{allowed}"):
            return class_
    if configured:
        own = _import(configured)
        if name in (full_name(own), configured.replace(":", ".")):
            return own
    but = f", and server.optimizer names {configured!r}" if configured else ""
    raise UserError(
        f"cannot run the optimizer {name!r} outside the script: it is none of torch.optim's that "
        f"need no closure ({', '.join(_ALLOWED)}){but}; take one of these, or with a parameter server set "
        "server.optimizer to its 'package.module:Class' on every shard"
    )


def own_path(class_: type[torch.optim.Optimizer], strategy: str) -> str:
    """Return the "package.module:Class" by which another process can import the script's optimizer class.

    Empty for torch.optim's classes. Raises PrepareError for a class that is defined in a function, or in a
    script that trains when it is imported.
    """
    if any(getattr(torch.optim, allowed, None) is class_ for allowed in _ALLOWED):
        return ""
    module = module_of(class_)
    if module == "__main__" or "<locals>" in class_.__qualname__:
        where = "in the script itself" if module == "__main__" else "within a function"
        facts = {"run.strategy": strategy, "steps": "home", "optimizer": class_.__name__, "defined": where}
        check("prepare", Choices(facts))
    return f"{module}:{class_.__qualname__}"


def _import(path: str) -> type[torch.optim.Optimizer]:
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a script may do anything when it is imported
        raise UserError(f"the optimizer {path!r} cannot be imported here: {error}") from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(f"the optimizer {path!r} is no subclass of torch.optim.Optimizer")
    return found


@dataclass(frozen=True)
class _Kind:
    """The kinds of state that a param group's optimizer keeps, found by stepping two elements.

    `by_tensor`: it steps whole tensors, and its states may have any form.
    """

    elementwise: set[str]
    dtypes: Mapping[str, torch.dtype]  # of every state that is a tensor
    by_tensor: bool = False

    def tensor(self, key: str, value: Any) -> Any:
        """Return a slot's number in the optimizer's form; raises UserError if `value` is not a number."""
        if not isinstance(value, (int, float)):
            raise UserError(f"state {key!r} is a {type(value).__name__}, and not a number")
        return torch.tensor(value, dtype=self.dtypes[key]) if key in self.dtypes else value


class Trial:
    """A saved copy of a chunk's values and optimizer state; its memory is used again by the next copy."""

    def __init__(self, values: Tensor | None = None, states: Sequence[SavedState] = ()) -> None:
        """Hold the copy `values` and `states`, or only their memory."""
        self.values, self.states = values, states

    def begin(self, flat: Tensor, stepper: ChunkOptimizer) -> None:
        """Save the chunk's values `flat` and its state in `stepper`."""
        self.values = flat.clone() if self.values is None else self.values.copy_(flat)
        self.states = stepper.save(self.states)

    def drop(self, flat: Tensor, stepper: ChunkOptimizer) -> None:
        """Restore the values and the state saved by `begin`."""
        assert self.values is not None
        flat.copy_(self.values)
        stepper.rewind(self.states)


class _OpenStep:
    """A chunk's latest step while more contributions may join it; its memory is used again by later steps.

    Each new contribution undoes the step and makes it again with the new mean.
    """

    def __init__(self) -> None:
        self.mean: Tensor | None = None  # mean so far; None: no contribution had a gradient for this chunk
        self.present: tuple[bool, ...] = ()  # by slot: a contribution had a gradient
        self.trial = Trial()
        self.stepped = False  # the step has been made, and the trial holds the state before it
        self._memory: Tensor | None = None

    def clear(self) -> None:
        """Close the step."""
        self.mean, self.present, self.stepped = None, (), False

    def add(self, gradients: Tensor, present: tuple[bool, ...], part: float) -> None:
        """Move the mean by the share `part` towards `gradients`; missing gradients count as zeros."""
        if self.mean is None and part == 1:
            self.mean, self.present = gradients, present  # no copy: `mean` is only read
            return
        if self._memory is None:
            self._memory = torch.empty_like(gradients)
        if self.mean is None:
            self.mean, self.present = torch.mul(gradients, part, out=self._memory), present
            return
        self.mean = torch.lerp(self.mean, gradients, part, out=self._memory)
        self.present = tuple(map(any, zip(self.present, present, strict=True)))


class Scratch:
    """Named pieces of memory, each as large as its largest use so far; one chunk at a time uses them."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(memory.nbytes for memory in self._memory.values())

    def part(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory for `numel` values, 1-D, not initialised."""
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < numel * dtype.itemsize:
            memory = self._memory[name] = torch.empty(numel * dtype.itemsize, dtype=torch.uint8)
        return memory[: numel * dtype.itemsize].view(dtype)


class _HeldChunk:
    """One chunk with its optimizer and stepper; `settings` is None for a chunk that is not trained.

    `specs` are the layout's parameters if the optimizer steps whole tensors, else None: an element-wise
    update does not depend on shapes.
    """

    def __init__(
        self,
        chunk: Chunk,
        class_: type[torch.optim.Optimizer] = torch.optim.Optimizer,
        settings: GroupSettings | None = None,
        specs: Sequence[ParameterSpec] | None = None,
    ) -> None:
        dtype = getattr(torch, chunk.dtype)
        self.chunk = chunk
        self.parameters = [
            nn.Parameter(
                torch.zeros(slot.numel, dtype=dtype) if specs is None else _shaped(slot, specs, dtype),
                requires_grad=dtype.is_floating_point,
            )
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
        """Move the values to new memory."""
        self.bound.move()
        self.flat = self.bound.flat[: self.chunk.extent]

    def begin(self, kind: _Kind) -> None:
        """Prepare the chunk for steps; `kind` describes its param group's optimizer state."""
        self.kind = kind
        hooks = StepHooks(before=_nothing, accept=lambda _: True, after=_nothing)
        self.stepper = ChunkOptimizer(
            self.optimizer,
            [self.bound],
            kind.elementwise,
            hooks,
            lambda _: self._given(),
            by_tensor=kind.by_tensor,
        )
        if isinstance(self.optimizer, torch.optim.SGD):  # after the stepper's hooks: it must see segments
            AroundStep(self.optimizer, _unfuse if self.flat.dtype in _HALF else _unfuse_mixed)

    def step(self, gradients: Tensor, present: tuple[bool, ...]) -> None:
        self._gradients = gradients, present
        try:
            self.optimizer.step()
        finally:
            self._gradients = None
            self.stepper.restore()
            for segment in self.stepper.segments:  # gradients lie in memory that the caller uses again
                segment.forget_gradient()
            _set(self.optimizer, self.settings)

    def _given(self) -> tuple[Tensor, tuple[bool, ...]]:
        assert self._gradients is not None
        return self._gradients

    def contribute(self, gradients: Tensor, present: tuple[bool, ...], part: float, closes: bool) -> None:
        """Step with one more contribution's share in the mean, after undoing the open step, if any."""
        step = self.open
        if part == 1 and closes and not step.stepped:  # the only contribution: no copy is needed
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

    def states(self) -> list[dict[str, Any]]:
        """Return each slot's state, not copied."""
        return [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]

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
        """Copy the values and the state of `other`."""
        self.open.clear()
        self.flat.copy_(other.flat)
        self.stepper.copy(other.stepper)

    def apply(self, settings: GroupSettings) -> None:
        """Use `settings` in the next step."""
        if settings is not self.settings:
            _set(self.optimizer, settings)
            self.settings = settings


class ShardOptimizer:
    """The chunks with ids `held` of a layout, and their optimizers, at one shard or node.

    `optimizers` are those of the model: each steps the param groups that follow those of the one before.
    `hyperparameters` and `fused` are as in `ParamGroups`. SGD never steps half precision by a fused kernel,
    even if a script asks for one: the script's device may have other kernels. All tensors given and returned
    are flat, of a chunk's extent and on the CPU. Raises UserError for an optimizer that cannot run here.

    Attributes:
        layout: the layout.
        param_groups: the settings with which steps are made.
        origins: for delay compensation, the values from which contributors went on; None without it.
    """

    def __init__(
        self,
        layout: ChunkMap,
        held: Sequence[int],
        optimizers: Sequence[OptimizerKind],
        hyperparameters: Sequence[Mapping[str, Any]],
        *,
        configured: str = "",
        fused: bool = False,
    ) -> None:
        self.layout = layout
        groups = sum(each.groups for each in optimizers)
        if groups != len(hyperparameters):
            raise UserError(
                f"hyperparameters of {len(hyperparameters)} param groups, and optimizers of {groups}"
            )
        classes = [optimizer_class(each.name, configured) for each in optimizers]
        self._optimizer_of = [number for number, each in enumerate(optimizers) for _ in range(each.groups)]
        classes_of = [classes[number] for number in self._optimizer_of]  # by param group
        self.param_groups = ParamGroups(classes_of, hyperparameters, fused=fused)
        settings = self.param_groups.settings
        self.origins: Origins | None = None
        self._group_of: dict[int, int] = {}
        self._chunks: dict[int, _HeldChunk] = {}
        kinds: dict[tuple[int, str], _Kind] = {}
        for id_ in held:
            chunk = layout.chunks[id_]
            group = _group_index(layout, chunk, len(settings))
            if group is None:
                self._chunks[id_] = _HeldChunk(chunk)
                continue
            by_tensor, class_ = optimizers[self._optimizer_of[group]].by_tensor, classes_of[group]
            specs = layout.specs if by_tensor else None
            item = self._chunks[id_] = _HeldChunk(chunk, class_, settings[group], specs)
            self._group_of[id_] = group
            if by_tensor:
                item.begin(_Kind(set(), {PACKED: torch.uint8}, by_tensor=True))
                continue
            if (group, chunk.dtype) not in kinds:
                kinds[group, chunk.dtype] = _probe(class_, item.optimizer, settings[group], chunk.dtype)
            item.begin(kinds[group, chunk.dtype])

    @property
    def chunks(self) -> tuple[int, ...]:
        """The ids of the chunks held."""
        return tuple(self._chunks)

    def slots(self, chunk: int) -> int:
        """Return the number of parameters in a chunk."""
        return len(self._chunks[chunk].chunk.slots)

    def nbytes(self, chunk: int) -> int:
        """Return the bytes of a chunk's values, which are as many as its gradients'."""
        return self._chunks[chunk].nbytes

    def dtype(self, chunk: int) -> torch.dtype:
        return self._chunks[chunk].flat.dtype

    def trains(self, chunk: int, optimizer: int | None = None) -> bool:
        """True if this one of the optimizers steps the chunk; None: if any does."""
        group = self._group_of.get(chunk)
        return group is not None and optimizer in (None, self._optimizer_of[group])

    def weight_of(self, chunk: int, weights: Sequence[float], otherwise: float) -> float:
        """Return the weight of a chunk's gradients: of `weights`, which has one for each optimizer, that of
        the optimizer that steps the chunk; `otherwise` if there is none."""
        group = self._group_of.get(chunk)
        place = len(weights) if group is None else self._optimizer_of[group]
        return weights[place] if place < len(weights) else otherwise

    def step(
        self,
        chunk: int,
        gradients: Tensor,
        present: Iterable[bool | int],
        *,
        settings: Sequence[GroupSettings] | None = None,
    ) -> None:
        """Step the slots of one chunk that are `present` with their part of `gradients`.

        `settings` are those of all param groups (`ParamGroups.settings_of`); None: the present ones. Threads
        may step different chunks at once.
        """
        held, here = self._chunks[chunk], tuple(bool(flag) for flag in present)
        held.open.clear()
        if not any(here):  # no parameter would change, nor any step count
            return
        groups = self.param_groups.settings if settings is None else settings
        held.apply(groups[self._group_of[chunk]])
        held.step(gradients, here)

    @contextlib.contextmanager
    def undone(self, chunk: int, scratch: Scratch) -> Iterator[None]:
        """Undo, at the end of the `with` block, all steps of a trained chunk inside the block.

        `scratch` holds the chunk's former values as "values" and its states as "state.KEY".
        """
        with self._chunks[chunk].undone(scratch):
            yield

    def copy(self, chunk: int, other: ShardOptimizer) -> None:
        """Copy a trained chunk's values and state from `other`, which has an equal layout and optimizer.

        The chunk's next steps then equal those of `other`, bit for bit.
        """
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
    ) -> None:
        """Add one contribution to a chunk's open step, and make the step again with the new mean.

        Each step starts from the values and the state before the first contribution.

        Args:
            chunk: the chunk's id.
            gradients: the contribution's gradients, zeros in slots that are not `present`.
            present: by slot, whether the contribution has a gradient.
            part: the contribution's share of the weight so far.
            opens: the contribution is the step's first.
            closes: the contribution is the step's last.
        """
        held, here = self._chunks[chunk], tuple(bool(flag) for flag in present)
        if opens:
            held.open.clear()
        if part > 0 and (any(here) or held.open.mean is not None):
            held.apply(self.param_groups.settings[self._group_of[chunk]])
            held.contribute(gradients, here, part, closes)
        if closes:
            held.open.clear()

    def values(self, chunk: int) -> Tensor:
        """Return a chunk's values without a copy: the next step changes them."""
        return self._chunks[chunk].flat

    def base(self, chunk: int, opens: bool) -> Tensor:
        """Return, without a copy, the values that the next contribution's step starts from.

        `opens` is False for a contribution that joins the open step.
        """
        held = self._chunks[chunk]
        before = held.open.trial.values if held.open.stepped and not opens else None
        return held.flat if before is None else before

    def move(self, chunk: int) -> None:
        """Move a chunk to new memory, so that earlier results of `values` no longer change."""
        self._chunks[chunk].move()

    def set_values(self, chunk: int, values: Tensor) -> None:
        self._chunks[chunk].open.clear()
        self._chunks[chunk].flat.copy_(values)

    def state_dtypes(self, chunk: int) -> dict[str, torch.dtype]:
        """Return the dtype of each state that a chunk's optimizer keeps for each element ("exp_avg")."""
        kind = self._chunks[chunk].kind
        if kind is not None and kind.by_tensor:
            return {PACKED: torch.uint8}
        return {} if kind is None else {key: kind.dtypes[key] for key in sorted(kind.elementwise)}

    def state_bytes(self, chunk: int) -> dict[str, int]:
        """Return the bytes of each tensor of `state`; where whole tensors are stepped, of those kept now."""
        held, dtypes = self._chunks[chunk], self.state_dtypes(chunk)
        if PACKED in dtypes:
            return {PACKED: sum(map(tensor_bytes, held.states()))}
        return {key: held.chunk.extent * dtype.itemsize for key, dtype in dtypes.items()}

    def most_state_bytes(self, chunk: int) -> int:
        """Return an upper limit of the bytes of the tensors of `state`, for states from outside."""
        held = self._chunks[chunk]
        if held.kind is None or not held.kind.by_tensor:
            return sum(self.state_bytes(chunk).values())
        # Some states of each parameter's size, and some matrices over each dimension, as Shampoo has them.
        elements = sum(p.numel() + sum(size * size for size in p.shape) + 1 for p in held.parameters)
        return _MOST_STATES * elements

    def number_dtypes(self, chunk: int) -> dict[str, torch.dtype]:
        """Return the dtype of each one-number tensor that a chunk has for each parameter ("step")."""
        kind = self._chunks[chunk].kind
        rest = {} if kind is None or kind.by_tensor else kind.dtypes
        return {key: dtype for key, dtype in rest.items() if kind and key not in kind.elementwise}

    def state_dtype(self, chunk: int, key: str) -> torch.dtype:
        """Return the dtype of a tensor of `state`; raises UserError if there is none called `key`."""
        held, dtypes = self._chunks[chunk], self.state_dtypes(chunk)
        if key not in dtypes:
            name = "the optimizer" if held.kind is None else type(held.optimizer).__name__
            raise UserError(f"{name} keeps no state called {key!r} for each element")
        return dtypes[key]

    def state(self, chunk: int) -> tuple[dict[str, Tensor], SlotValues]:
        """Return copies of a chunk's element-wise states, flat, and the other states of each slot.

        For a slot that lacks an element-wise state, the flat tensor has zeros, and the slot has None for its
        key. Where whole tensors are stepped, all states are packed (packing.py).
        """
        held = self._chunks[chunk]
        elements: dict[str, Tensor] = {}
        slots: SlotValues = []
        if held.kind is None:
            return elements, [{} for _ in held.chunk.slots]
        if held.kind.by_tensor:
            return _packed(held.states())
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
        """Set a chunk's optimizer state to an earlier result of `state`.

        A slot without numbers gets no state if other slots have numbers.
        """
        held = self._chunks[chunk]
        if held.kind is None:
            return
        held.open = _OpenStep()
        slots = slots or [{}] * len(held.parameters)
        if len(slots) != len(held.parameters):
            raise UserError(f"chunk {chunk}: states of {len(slots)} parameters for {len(held.parameters)}")
        if held.kind.by_tensor:
            states = zip(held.parameters, _unpacked(elements, slots), strict=True)
            held.optimizer.state.clear()
            held.optimizer.state.update({parameter: state for parameter, state in states if state})
            return
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
        """Return copies of the inputs of a chunk's open step, or None if no open step has been made.

        Returns:
            The tensors "mean" (of the gradients so far), "values" (before the step) and "state.KEY"
            (element-wise states before the step); by slot, whether a contribution had a gradient; and each
            slot's numbers before the step, with None for states that are among the tensors.
        """
        step = self._chunks[chunk].open
        if not step.stepped:
            return None
        assert step.mean is not None
        assert step.trial.values is not None
        (state,) = step.trial.states
        tensors = {"mean": step.mean.clone(), "values": step.trial.values.clone()}
        kind = self._chunks[chunk].kind
        if kind is not None and kind.by_tensor:
            packed, words = _packed(state.slots)
            tensors.update({f"state.{key}": flat for key, flat in packed.items()})
            return tensors, list(step.present), words
        tensors.update({f"state.{key}": values.clone() for key, values in state.elements.items()})
        numbers = [
            {key: value.item() if isinstance(value, Tensor) else value for key, value in slot.items()}
            for slot in state.slots
        ]
        return tensors, list(step.present), numbers

    def set_open_step(
        self, chunk: int, tensors: Mapping[str, Tensor], present: Sequence[bool], slots: SlotValues
    ) -> None:
        """Restore a chunk's open step from `open_step`, after `set_values` and `set_state`."""
        held = self._chunks[chunk]
        assert held.kind is not None
        step = held.open = _OpenStep()
        step.mean, step.present, step.stepped = tensors["mean"].clone(), tuple(present), True
        elements = {
            key.removeprefix("state."): values.clone()
            for key, values in tensors.items()
            if key.startswith("state.")
        }
        if held.kind.by_tensor:
            step.trial = Trial(tensors["values"].clone(), [SavedState({}, _unpacked(elements, slots))])
            return
        numbers = [
            {key: None if value is None else held.kind.tensor(key, value) for key, value in slot.items()}
            for slot in slots
        ]
        step.trial = Trial(tensors["values"].clone(), [SavedState(elements, numbers)])


def _shaped(slot: Slot, specs: Sequence[ParameterSpec], dtype: torch.dtype) -> Tensor:
    """Return zeros with the shape and strides of a slot's parameter.

    Raises UserError for a layout whose shapes do not fit its slots.
    """
    spec = specs[slot.parameter] if 0 <= slot.parameter < len(specs) else None
    if spec is None or spec.numel != slot.numel or not spec.is_dense:
        raise UserError(
            f"the layout's parameter {slot.parameter} does not fit its slot of {slot.numel} values"
        )
    if not spec.strides:
        return torch.zeros(spec.shape, dtype=dtype)
    return torch.empty_strided(spec.shape, spec.strides, dtype=dtype).zero_()


def _packed(states: Sequence[dict[str, Any]]) -> tuple[dict[str, Tensor], SlotValues]:
    """Return states as `ShardOptimizer.state` does where whole tensors are stepped."""
    flat, words = pack(states)
    return ({PACKED: flat} if flat.numel() else {}), words


def _unpacked(elements: Mapping[str, Tensor], words: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the states that `_packed` has packed."""
    return unpack(elements.get(PACKED, torch.empty(0, dtype=torch.uint8)), words)


def _make(
    class_: type[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], settings: GroupSettings
) -> torch.optim.Optimizer:
    """Return an optimizer of `parameters` in one param group, which holds all of `settings`."""
    try:
        arguments = inspect.signature(class_).parameters
        # A param group holds more than arguments: a scheduler adds keys.
        optimizer = class_(
            list(parameters), **{key: value for key, value in settings.items() if key in arguments}
        )
    except Exception as error:  # an optimizer may raise anything for settings that it does not know
        raise UserError(
            f"{class_.__name__} cannot be made with the hyperparameters given: "
            f"{type(error).__name__}: {error}".splitlines()[0]
        ) from None
    _set(optimizer, settings)
    return optimizer


def _set(optimizer: torch.optim.Optimizer, settings: GroupSettings) -> None:
    """Set the values of the only param group. A value that the optimizer keeps as a tensor stays one.

    What its own code has added is taken out, such as a count of steps: the worker's group has it.
    """
    (group,) = optimizer.param_groups
    for key in [key for key in group if key not in settings and key not in optimizer.defaults]:
        if key != "params":
            del group[key]
    for key, value in settings.items():
        present = group.get(key)
        if isinstance(present, Tensor) and isinstance(value, (int, float)):
            value = torch.full_like(present, value, requires_grad=False)
        group[key] = value


def _probe(
    class_: type[torch.optim.Optimizer], optimizer: torch.optim.Optimizer, settings: GroupSettings, dtype: str
) -> _Kind:
    """Find the kinds of state that an optimizer of flat parameters keeps; the worker has tried that it is
    element-wise. Raises UserError if it cannot be stepped."""
    (group,) = optimizer.param_groups
    try:
        elementwise = elementwise_state_keys(optimizer, group, torch.device("cpu"), trusted=True)
        parameter = nn.Parameter(torch.zeros(2, dtype=getattr(torch, dtype)))
        trial = _make(class_, [parameter], settings)
        parameter.grad = torch.ones_like(parameter)
        begin_training(trial)
        trial.step()
    except NotElementwiseError as error:
        raise UserError(f"outside the script it cannot be run: {error}") from None
    dtypes = {key: value.dtype for key, value in trial.state[parameter].items() if isinstance(value, Tensor)}
    return _Kind(elementwise, {**dict.fromkeys(elementwise, parameter.dtype), **dtypes})


def _unfuse_mixed(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Switch off the fused kernel for a step in which only some parameters have a momentum buffer.

    torch's fused SGD accepts only parameters of which all have one, or none.
    """
    (group,) = optimizer.param_groups
    if group.get("fused") and group.get("momentum"):
        have = {"momentum_buffer" in optimizer.state.get(each, {}) for each in group["params"]}
        group["fused"] = len(have) < 2


def _unfuse(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Switch off the fused kernel for half precision.

    torch's fused SGD for CPUs (2.13) steps only those half-precision elements that follow the last full
    vector.
    """
    (group,) = optimizer.param_groups
    if group.get("fused"):
        group["fused"] = False


def warm_up() -> None:
    """Import the modules that torch loads at a process's first optimizer step.

    They are 800, and take a second or two of a core, more on a busy machine. Workers would wait for the
    process meanwhile.
    """
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.0).step()


def _nothing() -> None:
    pass


def _group_index(layout: ChunkMap, chunk: Chunk, groups: int) -> int | None:
    """Return the index of the param group, of so many, that steps a chunk; None if nothing does."""
    group = layout.groups[chunk.group]
    if not group.trainable or not group.settings:
        return None
    if not (group.settings.isdigit() and int(group.settings) < groups):
        raise UserError(f"chunk {chunk.id} is of param group {group.settings!r}; there are {groups}")
    return int(group.settings)
