"""What `session.log` takes, and when it is read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from atoll.core.errors import UserError


def finite(value: float) -> float | None:
    """The value; None for NaN and the infinities, which JSON lacks."""
    return value if value - value == 0 else None


def loggable(name: str, value: Any) -> float | Tensor:
    """A logged value that nothing changes any more: a number, or a tensor's copy that is read later."""
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
