"""The private parts of torch around GradScaler: how a scaler's work on gradients is heard of, and answered.

`torch_parts.py` says what a docstring here tells of a part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, WeakMethod, ref

import torch
from torch import Tensor
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad

from atoll.tensors.torch_compat import at_end_of_backward, tree_leaves
from atoll.tensors.torch_parts import TorchParts

_parts = TorchParts(__name__)
_part = _parts.part
if not TYPE_CHECKING:  # to a type checker it would say that the module has every name
    __getattr__ = _parts.refuse

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_torchs: Any = _part(f"torch.{_UNSCALE}", "count_unscaling", "unscale", "counted", "seem_finite")
_UNSCALE_OF = "_unscale_grads_"
_scalers: Any = _part(f"torch.amp.GradScaler.{_UNSCALE_OF}", "count_unscaling", "before_unscaling")

# An optimizer with this attribute has kernels that divide gradients by `optimizer.grad_scale` and skip a step
# where `optimizer.found_inf` is set. A GradScaler then sets these two and always calls `step`. torch sets the
# attribute for fused optimizers. Private: the three names, 2.8 to 2.13. Public way: none.
SCALES = "_step_supports_amp_scaling"
_LEFT = ("grad_scale", "found_inf")

# The factor by which each optimizer's gradients were multiplied, until `forget_scale`.
_INVERSES: WeakKeyDictionary[torch.optim.Optimizer, Tensor] = WeakKeyDictionary()
_SCALERS: WeakKeyDictionary[torch.optim.Optimizer, ReferenceType[torch.amp.GradScaler]] = WeakKeyDictionary()
_any_scale = False  # an inverse was noted at least once
_FIRST: WeakKeyDictionary[torch.optim.Optimizer, WeakMethod[Callable[[], None]]] = WeakKeyDictionary()
_HAS_BATCH: WeakKeyDictionary[torch.optim.Optimizer, WeakMethod[Callable[[], bool]]] = WeakKeyDictionary()
_unscale_gradients: Any = torch.amp.GradScaler.unscale_
_make_step: Any = torch.amp.GradScaler.step
_scale_outputs: Any = torch.amp.GradScaler.scale


def leave_scaling_to(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Let every GradScaler leave the division and the skip to `optimizer`, until the returned function is
    called.

    Private: `SCALES`.
    """
    own = vars(optimizer).get(SCALES)  # as torch or the script has set it; None: not set
    setattr(optimizer, SCALES, True)

    def take_back() -> None:
        if own is None:
            vars(optimizer).pop(SCALES, None)
        else:
            setattr(optimizer, SCALES, own)

    return take_back


