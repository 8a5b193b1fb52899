"""The notice of parameters that come into a model after it was prepared: a replaced head, an adapter."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Growth:
    """The notice of modules and parameters that a script sets in `module` or its parts, until `close`.

    Nothing is done in a step of a model that stays as it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts = {id(part) for part in module.modules()}
        self._has_changed = False
        self._handles = [
            register_module_module_registration_hook(self._set),
            register_module_parameter_registration_hook(self._set),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def find(self, known: Mapping[str, nn.Parameter]) -> str:
        """Return the name of the first trainable parameter of the module that is not `known`; "" if all
        are."""
        if not self._has_changed:
            return ""
        self._has_changed = False
        old, now = set(known.values()), self._module.named_parameters()
        return next((name for name, each in now if each not in old and each.requires_grad), "")

    def _set(self, module: nn.Module, _name: str, _value: object) -> None:
        self._has_changed = self._has_changed or id(module) in self._parts
