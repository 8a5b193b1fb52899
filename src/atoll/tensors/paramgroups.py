"""The param groups of optimizers outside the script, as a script gives them and in torch's form for a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from atoll.core.errors import UserError

GroupSettings: TypeAlias = dict[str, Any]  # a param group without its parameters

_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # those with a fused implementation on CPUs
_PLAIN = (bool, int, float, str, type(None))


class ParamGroups:
    """The param groups with which a model's chunks are stepped outside the script.

    `classes` are the optimizer's class of each group. `hyperparameters` are the groups, in order, in the form
    of wire.messages.plain_hyperparameters.

    With `fused`, a param group that leaves the implementation to torch (fused=None) uses torch's fused kernel
    if there is one. The kernel is faster, and in single precision rounds differently from the loop that torch
    would choose.

    Attributes:
        settings: the groups in torch's form. A group's object changes with its values.
    """

    def __init__(
        self,
        classes: Sequence[type[torch.optim.Optimizer]],
        hyperparameters: Sequence[Mapping[str, Any]],
        *,
        fused: bool,
    ) -> None:
        self._classes, self._fused = classes, fused
        self._given = [dict(group) for group in hyperparameters]
        self.settings = self._in_torch(hyperparameters)

    @property
    def given(self) -> list[dict[str, Any]]:
        """The groups as given last."""
        return [dict(group) for group in self._given]

    def check(self, hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        """Raise UserError for groups that do not fit the previous ones."""
        if len(hyperparameters) != len(self.settings):
            raise UserError(
                f"the optimizer has {len(hyperparameters)} param groups, and the run began with "
                f"{len(self.settings)}; call session.prepare once more after add_param_group"
            )
        for index, group in enumerate(hyperparameters):
            if group != self._given[index]:
                _check_alike(self._settings(group, self._classes[index]), self.settings[index])

    def set(self, hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        """Use these groups in later steps; raises UserError if they do not fit the previous ones."""
        self.check(hyperparameters)
        for index, group in enumerate(hyperparameters):
            if group != self._given[index]:
                self.settings[index] = self._settings(group, self._classes[index])
                self._given[index] = dict(group)

    def settings_of(self, hyperparameters: Sequence[Mapping[str, Any]]) -> list[GroupSettings]:
        """Return groups in torch's form, for one step; raises UserError if they do not fit."""
        self.check(hyperparameters)
        return self._in_torch(hyperparameters)

    def _in_torch(self, hyperparameters: Sequence[Mapping[str, Any]]) -> list[GroupSettings]:
        groups = zip(hyperparameters, self._classes, strict=True)
        return [self._settings(group, class_) for group, class_ in groups]

    def _settings(self, group: Mapping[str, Any], class_: type[torch.optim.Optimizer]) -> GroupSettings:
        """Return a received param group in torch's form, for a CPU."""
        settings = {key: _torch_value(key, value) for key, value in group.items() if key != "params"}
        for key in ("capturable", "differentiable"):  # concern graphs on the worker's device alone
            if settings.get(key):
                settings[key] = False
        if "fused" in settings:
            has = class_.__name__ in _FUSED
            left_to_torch = settings["fused"] is None and not settings.get("foreach")
            if settings["fused"] and not has:
                settings["fused"] = None
            elif self._fused and left_to_torch and has:
                settings["fused"] = True
        return settings


def _torch_value(key: str, value: Any) -> Any:
    """Return a hyperparameter from MessagePack in torch's form; raises UserError if it is not plain."""
    if isinstance(value, (list, tuple)):
        return tuple(_torch_value(key, part) for part in value)
    if not isinstance(value, _PLAIN):
        raise UserError(
            f"hyperparameter {key!r} is a {type(value).__name__}, and not a plain number, text or None"
        )
    return value


def _check_alike(settings: GroupSettings, before: GroupSettings) -> None:
    """Raise UserError if a hyperparameter is missing, or is of another kind than before."""
    for key, value in before.items():
        if key not in settings or not _is_alike(settings[key], value):
            raise UserError(f"hyperparameter {key!r} was {value!r} and is now {settings.get(key)!r}")


def _is_alike(now: Any, before: Any) -> bool:
    if isinstance(before, tuple):
        return isinstance(now, tuple) and len(now) == len(before) and all(map(_is_alike, now, before))
    if before is None or isinstance(before, str):
        return not isinstance(now, tuple)
    return isinstance(now, (int, float)) or (now is None and isinstance(before, bool))
