"""An optimizer that is not torch's, as people write them: the sign of a momentum, with decay."""

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
