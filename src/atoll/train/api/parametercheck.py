"""The check that a prepared model keeps the parameters with which it was prepared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from atoll.core.errors import BindingError, PrepareError
from atoll.tensors.torch_compat import is_within_functional_call, own_parameters

# The mapping that holds a parameter, its key there, the parameter, and its full name.
_Home: TypeAlias = tuple[Mapping[str, nn.Parameter | None], str, nn.Parameter, str]


class ParameterCheck:
    """The check that a module has its `parameters` as `session.prepare` saw them: none was replaced, unfrozen
    or added since (a new head, an adapter).

    A worker that is `alone` may add parameters, since nobody else sums their gradients. `way_out` says in
    messages what a script does about a changed model. Until `close`, torch reports what a script sets in the
    module or its parts, so a module that stays as it is costs nothing.
    """

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, nn.Parameter], way_out: str, *, alone: bool
    ) -> None:
        self._module, self._parameters, self._way_out = module, parameters, way_out
        self._homes = list(_homes(module, parameters))
        self._frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
        self._parts = {id(part) for part in module.modules()}
        self._may_have_more = False
        self._handles: list[RemovableHandle] = []
        if not alone:
            self._handles = [
                register_module_module_registration_hook(self._set),
                register_module_parameter_registration_hook(self._set),
            ]

    def close(self) -> None:
        """Let go of the model."""
        for handle in self._handles:
            handle.remove()

    def before_forward(self) -> None:
        """Raise BindingError if a parameter of the module was replaced.

        torch.func.functional_call replaces parameters for its duration, and is allowed.
        """
        for held, attribute, parameter, name in self._homes:
            if held.get(attribute) is not parameter and not is_within_functional_call():
                raise BindingError(
                    f"parameter {name!r} was replaced by another Parameter after session.prepare; copy "
                    "new values into it instead (with torch.no_grad(): parameter.copy_(...)), or "
                    f"{self._way_out}"
                )

    def before_step(self) -> None:
        """Raise BindingError for a replaced parameter, and PrepareError for an added or unfrozen one."""
        self.before_forward()
        if self._may_have_more:
            self._may_have_more = False
            self._check_added()
        for name in self._frozen:
            if self._parameters[name].requires_grad:
                raise PrepareError(
                    f"parameter {name!r} was frozen when session.prepare saw it and is trainable now; "
                    f"leave it trainable until then and freeze it afterwards, or {self._way_out}"
                )

    def _check_added(self) -> None:
        known = set(self._parameters.values())
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and parameter not in known:
                raise PrepareError(
                    f"parameter {name!r} came into the model after session.prepare, and no worker would sum "
                    f"its gradients; {self._way_out}"
                )

    def _set(self, module: nn.Module, _name: str, _value: object) -> None:
        self._may_have_more = self._may_have_more or id(module) in self._parts


def _homes(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[_Home]:
    """Yield the home of each parameter."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for part in module.modules():
        for attribute, parameter in own_parameters(part).items():
            if parameter is not None:
                yield own_parameters(part), attribute, parameter, names[id(parameter)]
