"""The optimizer's state of chunks in plain torch's form: `optimizer.state`, `state_dict` and
`load_state_dict`. Source: docs/memory.md, "The step"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.memory.gradients import TrainedChunk
from atoll.memory.interrupts import uninterrupted
from atoll.memory.stepqueue import Settings, StepQueue
from atoll.tensors.chunkstate import State
from atoll.tensors.lazy import LazyTensor, read_whole
from atoll.tensors.ondemand import StatesOnDemand
from atoll.tensors.packing import moved
from atoll.tensors.stephooks import Handle
from atoll.tensors.stepunit import tensor_bytes
from atoll.tensors.torch_compat import tree_map_only


class States(Protocol):
    """The states of a chunk's parameters, as the script sees them.

    Implemented by `ChunkStates`, and for a chunk of which other members step a part by
    `foreign.SharedStates`.
    """

    trained: TrainedChunk
    group: int  # number of the optimizer's param group

    def numbers(self, slot: int) -> State:
        """Return copies of the state kept for a parameter as a whole."""

    def kept(self, slot: int) -> dict[str, torch.dtype]:
        """Return the real dtypes of the element-wise states, by key."""

    def elements(self, slot: int, key: str) -> Tensor:
        """Return a copy of the element-wise state `key`, with the parameter's shape and strides."""

    def load(self, slot: int, state: State, settings: Settings | None = None) -> None:
        """Load a parameter's state from plain torch's form."""


