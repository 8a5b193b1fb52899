"""An optimizer's hyperparameters as plain values that workers can compare."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.core.hyperparameters import GRADIENT_SCALE, IMPLEMENTATION, SCHEDULED
from atoll.tensors.torch_scaling import scale_of

Settings = list[dict[str, Any]]


def settings_of(optimizer: torch.optim.Optimizer, *, scheduled: bool = True) -> Settings:
    """Return the hyperparameters of each param group, with tensors as numbers or lists of numbers.

    Only hyperparameters of the optimizer's class are included, without those that select an implementation
    ("fused"). With `scheduled` False, hyperparameters that an attached scheduler may set are left out too.
    The first group also holds the factor by which a GradScaler divides the gradients, unless that factor is
    1.
    """
    keys = [key for key in optimizer.defaults if key not in IMPLEMENTATION]
    if not scheduled and any("initial_lr" in group for group in optimizer.param_groups):
        keys = [key for key in keys if key not in SCHEDULED]
    settings = [{key: _plain(group[key]) for key in keys if key in group} for group in optimizer.param_groups]
    scale = scale_of(optimizer)
    if settings and scale != 1.0:
        settings[0][GRADIENT_SCALE] = scale
    return settings


class WatchedSettings:
    """An optimizer's settings, computed again only after a value in its param groups has changed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._values: list[Any] = []  # the param groups' values behind `_settings`
        self._scale = 1.0
        self._settings: Settings = []

    def __call__(self) -> Settings:
        """Return the optimizer's present settings, as `settings_of` gives them."""
        groups, scale = self._optimizer.param_groups, scale_of(self._optimizer)
        values = [value for group in groups for key, value in group.items() if key != "params"]
        known = len(values) == len(self._values) and all(map(is_, values, self._values))
        if not known or scale != self._scale:
            self._settings = settings_of(self._optimizer)
            self._values = values if all(map(is_fixed, values)) else []
            self._scale = scale
        return self._settings


def settings_of_all(optimizers: Sequence[torch.optim.Optimizer]) -> Callable[[], Settings]:
    """Return a function that returns the present settings of several optimizers, one after another."""
    watched = [WatchedSettings(each) for each in optimizers]
    if len(watched) == 1:
        return watched[0]
    return lambda: [group for each in watched for group in each()]


def is_fixed(value: Any) -> bool:
    """True if a value is a number, a text, None, or a tuple of these: its object cannot change."""
    if isinstance(value, tuple):
        return all(map(is_fixed, value))
    return isinstance(value, (bool, int, float, str, type(None)))


class SettingsCode:
    """A checksum of hyperparameters, computed again only where they have changed."""

    def __init__(self) -> None:
        self.settings: Settings = []
        self.code = 0

    def see(self, settings: Settings) -> int:
        """Return the 32-bit checksum of `settings`."""
        if not self.code or settings != self.settings:
            self.settings = settings
            self.code = zlib.crc32(msgspec.msgpack.encode(settings))
        return self.code


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return f"a {type(value).__qualname__}"  # its address differs between workers
