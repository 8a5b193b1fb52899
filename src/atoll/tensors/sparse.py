"""Sparse gradients: some rows of a parameter, as embeddings and functions of the script leave them.

Where each worker makes the step, the workers agree on the rows that any of them has, and the optimizer gets a
sparse tensor of these rows: SparseAdam and Adagrad step no other row, and a row of zeros is not an absent
row. If these rows are few, they alone are summed (`pack`); else, and where steps are made elsewhere,
gradients are summed dense.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.tensors.torch_compat import parts_of_sparse

LEAST = 2**17  # bytes of gradients of which rows are summed alone; shorter sums cost hardly more (ShortSums)
_BITS, _NUMBERS = b"\0", b"\1"  # the first byte of what `rows_in` returns: its encoding
_NUMBER = np.dtype("<i8")


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
    """Return the rows of a sparse gradient; no bytes for None, and None for a dense one.

    After a first byte they are a bit for each row of the parameter, or the numbers of the rows, whichever is
    shorter.
    """
    if gradient is None:
        return b""
    if not gradient.is_sparse:
        return None
    rows = np.unique(parts_of_sparse(gradient.detach())[0][0].cpu().numpy())
    if _NUMBER.itemsize * len(rows) < gradient.shape[0] // 8:
        return b"".join([_NUMBERS, rows.astype(_NUMBER).tobytes()])
    here = np.zeros(gradient.shape[0], dtype=bool)
    here[rows] = True
    return _BITS + np.packbits(here).tobytes()


def union(packed: Iterable[bytes | None], rows: int) -> Tensor | None:
    """Return the rows that any of several gradients has, 1-D and ascending; None if one of them is dense.

    `packed` are results of `rows_in`; `rows` is the parameter's number of rows.
    """
    told = [each for each in packed if each != b""]
    if None in told:
        return None
    numbers = [np.frombuffer(each, _NUMBER, offset=1) for each in told if each and each[:1] == _NUMBERS]
    if len(numbers) == len(told):
        return torch.from_numpy(np.unique(np.concatenate([np.empty(0, _NUMBER), *numbers])))
    here = np.zeros(rows, dtype=bool)
    for some in numbers:
        here[some] = True
    for each in told:
        if each and each[:1] == _BITS:
            here |= np.unpackbits(np.frombuffer(each, np.uint8, offset=1), count=rows).astype(bool)
    return torch.from_numpy(np.flatnonzero(here))


def pack(into: Tensor, gradient: Tensor | None, rows: Tensor, scale: float = 1.0) -> None:
    """Write a sparse gradient, multiplied by `scale`, into `into`, which has the rows `rows` alone.

    `rows` ascend, and the gradient has no other. Rows that it lacks become zeros, as do all for None and for
    a scale of 0.
    """
    into.zero_()
    if gradient is None or scale == 0:  # zero times NaN would be NaN
        return
    indices, values = parts_of_sparse(gradient.detach())
    # Each value is scaled before values of one row are added, as `write` does.
    into.index_add_(0, torch.searchsorted(rows, indices[0]), values, alpha=scale)


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
    return of_rows(rows, dense.index_select(0, rows), dense.shape)


def of_rows(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Return a sparse tensor of `shape` that has these `values` in its ascending `rows`."""
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, shape, is_coalesced=True, check_invariants=False
    )


def values_in(gradient: Tensor) -> Tensor:
    """Return a gradient's values as a dense tensor: of a sparse one, those of its rows, each once."""
    if type(gradient) is not Tensor:  # one in tiers, of which torch's functions know more
        return gradient
    gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient
