"""A trial that tells whether an optimizer steps a parameter otherwise for the sake of others.

Most optimizers step each parameter by its own gradient and state. Some look at all of them in a step: LAMB
clips by the norm of all gradients, Prodigy and D-Adaptation estimate one rate for all, and a class of a
script's own may call `torch.nn.utils.clip_grad_norm_` in its `step`. Chunk by chunk, or on several shards,
such a step gives other numbers. So a parameter is stepped alone, and beside another one, and both must come
out equal.
"""

from __future__ import annotations

from functools import cache
from typing import Any

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

    `group` gives the hyperparameters. False if the optimizer raises in the trial: it raises that in the
    script's step as well.
    """
    group = {**group, **fast_enough(group)}
    for dtype in (torch.float64, torch.float32):  # 8-bit optimizers may take no float64
        try:
            return any(_differs(optimizer, group, device, dtype, scale) for scale in _SCALES)
        except Exception:  # whatever an unknown optimizer raises
            continue
    return False


def _differs(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    scale: float,
) -> bool:
    alone = _updates(optimizer, group, device, dtype, scale, count=1)
    beside = _updates(optimizer, group, device, dtype, scale, count=2)
    bound = _RELATIVE * float(alone.abs().max())
    return not torch.allclose(alone, beside, rtol=_RELATIVE, atol=bound, equal_nan=True)


def _updates(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    scale: float,
    count: int,
) -> Tensor:
    """Return what some steps add to the first parameter, as the first of `count`."""
    numbers = [(values.to(dtype), gradients.to(dtype)) for values, gradients in _numbers()[:count]]
    parameters = [nn.Parameter(values.clone().to(device)) for values, _ in numbers]
    with torch.random.fork_rng(devices=[]):
        probe = copy_for(optimizer, group, parameters)
        for step, beside in enumerate(_BESIDE):
            torch.manual_seed(step)  # one that draws numbers draws the same for the first parameter
            for place, (parameter, (_, gradients)) in enumerate(zip(parameters, numbers, strict=True)):
                parameter.grad = (scale * (beside if place else 1.0) * gradients[step]).to(device)
            type(optimizer).step(probe)
    return parameters[0].detach().cpu() - numbers[0][0]


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
