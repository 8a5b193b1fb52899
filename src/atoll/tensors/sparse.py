"""Sparse gradients: some rows of a parameter, as embeddings and functions of the script leave them.

Gradients are summed dense. Where each worker makes the step, the workers agree on the rows that any of them
has, and the optimizer gets a sparse tensor of these rows: SparseAdam and Adagrad step no other row, and a row
of zeros is not an absent row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import UserError


def check_summable(name: str, gradient: Tensor) -> None:
    """Raise UserError for a gradient of the parameter `name` that is sparse otherwise than by rows."""
    if gradient.layout == torch.strided or (gradient.is_sparse and gradient.sparse_dim() == 1):
        return
    what = (
        f"{gradient.sparse_dim()} of its dimensions"
        if gradient.is_sparse
        else f"the layout {gradient.layout}"
    )
    raise UserError(
        f"the gradient of {name!r} is sparse in {what}, and workers sum dense gradients and sparse ones of "
        "whole rows; let its function return grad.to_dense()"
    )


def rows_in(gradient: Tensor | None) -> bytes | None:
    """Return the rows of a sparse gradient as packed bits; no bytes for None, and None for a dense one."""
    if gradient is None:
        return b""
    if not gradient.is_sparse:
        return None
    here = torch.zeros(gradient.shape[0], dtype=torch.bool)
    here[gradient.detach().coalesce().indices()[0].cpu()] = True
    return np.packbits(here.numpy()).tobytes()


def union(packed: Iterable[bytes | None], rows: int) -> Tensor | None:
    """Return the rows that any of several gradients has, 1-D and ascending; None if one of them is dense.

    `packed` are results of `rows_in`; `rows` is the parameter's number of rows.
    """
    here = np.zeros(rows, dtype=bool)
    for each in packed:
        if each is None:
            return None
        if each:
            here |= np.unpackbits(np.frombuffer(each, np.uint8), count=rows).astype(bool)
    return torch.from_numpy(np.flatnonzero(here))


def write(view: Tensor, gradient: Tensor, scale: float = 1.0) -> None:
    """Write a sparse gradient, multiplied by `scale`, into the dense `view` of its shape."""
    view.zero_().add_(gradient.detach(), alpha=scale)


def copy_gradient(view: Tensor, gradient: Tensor | None) -> None:
    """Write a gradient of any kind into the dense `view` of its shape: zeros for None."""
    if gradient is None:
        view.zero_()
    elif gradient.is_sparse:
        write(view, gradient)
    else:
        view.copy_(gradient.detach())


def rows_of(dense: Tensor, rows: Tensor) -> Tensor:
    """Return these rows of `dense` as a sparse tensor with values of its own."""
    rows = rows.to(dense.device)
    values = dense.index_select(0, rows)
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, dense.shape, is_coalesced=True, check_invariants=False
    )


def values_in(gradient: Tensor) -> Tensor:
    """Return a gradient's values as a dense tensor: of a sparse one, those of its rows, each once."""
    if type(gradient) is not Tensor:  # one in tiers, of which torch's functions know more
        return gradient
    gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient
