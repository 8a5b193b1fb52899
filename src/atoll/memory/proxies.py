"""Stand-ins for `p.grad` while the gradient lies elsewhere.

A `GradientProxy` has the gradient's shape, dtype and device, and no memory of its own. Each function that is
called with a proxy gets the gradient itself for the length of the call, and changes made there count.
Functions of lists of gradients (`torch._foreach_mul_`) are called with one at a time, so that the gradients
are never all in one place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.memory.interrupts import uninterrupted
from atoll.tensors.torch_compat import (
    LIST_FUNCTIONS,
    REDUCE,
    TYPED_STORAGE,
    ZERO_LIST,
    AsPlainTensors,
    marked,
    tree_leaves,
    tree_map,
    untraced,
    version_of,
)
from atoll.tensors.torch_scaling import counted

_TENSOR: Any = torch.Tensor  # its getters are no attributes for a type checker
# Functions that read nothing but a tensor's kind.
CHEAP: set[Any] = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "is_sparse",
        "is_sparse_csr", "is_cuda", "is_meta", "is_quantized", "is_nested", "itemsize", "nbytes",
    )
}  # fmt: skip
CHEAP |= {
    getattr(torch.Tensor, name)
    for name in (
        "size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "__len__",
    )
}  # fmt: skip
_ITSELF: set[Any] = {
    _TENSOR.data.__get__,
    torch.Tensor.detach,
    torch.Tensor.detach_,
    torch.Tensor.requires_grad_,
}
# Functions that give out the memory in another form than a tensor.
_ESCAPES = (
    "numpy", "__array__", "data_ptr", "untyped_storage", "storage", TYPED_STORAGE, "__dlpack__",
    "__reduce_ex__", REDUCE,
)  # fmt: skip
OVERWRITE = ("zero_", ZERO_LIST)  # functions that read nothing of what they write


class GradientSource(Protocol):
    """The place of a proxy's gradient."""

    edits: int
    """How often it was written into."""

    def lend(self, *, overwrites: bool = False) -> AbstractContextManager[Tensor]:
        """Lend the gradient, of the proxy's shape, dtype and device, from the start of a storage of its own.

        Args:
            overwrites: True if nobody reads the old content, which may then be undefined.
        """

    def keep(self) -> Tensor:
        """Return the gradient in memory that stays, and that counts as the gradient from now on."""


class OwnSource:
    """A replaced gradient, which a script still has: it is no parameter's any more."""

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient
        self.edits = 0  # nobody asks, as it is no parameter's gradient

    def lend(self, *, overwrites: bool = False) -> AbstractContextManager[Tensor]:
        del overwrites
        return nullcontext(self._gradient)

    def keep(self) -> Tensor:
        return self._gradient


class LostSource:
    """A gradient that did not arrive, or is dropped: reading it raises `error`."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.edits = 0

    def lend(self, *, overwrites: bool = False) -> AbstractContextManager[Tensor]:
        del overwrites
        raise self._error

    def keep(self) -> Tensor:
        raise self._error


class GradientProxy(torch.Tensor):
    """A gradient that lies elsewhere. See the module."""

    source: GradientSource

    @staticmethod
    def of(source: GradientSource, like: Tensor, device: torch.device) -> GradientProxy:
        """Return a proxy with the shape and dtype of `like`, on `device`."""
        with torch.inference_mode(False), torch.no_grad():
            nan = _nan(like.shape, like.dtype, device)
            proxy = nan.as_subclass(GradientProxy)
        proxy.source = source
        return proxy

    @classmethod
    @untraced
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in CHEAP:
            with AsPlainTensors():
                return func(*args, **kwargs)
        if func == _TENSOR.data.__set__:
            return _set_data(*args)
        if func in _ITSELF:
            return args[0]
        if func.__name__.startswith(LIST_FUNCTIONS):
            return _one_by_one(func, args, kwargs)
        return _with_gradients(func, args, kwargs)


def edits_of(gradient: Tensor) -> int:
    """Return how often a gradient was written into. A greater number than before shows a change."""
    return gradient.source.edits if isinstance(gradient, GradientProxy) else version_of(gradient)


@functools.cache
def _nan(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of NaN over one element: a read that misses `__torch_function__` shows no plausible
    gradient."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


@uninterrupted
def _set_data(tensor: GradientProxy, value: Tensor) -> None:
    """Set `p.grad.data = value`, by copying. Raises UserError for another shape or dtype."""
    if value is tensor:  # `p.grad.data = p.grad.data`
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise UserError(
            f"the data of a gradient was set to a tensor of shape {tuple(value.shape)} and {value.dtype}; "
            f"the parameter has {tuple(tensor.shape)} and {tensor.dtype}"
        )
    with torch.no_grad(), tensor.source.lend() as lent:
        lent.copy_(value)


def _one_by_one(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of lists of equal length once for each place in the lists."""
    count = len(args[0])
    results: list[Any] = []
    for index in range(count):
        these = [[arg[index]] if isinstance(arg, (list, tuple)) else arg for arg in args]
        named = {key: [arg[index]] if isinstance(arg, (list, tuple)) else arg for key, arg in kwargs.items()}
        result = _with_gradients(func, tuple(these), named)
        results += result if isinstance(result, (list, tuple)) else []
    return results or None


@uninterrupted
def _with_gradients(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` with the gradients in place of their proxies."""
    proxies = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GradientProxy)}
    with ExitStack() as stack:
        if func.__name__ in _ESCAPES:
            lent = {key: proxy.source.keep() for key, proxy in proxies.items()}
        else:
            overwrites = func.__name__ in OVERWRITE
            lent = {
                key: stack.enter_context(proxy.source.lend(overwrites=overwrites))
                for key, proxy in proxies.items()
            }
        given, named = tree_map(lambda leaf: lent.get(id(leaf), leaf), (args, dict(kwargs)))
        result = counted(func)(*given, **named)  # other arguments may override the function
        of_memory = {lent[key].untyped_storage().data_ptr(): proxies[key] for key in proxies}
        same = {id(lent[key]): proxies[key] for key in proxies}
        return tree_map(lambda leaf: _handed_out(leaf, same, of_memory), result)


def _handed_out(leaf: Any, same: Mapping[int, GradientProxy], of_memory: Mapping[int, GradientProxy]) -> Any:
    """Return a result as the script may have it: it must not lie in memory that was only lent."""
    if id(leaf) in same:
        return same[id(leaf)]
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or not leaf.numel():
        return leaf
    proxy = of_memory.get(leaf.untyped_storage().data_ptr())
    if proxy is None:
        return leaf
    kept = proxy.source.keep()
    again = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    again = again.set_(kept.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())
    return marked(again, conj=leaf.is_conj(), neg=leaf.is_neg())
