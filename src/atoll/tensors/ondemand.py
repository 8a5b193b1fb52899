"""`optimizer.state` of parameters whose states lie elsewhere: in payloads of tiers, or where the steps are
made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from atoll.core.errors import UserError
from atoll.tensors.chunkstate import State


class StatesOnDemand(defaultdict[nn.Parameter, State]):
    """An optimizer's `state` that fetches the states of `parameters` when the script asks for them.

    It holds states that were fetched, and states that the script put there, until `taken` hands them over.
    Whatever needs all states (`items()`, `len()`, a pickle) fetches all of them. States of other parameters
    (frozen ones, or those of an earlier run) are plainly kept.

    Args:
        parameters: parameters whose states lie elsewhere.
        fetch: copies one parameter's state; {} if it has none.

    Attributes:
        touched: True if a state was fetched, put here or cleared since `taken` was called last.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], fetch: Callable[[nn.Parameter], State]) -> None:
        super().__init__(dict)
        self._elsewhere = dict.fromkeys(parameters, True)  # False: cleared by the script
        self._fetch, self.touched = fetch, False

    def taken(self) -> dict[nn.Parameter, State]:
        """Return the states that the script may have changed, by parameter, and hold none of `parameters`
        from here on."""
        changed: dict[nn.Parameter, State] = {}
        for parameter, elsewhere in self._elsewhere.items():
            state = super().pop(parameter, None if elsewhere else {})
            if state is not None:
                changed[parameter] = state
        self._elsewhere = dict.fromkeys(self._elsewhere, True)
        self.touched = False
        return changed

    def candidates(self) -> dict[nn.Parameter, State | None]:
        """Return the states of `parameters` that the script may have changed: those that are held here, and
        None for each that it has cleared."""
        found: dict[nn.Parameter, State | None] = {}
        for parameter, elsewhere in self._elsewhere.items():
            if super().__contains__(parameter):
                found[parameter] = super().__getitem__(parameter)
            elif not elsewhere:
                found[parameter] = None
        return found

    def leave(self, parameter: nn.Parameter) -> None:
        """Let a parameter's state, which the script has not changed, lie elsewhere again."""
        super().pop(parameter, None)
        self._elsewhere[parameter] = True

    def become(self, states: Mapping[Any, State], *, whole: bool) -> None:
        """Hold these states.

        Args:
            whole: True if a parameter that is not in `states` has no state elsewhere either.
        """
        states = dict(states)
        super().clear()
        self._elsewhere = dict.fromkeys(self._elsewhere, not whole)
        self.update(states)
        self.touched |= whole

    def lose(self, why: str) -> None:
        """Raise UserError with `why` from now on, when a script asks for a state that lies elsewhere."""

        def lost(_parameter: nn.Parameter) -> State:
            raise UserError(why)

        self._fetch = lost

    def here(self) -> dict[Any, State]:
        """Return the states that are held here."""
        return dict(super().items())

    def held(self) -> set[nn.Parameter]:
        """Return the parameters whose states are held here."""
        return set(super().keys())

    def keep(self, parameters: set[nn.Parameter]) -> None:
        """Drop the states held here of all but these parameters; the script must not have changed them."""
        for parameter in self.held() - parameters:
            super().pop(parameter)

    def __missing__(self, parameter: nn.Parameter) -> State:
        state = self[parameter] = self._fetch(parameter) if self._elsewhere.get(parameter) else {}
        return state

    def fill(self, fetch: Callable[[nn.Parameter], State] | None = None) -> None:
        """Fetch every state that is not held here, by `fetch` if it is given."""
        fetch, has_fetched = fetch or self._fetch, False
        for parameter, elsewhere in self._elsewhere.items():
            if elsewhere and not super().__contains__(parameter):
                state = fetch(parameter)
                if state:
                    self[parameter], has_fetched = state, True
        for parameter in self._elsewhere if has_fetched else ():  # in the order of the parameters
            if super().__contains__(parameter):
                super().__setitem__(parameter, super().pop(parameter))

    def __setitem__(self, parameter: nn.Parameter, state: State) -> None:
        self.touched = True
        super().__setitem__(parameter, state)

    def update(self, *states: Any, **_: Any) -> None:
        for parameter, state in dict(*states).items():
            self[parameter] = state

    def __ior__(self, states: Any) -> StatesOnDemand:  # type: ignore[override,misc]
        self.update(states)
        return self

    def setdefault(self, parameter: Any, default: Any = None) -> Any:
        if parameter not in self:
            self[parameter] = default
        return self[parameter]

    def popitem(self) -> Any:
        parameter = next(reversed(list(self)), None)
        if parameter is None:
            raise KeyError("popitem(): the optimizer has no state")
        return parameter, self.pop(parameter)

    def get(self, parameter: Any, default: Any = None) -> Any:
        found = parameter in self
        return self[parameter] if found else default

    def pop(self, parameter: Any, *default: Any) -> Any:
        found = self.get(parameter)
        if found is None:
            return super().pop(parameter, *default)
        if parameter in self._elsewhere:
            self._elsewhere[parameter] = False
        self.touched = True
        return super().pop(parameter)

    def clear(self) -> None:
        self._elsewhere = dict.fromkeys(self._elsewhere, False)
        self.touched = True
        super().clear()

    def __delitem__(self, parameter: nn.Parameter) -> None:
        self.pop(parameter)

    def __contains__(self, parameter: object) -> bool:
        if super().__contains__(parameter):
            return True
        return bool(
            isinstance(parameter, nn.Parameter) and self._elsewhere.get(parameter) and self._fetch(parameter)
        )

    def __iter__(self) -> Iterator[nn.Parameter]:
        self.fill()
        return super().__iter__()

    def __len__(self) -> int:
        self.fill()
        return super().__len__()

    def keys(self) -> Any:
        self.fill()
        return super().keys()

    def values(self) -> Any:
        self.fill()
        return super().values()

    def items(self) -> Any:
        self.fill()
        return super().items()

    def copy(self) -> Any:
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __eq__(self, other: object) -> bool:
        return bool(dict(self.items()) == other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce__(self) -> Any:
        """Copy and pickle as the plain defaultdict of an optimizer."""
        return defaultdict, (dict, dict(self.items()))


def drop_states(states: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Drop the states of `parameters` from an optimizer's `state`: they lie elsewhere from here on."""
    if isinstance(states, StatesOnDemand):
        states.taken()
        return
    for parameter in parameters:
        states.pop(parameter, None)
