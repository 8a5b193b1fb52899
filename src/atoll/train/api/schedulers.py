"""The search for the learning-rate schedulers that drive an optimizer, in the order in which the script made
them.

torch keeps no list of an optimizer's schedulers, and no scheduler knows when it was made. So the garbage
collector finds the objects that refer to the optimizer, and a wrapper of `LRScheduler.__init__` counts
schedulers.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from atoll.core.errors import CheckpointError
from atoll.tensors.torch_compat import schedulers_in

_count = itertools.count()
_made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # schedulers that were made since Atoll was imported


def _count_made(kind: type[Any]) -> None:
    """Number each scheduler that `kind.__init__` initialises. The number is not part of the scheduler's
    state.
    """
    plain = kind.__init__

    @functools.wraps(plain)
    def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        _made.setdefault(scheduler, next(_count))
        plain(scheduler, *args, **kwargs)

    kind.__init__ = init


for _kind in (LRScheduler, ReduceLROnPlateau):  # ReduceLROnPlateau does not call LRScheduler.__init__
    _count_made(_kind)


def schedulers_of(optimizer: Optimizer) -> list[Any]:
    """Return the learning-rate schedulers that drive `optimizer`, except those that another scheduler holds.

    The search by the garbage collector takes some ten milliseconds, at each save or load.
    """
    found = _drivers_of(optimizer)
    if len(found) > 1:  # a scheduler that the script has dropped, in a reference cycle, must not count
        del found
        gc.collect()
        found = _drivers_of(optimizer)
    held = {id(child) for scheduler in found for child in schedulers_in(scheduler)}
    return [scheduler for scheduler in found if id(scheduler) not in held]


def _drivers_of(optimizer: Optimizer) -> list[Any]:
    """Return all schedulers with this `optimizer`, including ones that only the garbage collector still
    knows.
    """
    kinds = (LRScheduler, ReduceLROnPlateau)
    referrers = gc.get_referrers(optimizer)
    attributes = [each for each in referrers if type(each) is dict]  # may be a scheduler's __dict__
    # By type(each): isinstance would ask proxies and deprecated aliases for their __class__.
    found = {
        id(each): each
        for each in (*referrers, *(gc.get_referrers(*attributes) if attributes else ()))
        if issubclass(type(each), kinds) and each.optimizer is optimizer
    }
    return list(found.values())


def by_class(schedulers: list[Any]) -> dict[str, list[Any]]:
    """Group schedulers by their class's name, each group in the order in which the schedulers were made.

    Raises CheckpointError if the order is unknown: a copy of a scheduler has no number.
    """
    named: dict[str, list[Any]] = {}
    for scheduler in schedulers:
        named.setdefault(type(scheduler).__name__, []).append(scheduler)
    for name, those in named.items():
        if len(those) > 1 and not all(each in _made for each in those):
            raise CheckpointError(
                f"{len(those)} schedulers of class {name} drive the optimizer, and some were copied or made "
                "before atoll was imported, so a checkpoint cannot tell them apart; import atoll first, or "
                "join them in torch.optim.lr_scheduler.ChainedScheduler"
            )
        those.sort(key=lambda each: _made.get(each, 0))
    return named


def states_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the states of the optimizer's schedulers, by class: one state, or a list of several."""
    named = by_class(schedulers_of(optimizer))
    states = {name: [each.state_dict() for each in those] for name, those in named.items()}
    return {name: those if len(those) > 1 else those[0] for name, those in states.items()}


def check_states(optimizer: Optimizer, saved: Mapping[str, Any], where: str, call: str) -> None:
    """Raise CheckpointError if `saved`, from `states_of`, belongs to other schedulers.

    `where` begins the message, and `call` names the call that reads the checkpoint.
    """
    named = by_class(schedulers_of(optimizer))
    for name, state in saved.items():
        count, present = len(_several(state)), len(named.get(name, ()))
        if not present:
            raise CheckpointError(
                f"{where}: holds the state of a {name}, and no {name} drives the optimizer; make it before "
                f"{call}"
            )
        if count != present:
            raise CheckpointError(
                f"{where}: holds the states of {count} schedulers of class {name}, and {present} drive"
                f"{'s' * (present == 1)} the optimizer; make as many, in the same order, before {call}"
            )


def put_back_states(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load states that `states_of` returned and `check_states` accepted."""
    for name, those in by_class(schedulers_of(optimizer)).items():
        for scheduler, state in zip(those, _several(saved[name]) if name in saved else (), strict=False):
            scheduler.load_state_dict(state)


def _several(saved: Any) -> list[Any]:
    return saved if isinstance(saved, list) else [saved]
