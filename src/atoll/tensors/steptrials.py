"""Trials that tell how an optimizer steps gradients of other kinds.

SGD and Adagrad step a sparse gradient as the dense one with zeros for absent rows, up to rounding. SparseAdam
steps the rows alone, and takes no dense gradient. torch's element-wise optimizers step a complex parameter as
its real view (torch.view_as_real); one that multiplies a complex gradient by itself does not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atoll.tensors.elementwise import copy_for

_SHAPE = (6, 3)
# The rows of each step's gradient; of the second one's last row all values are 0.
_ROWS = ([1, 4], [4, 2])


def why_not_dense(optimizer: torch.optim.Optimizer, *, sparse: bool) -> str:
    """Return why dense gradients may not take the place of sparse ones; empty if they may.

    `sparse`: the model has sparse gradients. Else the optimizer is asked only whether it takes dense ones.
    One that steps neither now, such as one that is not in train mode, is not refused for that.
    Raises the optimizer's own error if it takes no sparse gradient of a model that has them.
    """
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float64 if sparse else torch.float32  # 8-bit optimizers may take no float64
    values = torch.randn(_SHAPE, generator=generator, dtype=dtype)
    gradients = []
    for number, rows in enumerate(_ROWS):
        inside = torch.randn(len(rows), _SHAPE[1], generator=generator, dtype=dtype)
        if number:
            inside[-1] = 0
        gradients.append(
            torch.sparse_coo_tensor(torch.tensor([rows]), inside, _SHAPE, check_invariants=False)
        )
    by_rows = _stepped(optimizer, values, gradients) if sparse else None
    try:
        dense = _stepped(optimizer, values, [each.to_dense() for each in gradients])
    except Exception as error:  # whatever an unknown optimizer raises
        if sparse or _steps(optimizer, values, gradients):
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""
    if by_rows is None or torch.allclose(by_rows, dense, rtol=1e-9, atol=1e-12):
        return ""
    return "it steps a sparse gradient otherwise than a dense one"


def steps_complex_as_real(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer steps a complex parameter as a real one with the real and imaginary parts."""
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(4, *_SHAPE, 2, generator=generator, dtype=torch.float64)
    try:
        found = _stepped(
            optimizer, torch.view_as_complex(values), list(map(torch.view_as_complex, gradients))
        )
    except Exception:  # whatever an unknown optimizer raises; it raises that again in the script's step
        return False
    real = _stepped(optimizer, values, gradients)
    return torch.allclose(torch.view_as_real(found), real, rtol=1e-9, atol=1e-12)


def _steps(optimizer: torch.optim.Optimizer, values: Tensor, gradients: list[Tensor]) -> bool:
    try:
        _stepped(optimizer, values, gradients)
    except Exception:  # whatever an unknown optimizer raises
        return False
    return True


def _stepped(optimizer: torch.optim.Optimizer, values: Tensor, gradients: list[Tensor]) -> Tensor:
    parameter = nn.Parameter(values.clone())
    stepped = copy_for(optimizer, optimizer.param_groups[0], [parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        type(optimizer).step(stepped)
    return parameter.detach()
