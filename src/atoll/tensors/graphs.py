"""Gradients that carry a graph of their own, as `backward(create_graph=True)` leaves them."""

from __future__ import annotations

import torch
from torch import Tensor


def with_graph(values: Tensor, own: Tensor) -> Tensor:
    """Return a copy of `values`, to the bit, that carries the graph of `own`: derivatives pass to `own`.

    With `values` the mean over the workers and `own` this worker's part, the mean over the workers of a
    function's derivatives at it is the function's derivative at the mean.
    """
    with torch.enable_grad():
        shown = own.clone()
    with torch.no_grad():
        return shown.copy_(values)
