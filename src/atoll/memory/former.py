"""A model in tiers that is prepared anew, since it has changed: what its old tiers hold, until new ones have
taken it.

Each parameter whose value lies in the old tiers is an `InitialisedParameter`, whose room the old tiers are.
The optimizers' states are tensors that are read from there when they are used. So the new tiers take values
and states one parameter after another, and nothing of the model is ever whole on the device. Source:
docs/memory.md, "In a session".
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.memory import Budgets
from atoll.memory.gradients import TrainedChunk, own_gradient, set_own_gradient
from atoll.memory.home import Home
from atoll.memory.initialising import (
    InitialisedParameter,
    Place,
    end_place,
    leave_in,
    no_value,
    room_place,
)
from atoll.memory.parameters import give_back, place_of
from atoll.memory.spillfile import Piece, SpillFile
from atoll.tensors.binding import run_of
from atoll.tensors.lazy import LazyTensor, read_whole
from atoll.tensors.packing import moved
from atoll.tensors.torch_compat import AsPlainTensors, tree_leaves, tree_map_only, version_of

_GONE = (
    "the value of this parameter is gone: session.prepare was called again for a changed model, and failed; "
    "go on from a checkpoint"
)


class _OldTiers(NamedTuple):
    home: Home
    end: Callable[[], None]
    part: Callable[[], None]


class Former:
    """The old tiers as the room of the parameters that lie there (`initialising.Room`).

    Args:
        home: holds the values.
        chunks: the chunks whose parameters lie there.
        gradients: parameters that have a gradient there, each with a function that reads a copy of it.
        end: ends the old tiers; with members, a collective of all.
        part: ends this member's part of them alone.
    """

    def __init__(
        self,
        home: Home,
        chunks: Iterable[TrainedChunk],
        gradients: Iterable[tuple[nn.Parameter, Callable[[], Tensor]]],
        end: Callable[[], None],
        part: Callable[[], None],
    ) -> None:
        self._old = [_OldTiers(home, end, part)]  # empty once they have ended: parameters outlive them
        self._at: dict[Place, tuple[TrainedChunk, int]] = {}  # places whose value lies in the old tiers
        self._versions: dict[Place, int] = {}  # of parameters with their value, as it was brought
        for each in chunks:
            for slot, parameter in enumerate(each.parameters):
                if place_of(parameter) is not None:
                    give_back(parameter, torch.empty(0, dtype=each.likes[slot].dtype, device=each.device))
                    place = leave_in(self, parameter, each.likes[slot])
                    self._at[place] = each, slot
        self._with_gradient: list[weakref.ref[nn.Parameter]] = []
        for parameter, read in gradients:
            self._with_gradient.append(weakref.ref(parameter))
            layout = parameter.shape, parameter.dtype, parameter.device, parameter.stride()
            set_own_gradient(parameter, LazyTensor(read, *layout))

    @property
    def spilled(self) -> int:
        """0: new tiers take no room of the old ones."""
        return 0

    def is_agreed(self, place: Place) -> bool:
        """True if the value lies in the old tiers: all members have it."""
        return place in self._at

    def adopt(self, parameter: nn.Parameter) -> None:
        """Leave a copy of one of the parameters as it is: plain."""

    def pin(self, parameter: InitialisedParameter) -> None:
        """Bring the value into the parameter. It stays there until as many `unpin` as `pin`."""
        place = room_place(parameter)
        if place.absent:
            value = self.value(parameter).to(place.device)
            with torch.no_grad(), AsPlainTensors():
                parameter.data = value
                self._versions[place] = version_of(parameter)
            place.absent, place.copy = False, None
        place.pins += 1

    def unpin(self, parameter: InitialisedParameter) -> None:
        """End a `pin`. A value that was changed stays in its parameter, and one that has left the model."""
        place = room_place(parameter)
        place.pins -= 1
        if place.pins or place not in self._at:
            return
        with torch.no_grad(), AsPlainTensors():
            if version_of(parameter) == self._versions.get(place):
                parameter.data = no_value(place)
                place.absent = True

    def value(self, parameter: InitialisedParameter) -> Tensor:
        """Return a copy of the value in host memory."""
        place = room_place(parameter)
        with torch.inference_mode(False), torch.no_grad(), AsPlainTensors():
            if not place.absent:
                return parameter.data.to("cpu", copy=True)
            if place.copy is not None:
                return place.copy.clone()
            value = torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
            self._read(place, run_of(value))
            return value

    def copy_into(self, parameter: InitialisedParameter, into: Tensor) -> None:
        """Copy the value into `into`, 1-D and contiguous, in the order of memory."""
        place = room_place(parameter)
        with torch.inference_mode(False), torch.no_grad(), AsPlainTensors():
            if not place.absent:
                into.copy_(run_of(parameter.data))
            elif place.copy is not None:
                into.copy_(run_of(place.copy))
            else:
                self._read(place, into)

    def _read(self, place: Place, into: Tensor) -> None:
        if place not in self._at:
            raise UserError(_GONE)
        each, slot = self._at[place]
        with self._old[0].home.values(each) as values:
            into.copy_(each.run(values, slot))

    def release(self, parameter: InitialisedParameter) -> None:
        """Make the parameter a plain `nn.Parameter` without a value."""
        place = room_place(parameter)
        self._at.pop(place, None)
        with torch.no_grad():
            end_place(parameter, no_value(place))

    # The end, once the changed model is prepared

    def give_back(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Make all parameters, gradients and states of `optimizers` plain: the changed model lies on the
        device as a whole."""
        self._read_gradients()
        for place in list(self._at):
            parameter = place.parameter()
            if isinstance(parameter, InitialisedParameter):
                value = self.value(parameter).to(place.device)
                with torch.no_grad():
                    end_place(parameter, value)
            self._at.pop(place)
        for optimizer in optimizers:
            _read_states(optimizer)

    def close(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """End the old tiers, when new ones have taken the model. With members, all of them call this.

        A value that nobody has taken is of a parameter that has left the model. It lies in ordinary host
        memory, for as long as the script keeps the parameter. Gradients and states of `optimizers` that
        nobody has taken are plain ones.
        """
        self._read_gradients()
        for place in list(self._at):
            parameter = place.parameter()
            if isinstance(parameter, InitialisedParameter) and place.absent:
                place.copy = self.value(parameter)
            self._at.pop(place)
        self._versions.clear()
        for optimizer in optimizers:
            _read_states(optimizer)
        self._old.pop().end()

    def _read_gradients(self) -> None:
        """Make gradients plain that new tiers have not taken."""
        for held in self._with_gradient:
            parameter = held()
            gradient = None if parameter is None else own_gradient(parameter)
            if parameter is not None and isinstance(gradient, LazyTensor):
                set_own_gradient(parameter, gradient.source())
        self._with_gradient = []

    def abandon(self) -> None:
        """End this member's part of the old tiers, after an error. Values that lie there are gone."""
        self._at.clear()
        self._versions.clear()
        self._old.pop().part()


class Aside:
    """A place for states that were fetched, until the changed model is where they go: host memory, or, with a
    budget of disk, a file without a name."""

    def __init__(self, budgets: Budgets) -> None:
        self._file = SpillFile(budgets.folder, sys.maxsize) if budgets.disk else None

    def keep(self, value: Any) -> Any:
        """Return a value of a state, in which tensors that were lazy are read from copies here."""
        return tree_map_only(Tensor, self._kept, value)

    def _kept(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, LazyTensor):
            return read_whole(tensor)
        whole = tensor.source().cpu().contiguous()
        if self._file is None:
            return LazyTensor(whole.clone, whole.shape, whole.dtype)
        read = partial(_read_piece, self._file, self._file.keep(whole), whole.shape, whole.dtype)
        return LazyTensor(read, whole.shape, whole.dtype)


def _read_piece(file: SpillFile, piece: Piece, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    file.copy_into(piece, whole)
    return whole


def _read_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the states that the optimizer holds itself plain ones."""
    settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    held: Any = optimizer.state
    for parameter, state in list(dict.items(held)):  # no states that lie elsewhere
        if any(isinstance(leaf, LazyTensor) for leaf in tree_leaves(state)):
            whole = tree_map_only(Tensor, read_whole, state)
            dict.__setitem__(held, parameter, _at_home(whole, parameter, settings.get(id(parameter), {})))


def _at_home(state: dict[str, Any], parameter: nn.Parameter, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with its tensors where a plain optimizer has them."""
    if settings.get("fused") or settings.get("capturable"):  # also the counts of steps
        on_device: dict[str, Any] = tree_map_only(Tensor, lambda each: each.to(parameter.device), state)
        return on_device
    there: dict[str, Any] = moved(state, parameter.device)
    return there
