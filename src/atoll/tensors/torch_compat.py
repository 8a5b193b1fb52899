"""Private parts of torch that Atoll relies on.

`SCALES`: an optimizer with this attribute has kernels that divide gradients by `optimizer.grad_scale` and
skip a step where `optimizer.found_inf` is set. A GradScaler then sets these two and always calls `step`.
torch sets the attribute for fused optimizers (2.13). There is no public way to ask for it.

`count_unscaling`: a GradScaler divides gradients by `torch._amp_foreach_non_finite_check_and_unscale_`, which
does not raise their version counters, unlike other functions that write into their arguments (2.13). Atoll
detects by these counters which gradients a script has changed since they were reduced or lent out. There is
no public way to hear of an unscaling. Once torch raises the counters, this function can go.

`scale_of`: the factor by which a GradScaler divides an optimizer's gradients. `GradScaler._unscale_grads_`
gets the optimizer and the factor; a fused kernel reads the factor as `optimizer.grad_scale` (2.13). A
scaler's public `get_scale` does not say which optimizer's gradients were divided, or when.

`clipped_at`: `clip_grad_norm_` writes through `torch.nn.utils.clip_grad._clip_grads_with_norm_`, also where a
script has imported the function by its name (2.13). There is no public way to hear of a clipping.

`before_unscaling`: `GradScaler._unscale_grads_` is also where a scaler first looks at the gradients of a
step. It returns what it has found by device, and `step` raises if it found no gradient at all (2.13). There
is no public way to reduce gradients before, or to let a worker without a batch step.

`watch_loaders`: the iterator of a DataLoader is a `torch.utils.data.dataloader._BaseDataLoaderIter`, whose
`__next__` gives the batches; `DataLoader.__iter__` begins each loop, also with persistent workers (2.13).
There is no public way to hear of a DataLoader's batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils.data import DataLoader, dataloader

from atoll.core.scriptline import script_line

SCALES = "_step_supports_amp_scaling"
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_torchs: Any = getattr(torch, _UNSCALE, None)
_UNSCALE_OF = "_unscale_grads_"
_scalers: Any = getattr(torch.amp.GradScaler, _UNSCALE_OF, None)
# The factor by which each optimizer's gradients were multiplied, until `forget_scale`.
_INVERSES: WeakKeyDictionary[torch.optim.Optimizer, Tensor] = WeakKeyDictionary()

_FIRST: WeakKeyDictionary[torch.optim.Optimizer, WeakMethod[Callable[[], None]]] = WeakKeyDictionary()


def count_unscaling() -> None:
    """Patch torch so that a GradScaler's unscaling raises version counters and is recorded for `scale_of`."""
    if _torchs is not None and getattr(torch, _UNSCALE) is _torchs:
        setattr(torch, _UNSCALE, unscale)
    if _scalers is not None and getattr(torch.amp.GradScaler, _UNSCALE_OF) is _scalers:
        setattr(torch.amp.GradScaler, _UNSCALE_OF, _unscale_of)


