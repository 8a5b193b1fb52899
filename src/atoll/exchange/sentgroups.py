"""The param groups of an optimizer whose steps another process makes: a shard, or a node's CPU side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.tensors.settings import Settings
from atoll.wire.messages import plain_hyperparameters


def sent_groups(optimizer: torch.optim.Optimizer) -> Settings:
    """Return the param groups as they are sent to the process that makes the optimizer's steps.

    Tensors of one element become numbers. A value that cannot be sent is left out if the optimizer's class
    does not know its key. Raises UserError, with the key, for a value that the class may use and that cannot
    be sent.
    """
    is_torchs = type(optimizer).__module__.startswith("torch.")
    sent: Settings = []
    for index, group in enumerate(optimizer.param_groups):
        (values,) = plain_hyperparameters([group])
        for key in [key for key, value in values.items() if not _is_plain(value)]:
            value = values.pop(key)
            if key in optimizer.defaults or not is_torchs:
                setting = f"param_groups[{index}][{key!r}]"
                check("call", Choices({"steps": "home", "setting": setting, "kind": type(value).__name__}))
        sent.append(values)
    return sent


def sent_groups_of_all(optimizers: Iterable[torch.optim.Optimizer]) -> Settings:
    """Return the param groups of several optimizers, one after another, as `sent_groups` does."""
    return [group for optimizer in optimizers for group in sent_groups(optimizer)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if type(value) is int:
        return -(2**63) <= value < 2**64
    return isinstance(value, (bool, float, str, type(None)))
