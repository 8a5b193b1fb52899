"""Whether an optimizer is element-wise, found by trying it.

Chunks may be stepped whole, in parts, or on different machines only if the update of one element depends on
no other (S4, "Data-parallel training"). A list of names would miss subclasses and other libraries'
optimizers; so a probe is stepped twice, once as a matrix and once as two flat halves, and must come out the
same.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn

_ROWS, _COLUMNS, _STEPS = 4, 6, 3


def elementwise_state_keys(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device
) -> set[str]:
    """The state that `optimizer` keeps for each element (`exp_avg`), as against for each parameter (`step`).

    `group` is one of its param groups, whose hyperparameters are used. Raises NotElementwiseError when the
    optimizer cannot be shown to be element-wise.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_ROWS, _COLUMNS, generator=generator, dtype=torch.float64)
    gradients = torch.randn(_STEPS, _ROWS, _COLUMNS, generator=generator, dtype=torch.float64)
    half = _ROWS * _COLUMNS // 2
    try:
        (whole,), states = _try(optimizer, group, [values], [[g] for g in gradients], device)
        halves, _ = _try(
            optimizer,
            group,
            list(torch.split(values.reshape(-1), half)),
            [list(torch.split(g.reshape(-1), half)) for g in gradients],
            device,
        )
    except NotElementwiseError:
        raise
    except Exception as error:  # whatever an unknown optimizer raises on small dense parameters
        raise NotElementwiseError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    if not torch.allclose(whole.reshape(-1), torch.cat(halves), rtol=1e-9, atol=1e-12):
        raise NotElementwiseError("a matrix and its two flattened halves came out different")
    return {
        key for key, value in states[0].items() if isinstance(value, Tensor) and value.shape == whole.shape
    }


class NotElementwiseError(Exception):
    """Why the probe failed."""


def _try(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values: list[Tensor],
    gradients: list[list[Tensor]],
    device: torch.device,
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Step a copy of `optimizer` on parameters of its own; returns them and their states."""
    parameters = [nn.Parameter(value.clone().to(device)) for value in values]
    probe = copy_for(optimizer, group, parameters)
    step, places = type(optimizer).step, [parameter.data_ptr() for parameter in parameters]
    for these in gradients:
        for parameter, gradient in zip(parameters, these, strict=True):
            parameter.grad = gradient.clone().to(device)
        step(probe)
    if [parameter.data_ptr() for parameter in parameters] != places:
        raise NotElementwiseError("it sets p.data to another tensor; let it write into p, as p.sub_() does")
    return [p.detach() for p in parameters], [probe.state[p] for p in parameters]


def copy_for(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer like this one, without its hooks and its state, that steps `parameters` by the
    hyperparameters of `group`; step it as `type(optimizer).step(copy)`, past what wraps the method."""
    probe = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(probe, hooks, OrderedDict())
    hyperparameters = {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
    probe.param_groups = [{**hyperparameters, "params": parameters}]
    probe.state = defaultdict(dict)
    return probe
