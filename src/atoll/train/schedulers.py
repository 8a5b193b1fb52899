"""Which learning-rate schedulers drive an optimizer, in the order in which the script made them.

torch keeps no list of an optimizer's schedulers, and no scheduler knows when it was made. So the garbage
collector is asked who refers to the optimizer, and `LRScheduler.__init__` is wrapped to count.
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

_count = itertools.count()
_made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # schedulers that were made since Atoll was imported


def _count_made(kind: type[Any]) -> None:
    """Number each scheduler whose `__init__` comes to that of `kind`; the number is no part of its state."""
    plain = kind.__init__

    @functools.wraps(plain)
    def init(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        _made.setdefault(scheduler, next(_count))
        plain(scheduler, *args, **kwargs)

    kind.__init__ = init


for _kind in (LRScheduler, ReduceLROnPlateau):  # the latter does not call the former's
    _count_made(_kind)


def schedulers_of(optimizer: Optimizer) -> list[Any]:
    """The learning-rate schedulers that drive `optimizer`, leaving out those that another one holds.

    Asking the garbage collector takes some ten milliseconds, at a save or a load.
    """
    found = _drivers_of(optimizer)
    if len(found) > 1:  # one that the script has let go of, in a cycle of its own making, must not count
        del found
        gc.collect()
        found = _drivers_of(optimizer)
    held = {id(child) for scheduler in found for child in getattr(scheduler, "_schedulers", ())}
    return [scheduler for scheduler in found if id(scheduler) not in held]


def _drivers_of(optimizer: Optimizer) -> list[Any]:
    """All schedulers whose `optimizer` this is, those among them that nobody holds any more."""
    kinds = (LRScheduler, ReduceLROnPlateau)
    referrers = gc.get_referrers(optimizer)
    attributes = [each for each in referrers if type(each) is dict]  # a scheduler's, perhaps
    # By type(each): isinstance would ask proxies and deprecated aliases for their __class__.
    found = {
        id(each): each
        for each in (*referrers, *(gc.get_referrers(*attributes) if attributes else ()))
        if issubclass(type(each), kinds) and each.optimizer is optimizer
    }
    return list(found.values())


def by_class(schedulers: list[Any]) -> dict[str, list[Any]]:
    """Schedulers under their class's name, those of one class in the order in which they were made.

    Raises CheckpointError where that order is not known: a copy of a scheduler was never made.
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
    """The states of the schedulers that drive `optimizer`, by class: one state, or a list of several."""
    named = by_class(schedulers_of(optimizer))
    states = {name: [each.state_dict() for each in those] for name, those in named.items()}
    return {name: those if len(those) > 1 else those[0] for name, those in states.items()}


def check_states(optimizer: Optimizer, saved: Mapping[str, Any], where: str, call: str) -> None:
    """Raise CheckpointError where `saved`, of `states_of`, is not of these schedulers; `call` reads it."""
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
    """Load what `states_of` gave, and `check_states` has let pass."""
    for name, those in by_class(schedulers_of(optimizer)).items():
        for scheduler, state in zip(those, _several(saved[name]) if name in saved else (), strict=False):
            scheduler.load_state_dict(state)


def _several(saved: Any) -> list[Any]:
    return saved if isinstance(saved, list) else [saved]
