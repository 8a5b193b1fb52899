"""Plain attributes that an optimizer of the script's own keeps beside its param groups.

A process that makes the optimizer's steps elsewhere knows its class, its param groups and the arguments of
its class. It does not hear of an attribute that the script sets later.
"""

from __future__ import annotations

from typing import Any

import torch

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.tensors.settings import is_fixed

_OF_A_SCALER = frozenset({"grad_scale", "found_inf"})  # a GradScaler sets them for one step


def plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the public attributes that are numbers, texts or None, or tuples of such."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and name not in _OF_A_SCALER and is_fixed(value)
    }


def check_attributes(own: dict[str, Any], elsewhere: dict[str, Any]) -> None:
    """Raise UserError, with its name, for the first attribute that differs from what the process has that
    makes the optimizer's steps."""
    for name in own.keys() & elsewhere.keys():
        if own[name] is not elsewhere[name] and own[name] != elsewhere[name]:
            facts = {"steps": "home", "attribute": name, "value": own[name], "former": elsewhere[name]}
            check("call", Choices(facts))


class WatchedAttributes:
    """The attributes of an optimizer whose steps are made elsewhere: only its own `step` may change them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_torchs = type(optimizer).__module__.startswith(
            "torch."
        )  # whose steps read param groups alone
        self.stepped()

    def stepped(self) -> None:
        """Take the attributes as they are: prepared, or after the optimizer's own step, which counts steps in
        them, say."""
        self._known = {} if self._is_torchs else plain_attributes(self._optimizer)

    def check(self) -> None:
        """Raise UserError if the script has changed an attribute."""
        if not self._is_torchs:
            check_attributes(plain_attributes(self._optimizer), self._known)
