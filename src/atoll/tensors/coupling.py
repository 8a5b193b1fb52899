"""A trial that tells whether an optimizer steps a parameter otherwise for the sake of others.

Most optimizers step each parameter by its own gradient and state. Some look at all of them in a step: LAMB
clips by the norm of all gradients, Prodigy and D-Adaptation estimate one rate for all, and a class of a
script's own may call `torch.nn.utils.clip_grad_norm_` in its `step`. Chunk by chunk, or on several shards,
such a step gives other numbers. So a parameter is stepped alone, and beside another one, and both must come
out equal.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.tensors.elementwise import copy_for, fast_enough

# Of both parameters: a matrix, since some optimizers take nothing else, and that of the first trial of
# `elementwise.py`, since some compile their step for each shape.
_SHAPE = (4, 6)
# Of the gradients: one that any bound of a norm lets pass, and one that hardly any does.
_SCALES = 1e-3, 1e4
# Of the second parameter's gradients, step by step: the ratio of the two changes, or an optimizer that does
# not depend on the scale of a gradient would hide it.
_BESIDE = 30.0, 0.1, 3000.0, 1.0, 300.0, 0.01, 30.0, 3000.0
_RELATIVE = 1e-3  # of an update: a larger difference is no rounding


def is_coupled(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> bool:
    """True if a step of one parameter depends on the gradients of another of the same param group.

    `group` gives the hyperparameters. It is tried at a rate of 1 too: one that finds its own rate hardly
    moves at the rate with which a warm-up begins. False if the optimizer raises in the trial.
    """
    rates: list[dict[str, Any]] = [fast_enough(group)]
    if isinstance(group.get("lr"), (int, float)):
        rates.append({"lr": 1.0})
    for dtype in (torch.float64, torch.float32):  # 8-bit optimizers may take no float64
        try:
            return any(
                _Run(optimizer, {**group, **rate}, device, dtype, scale).differ()
                for rate in rates
                for scale in _SCALES
            )
        except Exception:  # whatever an unknown optimizer raises
            continue
    return False


@dataclass(frozen=True)
class _Run:
    """Two trials with the same numbers, alone and beside another parameter."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    scale: float

    def differ(self) -> bool:
        (alone, kept), (beside, kept_beside) = self._step(1), self._step(2)
        bound = _RELATIVE * float(alone.abs().max())
        close = torch.allclose(alone, beside, rtol=_RELATIVE, atol=bound, equal_nan=True)
        return not close or any(
            key in kept and not math.isclose(value, kept[key], rel_tol=_RELATIVE)
            for key, value in kept_beside.items()
            if math.isfinite(value)
        )

    def _step(self, count: int) -> tuple[Tensor, dict[str, float]]:
        """Return what some steps add to the first of `count` parameters, and the numbers that they have
        changed in the param group, such as a rate that is estimated for all."""
        numbers = [(values.to(self.dtype), made.to(self.dtype)) for values, made in _numbers()[:count]]
        parameters = [nn.Parameter(values.clone().to(self.device)) for values, _ in numbers]
        probe = copy_for(self.optimizer, self.group, parameters)
        former = _numbers_in(probe.param_groups[0])
        for step, beside in enumerate(_BESIDE):
            _seed(self.device, step)  # one that draws numbers draws the same for the first parameter
            for place, (parameter, (_, gradients)) in enumerate(zip(parameters, numbers, strict=True)):
                by = self.scale * (beside if place else 1.0)
                parameter.grad = (by * gradients[step]).to(self.device)
            type(self.optimizer).step(probe)
        now = _numbers_in(probe.param_groups[0])
        changed = {key: value for key, value in now.items() if former.get(key) != value}
        return parameters[0].detach().cpu() - numbers[0][0], changed


def _numbers_in(group: Mapping[str, Any]) -> dict[str, float]:
    plain = {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in group.items()
    }
    return {key: float(value) for key, value in plain.items() if isinstance(value, (int, float))}


def _seed(device: torch.device, seed: int) -> None:
    """Seed the generators from which a step may draw, and no other."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@cache
def _numbers() -> list[tuple[Tensor, Tensor]]:
    """Return each parameter's initial values, and its gradients of each step."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(2):
        values = torch.randn(_SHAPE, generator=generator, dtype=torch.float64)
        towards = torch.randn(_SHAPE, generator=generator, dtype=torch.float64)  # which most steps share
        noise = torch.randn(len(_BESIDE), *_SHAPE, generator=generator, dtype=torch.float64)
        made.append((values, towards + 0.3 * noise))
    return made
