"""What is private in torch, used in one place.

`SCALES`: an optimizer with this attribute has kernels that divide gradients by `optimizer.grad_scale` and
leave out a step where `optimizer.found_inf` says so; a GradScaler then sets these two and calls `step` in
any case. torch sets it for fused optimizers (2.13). There is no public way to ask for that.

`count_unscaling`: a GradScaler divides gradients by `torch._amp_foreach_non_finite_check_and_unscale_`, which
does not raise their version counters, unlike other functions that write into their arguments (2.13). Atoll
tells by these counters what a script has changed in gradients since they were reduced or lent out. There is
no public way to hear of an unscaling. Once torch raises the counters, this can go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SCALES = "_step_supports_amp_scaling"
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_torchs: Any = getattr(torch, _UNSCALE, None)


def count_unscaling() -> None:
    """From now on let a GradScaler's unscaling raise the version counters of what it writes into."""
    if _torchs is not None and getattr(torch, _UNSCALE) is _torchs:
        setattr(torch, _UNSCALE, unscale)


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's, or the one that stands in for it since `count_unscaling`: what tensors with a
    `__torch_function__` are given is always torch's."""
    return unscale if function is _torchs else function


@functools.wraps(_torchs or count_unscaling)
def unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply gradients of one device and dtype by `inverse_scale`, in place, and set `found_inf` to 1 where
    any is not finite."""
    _torchs(gradients, found_inf, inverse_scale)
    # With 1 it only looks for infinities; to read that from a GPU would be to wait for it.
    if inverse_scale.device.type != "cpu" or inverse_scale.item() != 1.0:
        torch.autograd.graph.increment_version(gradients)
