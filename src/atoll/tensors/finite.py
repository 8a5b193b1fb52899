"""A test of tensors for NaN and infinity."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atoll.tensors.sparse import values_in


def is_finite(tensor: Tensor) -> bool:
    """True if all elements are finite; `tensor` has any shape and dtype.

    Looks at the least and the greatest element, which takes one read of the tensor. `torch.isfinite` makes
    several tensors of its size, and takes up to 50 times as long.
    """
    if tensor.is_sparse:
        tensor = values_in(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    # `aminmax` returns NaN for both if any element is NaN.
    return all(map(math.isfinite, torch.stack(torch.aminmax(tensor.detach())).tolist()))
