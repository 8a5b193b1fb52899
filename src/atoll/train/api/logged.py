"""The values that `session.log` takes, and copies of them to read later."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from atoll.core.errors import UserError


def finite(value: float) -> float | None:
    """Return the value, or None for NaN and the infinities, which JSON lacks."""
    return value if value - value == 0 else None


def loggable(name: str, value: Any) -> float | Tensor:
    """Return a logged value that nothing changes any more: a number, or a copy of a GPU's tensor to read
    later.

    Raises UserError for a value that is not one number.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise UserError(
                f"session.log({name}=...): a tensor of shape {tuple(value.shape)}; log one number, "
                "such as its mean"
            )
        return value.item() if value.device.type == "cpu" else value.detach().clone()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(
            f"session.log({name}={value!r}): not a number; log numbers, or tensors of one"
        ) from None