def scale_left_to(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Return the scale by which an optimizer's step must divide for a GradScaler, or None.

    Private: as in `SCALES`.
    """
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    return scale


def infinity_left_to(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a GradScaler has found an infinity and leaves the skip to an optimizer's step.

    On a GPU this waits. Private: as in `SCALES`.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def forget_scaling_left_to(optimizer: torch.optim.Optimizer) -> None:
    """Tell an optimizer's own step that gradients are divided already and hold no infinity.

    Private: as in `SCALES`.
    """
    for name in _LEFT:
        if hasattr(optimizer, name):
            setattr(optimizer, name, None)


def count_unscaling() -> None:
    """Patch torch so that a GradScaler's unscaling raises version counters and is recorded for `scale_of`.

    Atoll detects by version counters which gradients a script has changed since they were reduced or lent
    out. Private: `torch._amp_foreach_non_finite_check_and_unscale_`, which does not raise the counters,
    unlike other functions that write into their arguments, and `torch.amp.GradScaler._unscale_grads_`, 2.8
    to 2.13. Public way: none to hear of an unscaling. The first half can go once torch raises the counters.
    """
    if getattr(torch, _UNSCALE) is _torchs:
        setattr(torch, _UNSCALE, unscale)
    if getattr(torch.amp.GradScaler, _UNSCALE_OF) is _scalers:
        setattr(torch.amp.GradScaler, _UNSCALE_OF, _unscale_of)
    for name, original, replaced in (
        ("unscale_", _unscale_gradients, _unscale_with_scale),
        ("step", _make_step, _step_with_scale),
        ("scale", _scale_outputs, _scale_noted),
    ):
        if getattr(torch.amp.GradScaler, name) is original:
            setattr(torch.amp.GradScaler, name, replaced)


def _begin_scale(scaler: torch.amp.GradScaler, optimizer: object) -> None:
    """Have a scaler create its scale on a worker that has no batch for `optimizer`.

    A scaler creates its scale when it first scales a loss, and raises in `unscale_` and `step` before that.
    """
    known = _HAS_BATCH.get(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    has_batch = None if known is None else known()
    if has_batch is None or has_batch():
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])  # type: ignore[attr-defined]
    first = next(parameters, None)
    if first is not None:
        scaler.scale(torch.zeros((), device=first.device))


@functools.wraps(_unscale_gradients)
def _unscale_with_scale(scaler: torch.amp.GradScaler, optimizer: Any, *more: Any, **named: Any) -> Any:
    _begin_scale(scaler, optimizer)
    return _unscale_gradients(scaler, optimizer, *more, **named)


@functools.wraps(_make_step)
def _step_with_scale(scaler: torch.amp.GradScaler, optimizer: Any, *more: Any, **named: Any) -> Any:
    _begin_scale(scaler, optimizer)
    return _make_step(scaler, optimizer, *more, **named)


class _ScaledBackward:
    """A backward of a loss that `scaler` has scaled. It lives as long as autograd runs it."""

    def __init__(self, scaler: ReferenceType[torch.amp.GradScaler]) -> None:
        self.scaler = scaler

    def __call__(self) -> None:
        """Do nothing at the end of the backward: autograd keeps alive until then what it calls."""


_scaled_backward: ReferenceType[_ScaledBackward] | None = None  # the latest one, while it runs


@functools.wraps(_scale_outputs)
def _scale_noted(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
    scaled = _scale_outputs(scaler, outputs)
    if not scaler.is_enabled():
        return scaled
    of = ref(scaler)

    def hooked(part: Any) -> Any:
        for each in tree_leaves(part):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(lambda _: _note_backward(of))  # type: ignore[no-untyped-call]
        return part

    return map(hooked, scaled) if isinstance(scaled, Iterator) else hooked(scaled)


def _note_backward(scaler: ReferenceType[torch.amp.GradScaler]) -> None:
    global _scaled_backward
    backward = _ScaledBackward(scaler)
    at_end_of_backward(backward)
    _scaled_backward = ref(backward)


def scale_of_backward() -> Callable[[], float] | None:
    """Return a function that reads the scale of the GradScaler that has scaled the loss of the backward under
    way, or of an outer backward (a reentrant checkpoint); None if none has. Heard by a patch of the public
    `GradScaler.scale` (`count_unscaling`)."""
    backward = None if _scaled_backward is None else _scaled_backward()
    return None if backward is None else functools.partial(_scale_now, backward.scaler)


def _scale_now(held: ReferenceType[torch.amp.GradScaler]) -> float:
    scaler = held()
    return 1.0 if scaler is None else float(scaler.get_scale()) or 1.0


_unscaling = set[object]()  # optimizers whose gradients a GradScaler divides now


def is_unscaling() -> bool:
    """True while a GradScaler looks for infinities in gradients and divides them."""
    return bool(_unscaling)


@functools.wraps(_scalers or count_unscaling)
def _unscale_of(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    inverse_scale: Tensor,
    *more: Any,
    **named: Any,
) -> Any:
    """Unscale an optimizer's gradients by the original method of GradScaler, and record the scale.

    The function given to `before_unscaling` runs first. An optimizer with such a function may have no
    gradients on this worker: then no infinity was found, and GradScaler makes the step.
    """
    first = _FIRST.get(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    reduce = None if first is None else first()
    if reduce is not None:
        reduce()
    _unscaling.add(optimizer)
    try:
        found = _scalers(scaler, optimizer, inverse_scale, *more, **named)
    finally:
        _unscaling.discard(optimizer)
    if reduce is not None and not found:
        found = {inverse_scale.device: torch.zeros((), device=inverse_scale.device)}
    if isinstance(optimizer, torch.optim.Optimizer):  # not a script's wrapper, which is another object
        note_scale(optimizer, inverse_scale)
        _SCALERS[optimizer] = ref(scaler)
    return found


def scaler_of(optimizer: torch.optim.Optimizer) -> Callable[[], float] | None:
    """Return a function that reads the scale of the GradScaler that has divided or checked the optimizer's
    gradients since its last step; None if none has."""
    held = _SCALERS.get(optimizer) if was_unscaled(optimizer) else None
    return None if held is None else functools.partial(_scale_now, held)


def before_unscaling(
    optimizer: torch.optim.Optimizer, function: Callable[[], None], has_batch: Callable[[], bool]
) -> None:
    """Call `function` before a GradScaler unscales or checks an optimizer's gradients.

    `has_batch()` is False on a worker without a batch in this iteration: there the scaler needs no scaled
    loss. Both are bound methods, are held weakly, and are called once `count_unscaling` has run. Private:
    `torch.amp.GradScaler._unscale_grads_`, 2.8 to 2.13, is where a scaler first looks at the gradients of a
    step. It returns a tensor for each device with gradients, and `step` raises if there is none. Public
    way: none to reduce gradients before, or to let a worker without a batch step.
    """
    _FIRST[optimizer] = WeakMethod(function)
    _HAS_BATCH[optimizer] = WeakMethod(has_batch)


def note_scale(optimizer: torch.optim.Optimizer, inverse_scale: Tensor) -> None:
    """Record that an optimizer's gradients were multiplied by `inverse_scale`."""
    global _any_scale
    _any_scale = True
    _INVERSES[optimizer] = inverse_scale


def was_unscaled(optimizer: torch.optim.Optimizer) -> bool:
    """True if a GradScaler has divided the optimizer's gradients since its last step (`note_scale`)."""
    return optimizer in _INVERSES


def forget_scale(optimizer: torch.optim.Optimizer) -> None:
    """Forget the recorded scale: the optimizer has new gradients."""
    if _any_scale:
        _INVERSES.pop(optimizer, None)


def scale_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the factor by which a GradScaler divides an optimizer's gradients; 1 without a GradScaler.

    The gradients are divided already, or the scaler leaves the division to the step. Private: as in `SCALES`
    and `before_unscaling`. Public way: none; a scaler's `get_scale` does not say which optimizer's gradients
    were divided, or when.
    """
    scale = scale_left_to(optimizer)
    if isinstance(scale, Tensor):
        return _readable(inverse_of(scale))
    inverse = _INVERSES.get(optimizer) if _any_scale else None
    return 1.0 if inverse is None else _readable(inverse)


def inverse_of(scale: Tensor) -> Tensor:
    """Return the factor that undoes `scale`, rounded as GradScaler.unscale_ rounds it."""
    return scale.double().reciprocal().float()


def _readable(inverse_scale: Tensor) -> float:
    """Return the scale of a rounded inverse, without the digits that the rounding added."""
    inverse = float(inverse_scale)
    return float(f"{1 / inverse:.7g}") if inverse else 0.0


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function by which `count_unscaling` replaces a torch function, or the function itself.

    torch always passes its original function to `__torch_function__`.
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


_ONE = torch.ones(())
_found = torch.zeros(())


def seem_finite(gradients: Sequence[Tensor]) -> bool:
    """Return True if a quick look at plain tensors on the CPU finds neither NaN nor infinity.

    False is no proof of either: the look may not accept the tensors, or another thread's look has found one.
    The look takes a fifth of the time of `torch.nn.utils.get_total_norm` on a small model. It writes each
    value back where it was read, so on large tensors it takes longer. Private:
    `torch._amp_foreach_non_finite_check_and_unscale_`, 2.8 to 2.13, with a scale of 1, which changes no bit
    and no version counter. Public way: none that makes no tensor and one number of them.
    """
    global _found
    found = _found
    try:
        _torchs(gradients, found, _ONE)
    except RuntimeError:  # several dtypes or devices, sparse or complex tensors
        return False
    if found.item():
        _found = torch.zeros(())
        return False
    return True


_NEAREST = 8  # frames between the read of `p.grad` and the function that reads it


def reader_of_all_gradients(frame: FrameType | None) -> str:
    """Return the name of the torch function that reads a gradient for a computation over all gradients.

    `frame` belongs to the code that hands out the gradient. Returns "" for other readers. Private: the files
    of `torch.amp.GradScaler` and `torch.nn.utils.clip_grad_norm_`, which read `p.grad` within few calls, 2.8
    to 2.13. Public way: none to know the reader.
    """
    for _ in range(_NEAREST):
        if frame is None:
            break
        code = frame.f_code
        if code.co_filename == clip_grad.__file__ and code.co_name == "clip_grad_norm_":
            return "torch.nn.utils.clip_grad_norm_"
        if code.co_filename == grad_scaler.__file__:
            return "torch.amp.GradScaler"
        frame = frame.f_back
    return ""


_parts.hide(globals())
