"""The scale of a GradScaler in a node's gradients, of which a mean is made before they are divided."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from atoll.axes.choices import Choices
from atoll.axes.needs import check
from atoll.tensors.torch_scaling import scale_of, scale_of_backward, scaler_of, was_unscaled


class GradientScale:
    """The scale in the gradients of an optimizer's parameters.

    Each node has a GradScaler of its own, so the mean of gradients that are not divided yet is made by their
    scales. Known are the scale of the loss of which the backward is, and the scaler that has divided the
    gradients of the step before. Where neither was right, the step raises.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before: Callable[[], float] = _no_scale  # reads the scale of the step before
        self._read = self._before
        self._used: float | None = None  # the scale by which a mean was made in this iteration

    @property
    def is_out(self) -> bool:
        """True if a GradScaler has divided this iteration's gradients."""
        return was_unscaled(self._optimizer)

    def begins_backward(self, *, is_first: bool) -> None:
        """Note that a backward is under way; `is_first`: it is an iteration's first."""
        heard = scale_of_backward()
        if heard is not None:
            self._read = heard
        elif is_first:
            self._read = self._before

    def use(self) -> float:
        """Return the scale that is in the gradients, by which a mean is made now."""
        if self.is_out:
            return 1.0
        self._used = self._read()
        return self._used

    def step(self) -> None:
        """Note that the optimizer steps.

        Raises UserError if a mean was made by another scale than that by which its gradients are divided.
        """
        used, self._used = self._used, None
        divided = scale_of(self._optimizer)
        if used is not None and not math.isclose(used, divided, rel_tol=1e-5):
            facts = {"used": f"{used:g}", "divided": f"{divided:g}"}
            check("call", Choices({"call": "p.grad", "gradients": "scaled", **facts}))
        self._before = scaler_of(self._optimizer) or _no_scale

    def restart(self) -> None:
        """Forget this iteration's gradients."""
        self._read, self._used = self._before, None


def _no_scale() -> float:
    return 1.0
