"""Check of the arguments of Atoll's `clip_grad_norm_`, which takes no parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from atoll.core.errors import UserError


def check_max_norm(max_norm: Any, second: Any) -> None:
    """Raise UserError if `max_norm` is not a number.

    A script that calls torch's own function passes the parameters first and the norm, here `second`, next.
    """
    if _is_number(max_norm):
        return
    kind, norm = type(max_norm).__name__, second if _is_number(second) else 1.0
    raise UserError(
        f"clip_grad_norm_: max_norm must be a number, and is a {kind}; no parameters are given here, so "
        f"call clip_grad_norm_({float(norm):g})"
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)
