"""Exponential averages of parameters, kept as a state of their optimizer.

So an average lies where the optimizer's other states lie: in tiers, sharded over members, in checkpoints, and
with workers that come late. Source: Polyak and Juditsky, 1992; docs/how-to/ema.md.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from atoll.tensors.torch_compat import bare_step, hook_step

AVERAGE = "average"  # the key of the state


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Let each step of `optimizer` also move the average of each parameter that it steps.

    The first step begins the average with the parameter's value. Afterwards the average is `decay` times
    itself and 1 - `decay` times the value. A parameter without a gradient keeps its average.
    """
    kind = type(optimizer)
    bare: Any = bare_step(kind)

    @wraps(bare)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = bare(self, *args, **kwargs)
        _average(self, decay)
        return result

    names = {"step": step, "__module__": kind.__module__, "__qualname__": kind.__qualname__, _MARK: True}
    optimizer.__class__ = type(kind.__name__, (kind,), names)
    hook_step(optimizer)


_MARK = "_atoll_averages"


def keeps_average(optimizer: torch.optim.Optimizer) -> bool:
    """True if `keep_average` has had this optimizer."""
    return hasattr(type(optimizer), _MARK)


@torch.no_grad()
def _average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if AVERAGE in state:
                state[AVERAGE].lerp_(parameter, 1.0 - decay)
            else:
                state[AVERAGE] = torch.clone(parameter.detach(), memory_format=torch.preserve_format)
