"""Optimizers that are not torch's, as people write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class SignMomentum(torch.optim.Optimizer):
    """Each parameter goes by `lr` against the sign of its momentum (Lion without its second average)."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float = 1e-3, beta: float = 0.9, decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["beta"])
                parameter.mul_(1 - group["lr"] * group["decay"])
                parameter.add_(state["momentum"].sign(), alpha=-group["lr"])


class ByItsBase(torch.optim.SGD):
    """SGD whose step is its base's. torch runs hooks around both, once it has made an SGD."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class _Own(torch.optim.Optimizer):
    """Steps each parameter by itself."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    with torch.no_grad():
                        self._step_one(parameter, parameter.grad, self.state[parameter], group["lr"])

    def _step_one(
        self, parameter: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], lr: float
    ) -> None:
        raise NotImplementedError


class RenewedMomentum(_Own):
    """Its momentum is another tensor after each step."""

    def _step_one(
        self, parameter: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], lr: float
    ) -> None:
        before = state.get("momentum")
        state["momentum"] = gradient.clone() if before is None else before * 0.9 + gradient
        parameter.add_(state["momentum"], alpha=-lr)


class TwoInTurn(_Own):
    """Two averages change places at each step."""

    def _step_one(
        self, parameter: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], lr: float
    ) -> None:
        if not state:
            state["odd"], state["even"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["odd"].mul_(0.5).add_(gradient)
        parameter.sub_(state["odd"] + 0.3 * state["even"], alpha=lr)
        state["odd"], state["even"] = state["even"], state["odd"]


class DecaysGradients(_Own):
    """What it adds for decay stays in the gradient."""

    def _step_one(
        self, parameter: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], lr: float
    ) -> None:
        gradient.add_(parameter, alpha=0.1)
        parameter.sub_(gradient, alpha=lr)


class ReplacesData(_Own):
    """Gives each parameter other memory."""

    def _step_one(
        self, parameter: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], lr: float
    ) -> None:
        parameter.data = parameter.data - lr * gradient
