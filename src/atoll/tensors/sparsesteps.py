"""A trial that tells whether an optimizer steps a sparse gradient as the dense one with zeros for absent rows.

SGD and Adagrad do, up to rounding. SparseAdam steps the rows alone, and takes no dense gradient.
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
    Raises the optimizer's own error if it takes no sparse gradient.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_SHAPE, generator=generator, dtype=torch.float64)
    gradients = []
    for number, rows in enumerate(_ROWS):
        inside = torch.randn(len(rows), _SHAPE[1], generator=generator, dtype=torch.float64)
        if number:
            inside[-1] = 0
        gradients.append(torch.sparse_coo_tensor(torch.tensor([rows]), inside, _SHAPE, check_invariants=False))
    by_rows = _stepped(optimizer, values, gradients) if sparse else None
    try:
        dense = _stepped(optimizer, values, [each.to_dense() for each in gradients])
    except Exception as error:  # whatever an unknown optimizer raises
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if by_rows is None or torch.allclose(by_rows, dense, rtol=1e-9, atol=1e-12):
        return ""
    return "it steps a sparse gradient otherwise than a dense one"


def _stepped(optimizer: torch.optim.Optimizer, values: Tensor, gradients: list[Tensor]) -> Tensor:
    parameter = nn.Parameter(values.clone())
    stepped = copy_for(optimizer, optimizer.param_groups[0], [parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        type(optimizer).step(stepped)
    return parameter.detach()