@functools.wraps(_scalers or count_unscaling)
def _unscale_of(
    scaler: object, optimizer: torch.optim.Optimizer, inverse_scale: Tensor, *more: Any, **named: Any
) -> Any:
    """Unscale an optimizer's gradients by the original method of GradScaler, and record the scale.

    Before, the function of `before_unscaling` runs. An optimizer that has one may have no gradients on this
    worker: then no infinity was found, and GradScaler makes the step.
    """
    first = _FIRST.get(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    reduce = None if first is None else first()
    if reduce is not None:
        reduce()
    found = _scalers(scaler, optimizer, inverse_scale, *more, **named)
    if reduce is not None and not found:
        found = {inverse_scale.device: torch.zeros((), device=inverse_scale.device)}
    if isinstance(optimizer, torch.optim.Optimizer):  # a script's wrapper around one is not what steps
        note_scale(optimizer, inverse_scale)
    return found


def before_unscaling(optimizer: torch.optim.Optimizer, function: Callable[[], None]) -> None:
    """Call `function` before a GradScaler unscales or checks an optimizer's gradients.

    `function` is a bound method, and is held weakly.
    """
    _FIRST[optimizer] = WeakMethod(function)


def note_scale(optimizer: torch.optim.Optimizer, inverse_scale: Tensor) -> None:
    """Record that an optimizer's gradients were multiplied by `inverse_scale`."""
    _INVERSES[optimizer] = inverse_scale


def forget_scale(optimizer: torch.optim.Optimizer) -> None:
    """Forget the recorded scale: the optimizer has new gradients."""
    _INVERSES.pop(optimizer, None)


def scale_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the factor by which a GradScaler divides an optimizer's gradients; 1 without a GradScaler.

    The gradients are divided already, or the scaler leaves the division to the step.
    """
    scale = getattr(optimizer, "grad_scale", None)
    if isinstance(scale, Tensor):
        return _readable(inverse_of(scale))
    inverse = _INVERSES.get(optimizer)
    return 1.0 if inverse is None else _readable(inverse)


def inverse_of(scale: Tensor) -> Tensor:
    """Return the factor that undoes `scale`, rounded as GradScaler.unscale_ rounds it."""
    return scale.double().reciprocal().float()


def _readable(inverse_scale: Tensor) -> float:
    """Return the scale of a rounded inverse, without the digits that the rounding added."""
    inverse = float(inverse_scale)
    return float(f"{1 / inverse:.7g}") if inverse else 0.0


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that replaces a torch function since `count_unscaling`, or the function itself.

    A `__torch_function__` is always given torch's original function.
    """
    return unscale if function is _torchs else function


@functools.wraps(_torchs or count_unscaling)
def unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply gradients of one device and dtype by `inverse_scale`, in place; raises their version counters.

    Sets `found_inf` to 1 where any gradient is not finite.
    """
    _torchs(gradients, found_inf, inverse_scale)
    # A factor of 1 only searches for infinities. On a GPU the factor is not read, because reading waits.
    if inverse_scale.device.type != "cpu" or inverse_scale.item() != 1.0:
        torch.autograd.graph.increment_version(gradients)


_WRITES = "_clip_grads_with_norm_"
_write: Any = getattr(clip_grad, _WRITES, None)
_latest_clip = ""


def watch_clipping() -> None:
    """Patch torch so that `clipped_at` knows of the latest `clip_grad_norm_`."""
    if _write is not None and getattr(clip_grad, _WRITES) is _write:
        setattr(clip_grad, _WRITES, _watched_write)


def clipped_at() -> str:
    """Return the script's line of the latest `clip_grad_norm_` since `forget_clipping`; "" for none."""
    return _latest_clip


def forget_clipping() -> None:
    """Forget the latest `clip_grad_norm_`."""
    global _latest_clip
    _latest_clip = ""


@functools.wraps(_write or watch_clipping)
def _watched_write(*arguments: Any, **named: Any) -> Any:
    global _latest_clip
    _latest_clip = script_line()
    return _write(*arguments, **named)


class LoaderWatcher(Protocol):
    """Hears of the loops over DataLoaders. `iterator` is a loop's; a DataLoader may use one for all loops."""

    def began(self, iterator: object) -> None: ...

    def gave(self, iterator: object) -> None: ...

    def ended(self, iterator: object) -> None: ...


_watchers: list[LoaderWatcher] = []
_ITERATOR: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
_begin: Any = DataLoader.__iter__
_give: Any = getattr(_ITERATOR, "__next__", None)


def watch_loaders(watcher: LoaderWatcher) -> Callable[[], None]:
    """Tell `watcher` of all loops over DataLoaders in this process, until the returned function is called."""

    def unwatch() -> None:
        if watcher in _watchers:
            _watchers.remove(watcher)
        if not _watchers and _give is not None:
            if DataLoader.__iter__ is _watched_begin:
                DataLoader.__iter__ = _begin  # type: ignore[method-assign]
            if _ITERATOR.__next__ is _watched_give:
                _ITERATOR.__next__ = _give

    _watchers.append(watcher)
    if _give is not None:
        if DataLoader.__iter__ is _begin:
            DataLoader.__iter__ = _watched_begin  # type: ignore[method-assign]
        if _ITERATOR.__next__ is _give:
            _ITERATOR.__next__ = _watched_give
    return unwatch


@functools.wraps(_begin)
def _watched_begin(loader: Any) -> Any:
    iterator = _begin(loader)
    for watcher in _watchers:
        watcher.began(iterator)
    return iterator


@functools.wraps(_give or watch_loaders)
def _watched_give(iterator: Any) -> Any:
    try:
        batch = _give(iterator)
    except StopIteration:
        for watcher in _watchers:
            watcher.ended(iterator)
        raise
    for watcher in _watchers:
        watcher.gave(iterator)
    return batch
