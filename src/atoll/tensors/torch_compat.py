"""What is private in torch, used in one place.

`SCALES`: an optimizer with this attribute has kernels that divide gradients by `optimizer.grad_scale` and
leave out a step where `optimizer.found_inf` says so; a GradScaler then sets these two and calls `step` in
any case. torch sets it for fused optimizers (2.13). There is no public way to ask for that.

`count_unscaling`: a GradScaler divides gradients by `torch._amp_foreach_non_finite_check_and_unscale_`, which
does not raise their version counters, unlike other functions that write into their arguments (2.13). Atoll
tells by these counters what a script has changed in gradients since they were reduced or lent out. There is
no public way to hear of an unscaling. Once torch raises the counters, this can go.

`scale_of`: by what a GradScaler divides an optimizer's gradients. `GradScaler._unscale_grads_` is given both;
a step that a GradScaler leaves to a fused kernel has it as `optimizer.grad_scale` (2.13). A scaler's public
`get_scale` does not say which optimizer's gradients were divided, or when.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

SCALES = "_step_supports_amp_scaling"
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_torchs: Any = getattr(torch, _UNSCALE, None)
_UNSCALE_OF = "_unscale_grads_"
_scalers: Any = getattr(torch.amp.GradScaler, _UNSCALE_OF, None)
# What each optimizer's gradients were multiplied by, until `forget_scale`.
_INVERSES: WeakKeyDictionary[torch.optim.Optimizer, Tensor] = WeakKeyDictionary()


def count_unscaling() -> None:
    """From now on let a GradScaler's unscaling raise the version counters of what it writes into, and be
    noted for `scale_of`."""
    if _torchs is not None and getattr(torch, _UNSCALE) is _torchs:
        setattr(torch, _UNSCALE, unscale)
    if _scalers is not None and getattr(torch.amp.GradScaler, _UNSCALE_OF) is _scalers:
        setattr(torch.amp.GradScaler, _UNSCALE_OF, _unscale_of)


@functools.wraps(_scalers or count_unscaling)
def _unscale_of(
    scaler: object, optimizer: torch.optim.Optimizer, inverse_scale: Tensor, *more: Any, **named: Any
) -> Any:
    """Unscale the gradients of an optimizer, as its GradScaler does."""
    found = _scalers(scaler, optimizer, inverse_scale, *more, **named)
    if isinstance(optimizer, torch.optim.Optimizer):  # a script's wrapper around one is not what steps
        note_scale(optimizer, inverse_scale)
    return found


def note_scale(optimizer: torch.optim.Optimizer, inverse_scale: Tensor) -> None:
    """An optimizer's gradients were multiplied by `inverse_scale`."""
    _INVERSES[optimizer] = inverse_scale


def forget_scale(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer has new gradients."""
    _INVERSES.pop(optimizer, None)


def scale_of(optimizer: torch.optim.Optimizer) -> float:
    """By what a GradScaler has divided an optimizer's gradients, or leaves it to the step to divide them;
    1 without a GradScaler."""
    scale = getattr(optimizer, "grad_scale", None)
    if isinstance(scale, Tensor):
        return _readable(inverse_of(scale))
    inverse = _INVERSES.get(optimizer)
    return 1.0 if inverse is None else _readable(inverse)


def inverse_of(scale: Tensor) -> Tensor:
    """What gradients of a `scale` are multiplied by, as GradScaler.unscale_ has it."""
    return scale.double().reciprocal().float()


def _readable(inverse_scale: Tensor) -> float:
    """The scale, without the digits that its inverse has rounded."""
    inverse = float(inverse_scale)
    return float(f"{1 / inverse:.7g}") if inverse else 0.0


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
