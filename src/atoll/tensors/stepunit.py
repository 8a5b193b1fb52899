"""The unit in which an optimizer steps: flat runs of elements, or whole tensors.

An element-wise optimizer steps any run of a chunk. Another one steps tensors of the parameters' own shapes.
The script may say which; else a trial decides (`elementwise.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.tensors.coupling import is_coupled
from atoll.tensors.elementwise import (
    MovesDataError,
    NotElementwiseError,
    copy_for,
    elementwise_state_keys,
    random_numbers_kept,
    tried_alike,
)
from atoll.tensors.modes import has_modes
from atoll.tensors.steptrials import steps_complex_as_real
from atoll.tensors.torch_compat import tree_leaves
from atoll.tensors.wrapped import nbytes

_MOST_GROUPS = 4  # that are tried for it: it lies in the class, and in few of its settings
_COUPLED = "it looks at the gradients of all parameters in a step"
_COMPLEX = "it steps complex parameters otherwise than their real views"


@dataclass(frozen=True)
class Unit:
    """The unit in which an optimizer steps: flat runs of elements, or whole tensors.

    Attributes:
        keys: of its state with one value for each element; empty for whole tensors.
        why: the reason why it steps whole tensors; empty for flat runs.
        facts: of the optimizer, for the table of needs.
    """

    keys: set[str]
    why: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def by_tensor(self) -> bool:
        """True if the optimizer steps whole tensors, each of its parameter's own shape."""
        return bool(self.why)

    @property
    def calls_closure(self) -> bool:
        """True if a step of the optimizer needs a closure, which it calls itself."""
        return "closure" in self.facts

    @property
    def keeps_state(self) -> bool:
        """True if an optimizer without its state goes on otherwise than with it."""
        return self.by_tensor or bool(self.keys)


def unit_of(
    optimizer: torch.optim.Optimizer, asked: str | None = None, device: torch.device | None = None
) -> Unit:
    """Return the unit in which the optimizer can step.

    Args:
        optimizer: the optimizer.
        asked: the script's own word, "element" or "tensor"; None: a trial decides.
        device: where the trial is made; None: where the parameters lie.

    The fact "coupled" says that a step looks at the gradients of all parameters (`coupling.py`): whole
    tensors are not enough where they are stepped apart.

    Raises UserError for another word, and for "element" where the optimizer cannot step flat parameters.
    """
    here = next((_place_of(group) for group in optimizer.param_groups), torch.device("cpu"))
    with random_numbers_kept(device or here):
        unit = _tried(optimizer, asked, device)
        if asked == "element" or unit.calls_closure or not _is_coupled(optimizer, device):
            return unit
    why = unit.why if "moves" in unit.facts else _COUPLED
    return Unit(set(), why, {**unit.facts, "unit": "tensor", "why": why, "coupled": True})


def _is_coupled(optimizer: torch.optim.Optimizer, device: torch.device | None) -> bool:
    tried: list[object] = []
    for group in optimizer.param_groups:
        settings = (here := _place_of(group), tried_alike(group))
        if settings not in tried and len(tried) < _MOST_GROUPS:
            tried.append(settings)
            if is_coupled(optimizer, group, device or here):
                return True
    return False


def _place_of(group: Mapping[str, Any]) -> torch.device:
    return group["params"][0].device if group["params"] else torch.device("cpu")


def _tried(optimizer: torch.optim.Optimizer, asked: str | None, device: torch.device | None) -> Unit:
    facts: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    if asked is not None:
        facts["step"] = asked
    if any(parameter.is_complex() for group in optimizer.param_groups for parameter in group["params"]):
        facts["complex"] = True
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        facts["closure"] = "needed"
    if has_modes(optimizer):
        facts["modes"] = True
    if asked not in (None, "element", "tensor"):
        raise UserError(
            f"session.prepare(step={asked!r}): the unit is 'element' or 'tensor'; leave step out, and "
            "a trial decides"
        )
    keys: set[str] = set()
    tried: list[object] = []
    shapes = {tuple(p.shape) for group in optimizer.param_groups for p in group["params"]}
    try:
        for group in optimizer.param_groups:
            settings = (here := _place_of(group), tried_alike(group))
            if settings not in tried:
                tried.append(settings)
                keys |= elementwise_state_keys(
                    optimizer, group, device or here, shapes, trusted=asked == "element"
                )
    except MovesDataError as error:
        return Unit(set(), str(error), {**facts, "moves": True, "why": str(error)})
    except NotElementwiseError as error:
        if closure is not None and "closure" in str(error).lower():  # "SAM requires closure"
            facts["closure"] = "needed"
        if asked == "element":
            raise UserError(
                f"session.prepare(step='element'): {facts['optimizer']} cannot step flat parameters "
                f"({error}); leave step out, or give 'tensor'"
            ) from None
        return Unit(set(), str(error), {**facts, "unit": "tensor", "why": str(error)})
    if asked is None and "complex" in facts and not steps_complex_as_real(optimizer):
        return Unit(set(), _COMPLEX, {**facts, "unit": "tensor", "why": _COMPLEX})
    if asked == "tensor":
        return Unit(set(), "step='tensor'", {**facts, "unit": "tensor", "why": "step='tensor'"})
    return Unit(keys, facts={**facts, "unit": "element"})


def state_bytes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: Sequence[int], dtype: torch.dtype
) -> int:
    """Return the bytes of the tensors that the optimizer keeps for a parameter of this shape, by a trial."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    probe = copy_for(optimizer, group, [parameter])
    type(optimizer).step(probe)
    return tensor_bytes(probe.state[parameter])


def tensor_bytes(state: Any) -> int:
    """Return the bytes of the tensors in a state of any form, without those of no dimension."""
    return sum(nbytes(leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and leaf.ndim)
