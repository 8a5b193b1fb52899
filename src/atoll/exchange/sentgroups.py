"""The param groups of an optimizer whose steps another process makes: a shard, or a node's CPU side."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.tensors.attributes import check_attributes, plain_attributes
from atoll.tensors.settings import Settings
from atoll.wire.messages import plain_hyperparameters

_ELSE = (Tensor, nn.Module, torch.optim.Optimizer, type)  # objects that hold no arguments


def sent_groups(optimizer: torch.optim.Optimizer) -> Settings:
    """Return the param groups as they are sent to the process that makes the optimizer's steps.

    Tensors of one element become numbers. A value that cannot be sent is left out if the optimizer's class
    does not know its key. Raises UserError, with the key, for a value that the class may use and that cannot
    be sent.
    """
    is_torchs = type(optimizer).__module__.startswith("torch.")
    beside = {} if is_torchs else _beside(optimizer)
    sent: Settings = []
    for index, group in enumerate(optimizer.param_groups):
        (values,) = plain_hyperparameters([group])
        for key in [key for key, value in values.items() if not _can_be_sent(value)]:
            value = values.pop(key)
            if key in optimizer.defaults or not is_torchs:
                setting = f"param_groups[{index}][{key!r}]"
                check("call", Choices({"steps": "home", "setting": setting, "kind": type(value).__name__}))
        sent.append({**beside, **values})
    return sent


def sent_groups_of_all(optimizers: Iterable[torch.optim.Optimizer]) -> Settings:
    """Return the param groups of several optimizers, one after another, as `sent_groups` does."""
    return [group for optimizer in optimizers for group in sent_groups(optimizer)]


def _beside(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the arguments of the optimizer's class that it keeps beside its param groups, as torchao's
    `block_size` and, in an object of their own, bitsandbytes' `min_8bit_size`: those in which one that is
    made of the param groups alone differs."""
    if optimizer not in _BESIDE:
        kept, made = _kept(optimizer), _kept(_made_of(optimizer))
        names = tuple(name for name, value in kept.items() if made.get(name, value) != value)
        elsewhere = _made_of(optimizer, **{name: kept[name] for name in names})
        if elsewhere is not None:
            check_attributes(plain_attributes(optimizer), plain_attributes(elsewhere))
        _BESIDE[optimizer] = names
    names = _BESIDE[optimizer]
    kept = _kept(optimizer) if names else {}
    return {name: list(kept[name]) if isinstance(kept[name], tuple) else kept[name] for name in names}


# By optimizer: the names of what `_beside` returns.
_BESIDE: WeakKeyDictionary[torch.optim.Optimizer, tuple[str, ...]] = WeakKeyDictionary()


def _kept(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the plain attributes, of the optimizer and of objects in it, that are called like an argument of
    its class."""
    if optimizer is None:
        return {}
    own = vars(optimizer)
    objects = [each for each in own.values() if hasattr(each, "__dict__") and not isinstance(each, _ELSE)]
    held = [own, *map(vars, objects)]
    class_: Any = type(optimizer)
    found = {
        name: next((each[name] for each in held if name in each), None)
        for name in inspect.signature(class_).parameters
    }
    return {name: value for name, value in found.items() if value is not None and _can_be_sent(value)}


def _made_of(optimizer: torch.optim.Optimizer, **beside: Any) -> torch.optim.Optimizer | None:
    """Return an optimizer of the same class, made of the first param group and of arguments beside it; None
    if that raises."""
    class_: Any = type(optimizer)
    group = optimizer.param_groups[0]
    given = {key: group[key] for key in inspect.signature(class_).parameters if key in group}
    given.pop("params", None)
    given.update(beside)
    try:
        made: torch.optim.Optimizer = class_([nn.Parameter(torch.zeros(2))], **given)
    except Exception:  # the process that makes it says so
        return None
    return made


def _can_be_sent(value: Any) -> bool:
    """True if MessagePack holds the value: its whole numbers have 64 bits."""
    if isinstance(value, (tuple, list)):
        return all(map(_can_be_sent, value))
    if type(value) is int:
        return -(2**63) <= value < 2**64
    return isinstance(value, (bool, float, str, type(None)))