class PlainState:
    """The optimizer's `state` as scripts see it, for the parameters of `chunks`. Other parameters keep plain
    states.

    Args:
        chunks: the states, by chunk.
        steps: the chunks' steps, which a reader waits for.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, chunks: Mapping[int, States], steps: StepQueue
    ) -> None:
        self._optimizer, self._steps = optimizer, steps
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._slots = {
            id(parameter): (states, index)
            for states in chunks.values()
            for index, parameter in enumerate(states.trained.parameters)
        }
        # In the order of the param groups, which is plain torch's order of states.
        parameters = [parameter for group in self._groups for parameter in group if self.has(parameter)]
        self._shown = StatesOnDemand(parameters, self._plain)
        self._held: set[nn.Parameter] = set()  # parameters whose states were held before a `state_dict`
        self._is_loading = False  # a `load_state_dict` runs whose states have been taken

    def has(self, parameter: nn.Parameter) -> bool:
        """True if a parameter's state lies in a chunk."""
        return id(parameter) in self._slots

    def watch(self) -> list[Handle]:
        """Follow the optimizer's `state_dict` and `load_state_dict`, until the handles are removed."""
        optimizer = self._optimizer
        return [
            optimizer.register_state_dict_pre_hook(lambda _: self._before_state_dict()),
            optimizer.register_state_dict_post_hook(lambda _, __: self._shown.keep(self._held)),
            optimizer.register_load_state_dict_pre_hook(lambda _, state: self._load(state)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._loaded()),
        ]

    def take_over(self) -> None:
        """Move into payloads the states that the script has put into `optimizer.state`, or changed there."""
        if self._optimizer.state is not self._shown:  # assigned by the script: states not in it do not exist
            self._show(whole=True)
        for parameter, state in self._shown.taken().items():
            states, slot = self._slots[id(parameter)]
            states.load(slot, state)

    def give_back(self) -> None:
        """Leave the optimizer a plain state with everything in it."""
        self.take_over()
        self._optimizer.state = defaultdict(dict, self._shown.items())

    def leave(self) -> None:
        """Leave the optimizer states whose tensors are read, in host memory, where they lie when they are
        used."""
        self.take_over()
        self._shown.fill(self._left)
        shown: Any = self._shown
        self._optimizer.state = defaultdict(dict, dict.items(shown))  # without a fetch

    def lose(self, why: str) -> None:
        """Leave the optimizer without its state: who reads the state gets a UserError with `why`."""
        self._shown.lose(why)

    def nbytes(self) -> int:
        """Return the bytes of all states in plain torch's form, but for tensors of no dimension. No step may
        be under way."""
        return sum(
            states.trained.chunk.slots[slot].numel * sum(kept.itemsize for kept in states.kept(slot).values())
            + tensor_bytes(states.numbers(slot))
            for states, slot in self._slots.values()
        )

    def _show(self, *, whole: bool) -> None:
        self._shown.become(self._optimizer.state, whole=whole)
        shown: Any = self._shown
        self._optimizer.state = shown

    def _stepped(self, parameter: nn.Parameter) -> tuple[States, int]:
        """Return the states of a parameter's chunk and its slot there, after the chunk's outstanding step."""
        states, slot = self._slots[id(parameter)]
        self._steps.wait_stepped(states.trained.chunk.id)
        return states, slot

    @uninterrupted
    def _plain(self, parameter: nn.Parameter) -> State:
        """Return a copy of one parameter's state in plain torch's form."""
        states, slot = self._stepped(parameter)
        elements = {key: _elements(states, slot, key) for key in states.kept(slot)}
        return {**self._numbers(states, slot), **elements}

    def _lazy(self, parameter: nn.Parameter) -> State:
        """Return one parameter's state with tensors that are copied when they are read."""
        states, slot = self._stepped(parameter)
        lazy = {
            key: LazyTensor(
                partial(self._read, parameter, key),
                parameter.shape,
                states.trained.dtype_of(slot, dtype),
                states.trained.device,
            )
            for key, dtype in states.kept(slot).items()
        }
        return {**self._numbers(states, slot), **lazy}

    def _left(self, parameter: nn.Parameter) -> State:
        states, slot = self._stepped(parameter)
        lazy = {
            key: LazyTensor(
                partial(states.elements, slot, key), parameter.shape, states.trained.dtype_of(slot, dtype)
            )
            for key, dtype in states.kept(slot).items()
        }
        return {**states.numbers(slot), **lazy}

    @uninterrupted
    def _read(self, parameter: nn.Parameter, key: str) -> Tensor:
        if self._steps.is_closed:
            kept: Tensor = self._optimizer.state[parameter][key]
            return kept.clone()
        return _elements(*self._stepped(parameter), key)

    def _numbers(self, states: States, slot: int) -> State:
        """Return the state kept for a parameter as a whole. With fused or capturable steps its tensors are on
        the parameter's device, as in plain torch."""
        group = self._optimizer.param_groups[states.group]
        device = states.trained.device
        if not (group.get("fused") or group.get("capturable")):
            return {key: moved(value, device) for key, value in states.numbers(slot).items()}
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in states.numbers(slot).items()}

    def _before_state_dict(self) -> None:
        self._held = self._shown.held()
        self._shown.fill(self._lazy)

    @uninterrupted
    def _load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take the chunks' states out of a state_dict, in their own precision, before `load_state_dict`;
        return the rest."""
        self._steps.wait_all()
        saved: list[Sequence[Any]] = [list(group["params"]) for group in state_dict["param_groups"]]
        if list(map(len, saved)) != list(map(len, self._groups)):
            return state_dict  # torch raises the error
        rest = dict(state_dict["state"])  # torch keeps these tensors themselves
        for indices, parameters, group in zip(saved, self._groups, state_dict["param_groups"], strict=True):
            for index, parameter in zip(indices, parameters, strict=True):
                if self.has(parameter):
                    states, slot = self._slots[id(parameter)]
                    states.load(slot, rest.pop(index, {}), group)
        self._is_loading = True
        return {**state_dict, "state": tree_map_only(Tensor, read_whole, rest)}

    def _loaded(self) -> None:
        """Show the chunks' states again, after `load_state_dict` has assigned a plain `state`."""
        if self._is_loading:
            self._is_loading = False
            self._show(whole=False)


def _elements(states: States, slot: int, key: str) -> Tensor:
    """Return a copy of an element-wise state on the parameter's device."""
    return states.elements(slot, key).to(states.trained.device)
