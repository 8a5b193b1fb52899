"""`optimizer.state` as scripts see it, where the optimizer's steps are made elsewhere.

A read brings the state here. A change is found before the next step, by comparing what the script holds with
what it was given, so a write through `tensor.data` counts too. A script that leaves the state alone pays
nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.tensors.chunkstate import State
from atoll.tensors.lazy import read_whole
from atoll.tensors.ondemand import StatesOnDemand, drop_states
from atoll.tensors.outdated import GivenState, OutdatedStates
from atoll.tensors.packing import Words, pack
from atoll.tensors.stepunit import tensor_bytes
from atoll.tensors.torch_compat import tree_map_only

# By optimizer whose steps are made elsewhere: its state.
_OF: WeakKeyDictionary[torch.optim.Optimizer, ReferenceType[RemoteState]] = WeakKeyDictionary()


def settle_state(optimizer: torch.optim.Optimizer) -> None:
    """Hold of an optimizer's state, if it lies elsewhere, only what the script has changed."""
    state = _OF[optimizer]() if optimizer in _OF else None
    if state is not None:
        state.has_changes()


def forget_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Hold no states of `parameters`: they lie elsewhere from here on."""
    state = _OF[optimizer]() if optimizer in _OF else None
    if state is None:
        drop_states(optimizer.state, parameters)
    else:
        state.forget()


class RemoteState:
    """The `state` of `optimizer`, which it is from the first call on until `leave`.

    Args:
        optimizer: the script's optimizer.
        fetch: returns the state of each parameter that has one. Tensors may be lazy.
        elsewhere: the parameters whose states lie elsewhere; None: all. States of others are plainly kept.
        home: says where the states live, for messages.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        fetch: Callable[[], dict[nn.Parameter, State]],
        elsewhere: Collection[nn.Parameter] | None,
        home: str,
    ) -> None:
        self._optimizer, self._fetch, self._home = optimizer, fetch, home
        known: list[nn.Parameter] = [each for group in optimizer.param_groups for each in group["params"]]
        self._known = known
        self._elsewhere = {each for each in known if elsewhere is None or each in elsewhere}
        self._shown = StatesOnDemand([each for each in known if each in self._elsewhere], self._read)
        self._fetched: dict[nn.Parameter, State] | None = None
        self._given: dict[nn.Parameter, tuple[Tensor, Words]] = {}  # to the script: copies, packed
        self._held: set[nn.Parameter] = set()  # parameters whose states were held before `show`
        self._outdated = OutdatedStates()
        self._is_showing = self._has_left = self._is_stepping = False
        # torch's own classes look at the states of the parameters that they step, and these are left out.
        self._hides_in_step = not type(optimizer).__module__.startswith("torch.")
        kept = {each: state for each, state in optimizer.state.items() if each not in self._elsewhere}
        self._shown.become(kept, whole=False)
        self._shown.taken()
        self._put_in_place()
        _OF[optimizer] = ReferenceType(self)

    @property
    def is_due(self) -> bool:
        """False if the script cannot have changed a state since the last step."""
        shown = self._shown
        is_touched = shown.touched or bool(self._outdated) or self._optimizer.state is not shown
        return is_touched and not self._has_left and not self._is_stepping

    def has_changes(self) -> bool:
        """Return True if the script has changed a state since the last step. States that it has only read are
        no longer held here.

        Raises UserError if it has changed one that it got before the last step, or a tensor of a state_dict.
        """
        self.hide()
        self._check_outdated()
        if self._optimizer.state is not self._shown:  # replaced: states not in it do not exist
            self._become(self._optimizer.state)
        found = self._shown.candidates()
        as_given = [each for each, state in found.items() if self._is_as_given(each, state or {})]
        for parameter in as_given:
            self._let_go(found[parameter])
            self._shown.leave(parameter)
        changed = found.keys() - as_given
        self._given = {each: given for each, given in self._given.items() if each in changed}
        self._fetched = None
        self._shown.touched = len(as_given) < len(found)
        return self._shown.touched

    def show(self) -> None:
        """Hold every state until `hide`: as it is now, or as the script has changed it."""
        if self._has_left:
            return
        self.has_changes()
        self._held, self._is_showing = self._shown.held(), True
        states = self._fetch()
        self._shown.fill(lambda parameter: states.get(parameter, {}))

    def hide(self) -> None:
        """Hold no more the states that `show` has brought."""
        if not self._is_showing:
            return
        self._is_showing = False
        for parameter, state in self._shown.here().items():
            if parameter not in self._held:
                self._let_go(state)
        self._shown.keep(self._held)
        self._shown.touched = bool(self._shown.candidates())

    def hide_from(self, state_dict: State) -> State:
        """End a `state_dict()`, before which `show` was called; return a state_dict of plain dicts."""
        self.hide()
        states = state_dict["state"]
        plain = {key: dict(state) if type(state) is GivenState else state for key, state in states.items()}
        return {**state_dict, "state": plain}

    def whole(self) -> State:
        """Return the states with the script's changes, in the form of a state_dict without settings."""
        self.show()
        numbers = {parameter: number for number, parameter in enumerate(self._known)}
        here = self._shown.here()
        states = {
            numbers[each]: dict(here[each])
            for each in self._known
            if each in self._elsewhere and here.get(each)
        }
        self.hide()
        groups = [[numbers[each] for each in group["params"]] for group in self._optimizer.param_groups]
        return {"state": states, "param_groups": [{"params": each} for each in groups]}

    def hold(self, state_dict: Mapping[str, Any]) -> None:
        """Hold the states of a state_dict in the form of `whole`, and no others, until `forget`."""
        for state in self._shown.candidates().values():
            self._let_go(state)
        states = {self._known[number]: state for number, state in state_dict["state"].items()}
        self._become({**self._others(self._shown.here()), **states})

    def loaded(self) -> None:
        """Hold the states that `load_state_dict` has assigned, until `forget`."""
        if self._has_left:
            return
        self._outdated.clear()
        self._given, self._fetched, self._is_showing = {}, None, False
        self._become(self._optimizer.state)

    def begin_step(self) -> None:
        """Show the optimizer's own step no states that lie elsewhere, until `end_step`.

        It steps nothing here, and may look at all of them each time.
        """
        if self._hides_in_step and not self._has_left:
            self._is_stepping = True
            self._optimizer.state = defaultdict(dict, self._others(self._shown.here()))

    def end_step(self) -> None:
        """Show the script all states again; what the step made of others is kept."""
        if not self._is_stepping:
            return
        self._is_stepping = False
        others = self._others(self._optimizer.state)
        for each in self._others(self._shown.here()).keys() - others.keys():
            self._shown.pop(each)
        was_touched = self._shown.touched
        self._shown.update(others)
        self._shown.touched = was_touched
        self._put_in_place()

    def forget(self) -> None:
        """Hold no states that lie elsewhere: a step, or a load, has made those here outdated."""
        if self._has_left:
            return
        if self._shown.touched:
            for state in self._shown.candidates().values():
                self._let_go(state)
            self._shown.taken()
        self._given, self._fetched, self._is_showing = {}, None, False

    def give_back(self, lacks_room: Callable[[int], str], read: Callable[[Any], Any]) -> str:
        """Leave the optimizer a plain state with everything in it. Without room for it the state is empty;
        return the reason, or "".

        Args:
            lacks_room: returns the reason why there is no room here for that many bytes of states, or "".
            read: returns what is kept here of each value, which may be lazy.
        """
        self.show()
        states = self._shown.here()
        why = lacks_room(sum(map(tensor_bytes, states.values())))
        self._leave({} if why else states, read)
        return why

    def close(self) -> None:
        """Leave the optimizer a plain state without those that lie elsewhere, unless they are back."""
        if self._optimizer.state is self._shown:
            self._leave(self._others(self._shown.here()), read_whole)
        self._has_left = True

    def _leave(self, states: Mapping[Any, State], read: Callable[[Any], Any]) -> None:
        self._has_left = True
        plain = {  # an optimizer may keep a tensor of its own under a name
            each: {key: read(value) for key, value in state.items()} if isinstance(state, dict) else state
            for each, state in states.items()
        }
        self._optimizer.state = defaultdict(dict, plain)

    def _others(self, states: Mapping[Any, State]) -> dict[Any, State]:
        return {each: state for each, state in states.items() if each not in self._elsewhere}

    def _become(self, states: Mapping[Any, State]) -> None:
        self._shown.become(states, whole=True)
        self._put_in_place()

    def _put_in_place(self) -> None:
        shown: Any = self._shown
        self._optimizer.state = shown

    def _read(self, parameter: nn.Parameter) -> State:
        """Return a parameter's state for the script."""
        if self._fetched is None:
            self._fetched = self._fetch()
        if parameter not in self._given or parameter not in self._fetched:
            state = tree_map_only(Tensor, read_whole, self._fetched.get(parameter, {}))
            self._fetched[parameter], self._given[parameter] = state, pack([state])
        return GivenState(self._fetched[parameter])

    def _is_as_given(self, parameter: nn.Parameter, state: State) -> bool:
        given = self._given.get(parameter)
        if given is None:
            return False
        try:
            flat, words = pack([state])
        except UserError:  # no state that can be sent; the load says so
            return False
        return words == given[1] and torch.equal(flat, given[0])

    def _let_go(self, state: State | None) -> None:
        """Watch a state that the script may go on holding: its changes have no effect from here on."""
        if state:
            self._outdated.add(state)

    def _check_outdated(self) -> None:
        if self._outdated.take_changes():
            raise UserError(
                f"a state of {type(self._optimizer).__name__} was changed that the script got before the "
                f"last step, or a tensor of its state_dict(), and {self._home}: take it from optimizer.state "
                "again after each step, and change that"
            )
