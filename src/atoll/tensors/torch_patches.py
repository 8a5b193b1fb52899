"""The functions of torch that Atoll replaces: by them it hears of what a script does, or takes a part in it.

`torch_parts.py` says what a docstring here tells of a private part. Patches of GradScaler are in
`torch_scaling.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils.data import DataLoader

from atoll.core.scriptline import script_line
from atoll.tensors.backwardgraph import BackwardGraph
from atoll.tensors.torch_compat import backward_under_way, is_within_backward
from atoll.tensors.torch_parts import TorchParts

_parts = TorchParts(__name__)
_needs, _part = _parts.needs, _parts.part
if not TYPE_CHECKING:  # to a type checker it would say that the module has every name
    __getattr__ = _parts.refuse

# Transforms of torch.func

_WRAPS = (
    "torch._functorch.eager_transforms._wrap_tensor_for_grad",
    "torch._functorch.vmap._add_batch_dim",
    "torch._functorch.eager_transforms._wrap_functional_tensor",
)
_wraps: dict[str, Callable[..., Any]] = {path: _part(path, "stand_in_for_transforms") for path in _WRAPS}
_STAND_INS: dict[tuple[str, type], Callable[[Any], Tensor]] = {}  # by name in `_WRAPS` and class of tensors


@_needs("torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack")
def stand_in_for_transforms(
    kind: type[Tensor], stand_in: Callable[[Any], Tensor], functional: Callable[[Any], Tensor]
) -> None:
    """Patch torch so that transforms of torch.func take `stand_in(tensor)` in place of a tensor of class
    `kind`, and `functionalize`, which writes back what it has changed, `functional(tensor)`.

    A transform reads a tensor's memory past `__torch_function__`. The stand-in is made outside of the
    transform that takes it, so derivatives of transforms and graphs around it reach the tensor. Private: the
    functions of `_WRAPS`, by which `grad`, `vjp`, `jvp`, `vmap` and `functionalize` wrap their arguments, and
    `torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack`, 2.8 to 2.13. Public way: none.
    """
    for path, original in _wraps.items():
        is_functional = path == _WRAPS[-1]
        _STAND_INS[path, kind] = functional if is_functional else stand_in
        module, name = sys.modules[path.rpartition(".")[0]], path.rpartition(".")[2]
        if getattr(module, name) is original:
            setattr(module, name, _of_stand_ins(path, original))


def _of_stand_ins(path: str, wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function `wrap` of a tensor and more, with a stand-in for a tensor that has one."""

    @functools.wraps(wrap)
    def wrapped(tensor: Any, *more: Any, **named: Any) -> Any:
        stand_in = _STAND_INS.get((path, type(tensor)))
        if stand_in is not None:
            with torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack():
                tensor = stand_in(tensor)
        return wrap(tensor, *more, **named)

    return wrapped


# Zeroing

_ZERO_GRAD = "zero_grad"
_zero_of_optimizer: Any = torch.optim.Optimizer.zero_grad
_zero_of_module: Any = nn.Module.zero_grad
_told_of_zeros: list[WeakMethod[Callable[[Iterable[nn.Parameter]], None]]] = []


def watch_zeroing(tell: Callable[[Iterable[nn.Parameter]], None]) -> Callable[[], None]:
    """Call `tell` with the parameters of each `zero_grad`, until the returned function is called.

    `tell` is a bound method, and is held weakly. With `set_to_none=False`, `zero_grad` writes zeros, and to
    find them in the gradients would make a GPU wait. Private: nothing; `zero_grad` of
    `torch.optim.Optimizer` and of `nn.Module` are replaced. Public way: none, `zero_grad` has no hooks.
    """
    told = WeakMethod(tell)

    def unwatch() -> None:
        if told in _told_of_zeros:
            _told_of_zeros.remove(told)

    _told_of_zeros.append(told)
    for of, original, watched in (
        (torch.optim.Optimizer, _zero_of_optimizer, _watched_zero_of_optimizer),
        (nn.Module, _zero_of_module, _watched_zero_of_module),
    ):
        if of.zero_grad is original:
            setattr(of, _ZERO_GRAD, watched)
    return unwatch


@functools.wraps(_zero_of_optimizer)
def _watched_zero_of_optimizer(optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> None:
    _zero_of_optimizer(optimizer, *arguments, **named)
    if not torch.compiler.is_compiling():
        _tell_of_zeros([parameter for group in optimizer.param_groups for parameter in group["params"]])


@functools.wraps(_zero_of_module)
def _watched_zero_of_module(module: nn.Module, *arguments: Any, **named: Any) -> None:
    _zero_of_module(module, *arguments, **named)
    if not torch.compiler.is_compiling():
        _tell_of_zeros(list(module.parameters()))


def _tell_of_zeros(parameters: Sequence[nn.Parameter]) -> None:
    for told in list(_told_of_zeros):
        tell = told()
        if tell is not None:
            tell(parameters)
        else:
            _told_of_zeros.remove(told)


# Clipping

_WRITES = "_clip_grads_with_norm_"
_write: Any = _part(f"torch.nn.utils.clip_grad.{_WRITES}", "watch_clipping")
_latest_clip = ""


def watch_clipping() -> None:
    """Patch torch so that `clipped_at` knows the latest `clip_grad_norm_`.

    Private: `torch.nn.utils.clip_grad._clip_grads_with_norm_`, through which `clip_grad_norm_` writes, even
    if a script has imported the latter by name, 2.8 to 2.13. Public way: none to hear of a clipping.
    """
    if getattr(clip_grad, _WRITES) is _write:
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


# Backwards


class BackwardWatcher(Protocol):
    """A listener to calls of backward. One that a function within a backward makes is a part of that one."""

    def returned(self) -> None:
        """Act after a backward that has ended."""

    def raised(self, graph: BackwardGraph) -> None:
        """Act after a backward of `graph` that has raised an error, which goes on to the script."""


_backward_watchers: list[ref[BackwardWatcher]] = []
_watched_backward: Any = None  # the function that tells them; None while nobody listens
_found_backward: Any = None  # the one in whose place it stands


def watch_backwards(watcher: BackwardWatcher) -> Callable[[], None]:
    """Tell `watcher` of the ends of all backwards in this process, until the returned function is called.

    `watcher` is held weakly. Private: nothing; `torch.autograd.backward` is replaced, which `Tensor.backward`
    calls, around whatever it is by then. A script that has imported the function by name before calls the
    original. Public way: none to hear of an error in a backward, which may raise before it reaches any hook.
    """
    global _watched_backward, _found_backward
    held = ref(watcher)
    _backward_watchers[:] = [each for each in _backward_watchers if each() is not None]
    is_first = not _backward_watchers
    _backward_watchers.append(held)
    if is_first and torch.autograd.backward is not _watched_backward:
        _found_backward = torch.autograd.backward
        _watched_backward = torch.autograd.backward = _telling(_found_backward)
    return functools.partial(_unwatch_backwards, held)


def _unwatch_backwards(held: ref[BackwardWatcher]) -> None:
    global _watched_backward, _found_backward
    if held in _backward_watchers:
        _backward_watchers.remove(held)
    if not _backward_watchers:
        if torch.autograd.backward is _watched_backward:
            torch.autograd.backward = _found_backward
        _watched_backward = _found_backward = None


def _telling(backward: Any) -> Any:
    """Return a function that calls `backward`, and tells of its end while it is the one that does."""

    @functools.wraps(backward)
    def watched(*arguments: Any, **named: Any) -> None:
        tensors = arguments[0] if arguments else named.get("tensors")
        if not isinstance(tensors, Tensor) and isinstance(tensors, Iterator):
            tensors = tuple(tensors)  # backward would use it up
            if arguments:
                arguments = (tensors, *arguments[1:])
            else:
                named["tensors"] = tensors
        try:
            backward(*arguments, **named)
        except BaseException:
            if watched is _watched_backward and not is_within_backward():
                graph = BackwardGraph(tensors)
                for held in list(_backward_watchers):
                    watcher = held()
                    if watcher is not None:
                        watcher.raised(graph)
            raise
        if watched is _watched_backward and backward_under_way() == -1:
            for held in _backward_watchers:
                watcher = held()
                if watcher is not None:
                    watcher.returned()

    return watched


# DataLoader


class LoaderWatcher(Protocol):
    """A listener to loops over DataLoaders, each known by its iterator.

    A DataLoader with persistent workers uses one iterator for all its loops.
    """

    def began(self, iterator: object, loader: DataLoader[Any]) -> None: ...

    def gave(self, iterator: object) -> None: ...

    def ended(self, iterator: object) -> None: ...


_watchers: list[LoaderWatcher] = []
_ITERATOR: Any = _part("torch.utils.data.dataloader._BaseDataLoaderIter", "watch_loaders")
_begin: Any = DataLoader.__iter__
_give: Any = getattr(_ITERATOR, "__next__", None)


def watch_loaders(watcher: LoaderWatcher) -> Callable[[], None]:
    """Tell `watcher` of all loops over DataLoaders in this process, until the returned function is called.

    Private: `torch.utils.data.dataloader._BaseDataLoaderIter`, whose `__next__` gives the batches, 2.8 to
    2.13; `DataLoader.__iter__` begins each loop, also with persistent workers. Public way: none to hear of
    a DataLoader's batches.
    """

    def unwatch() -> None:
        if watcher in _watchers:
            _watchers.remove(watcher)
        if not _watchers:
            if DataLoader.__iter__ is _watched_begin:
                DataLoader.__iter__ = _begin  # type: ignore[method-assign]
            if _ITERATOR.__next__ is _watched_give:
                _ITERATOR.__next__ = _give

    _watchers.append(watcher)
    if DataLoader.__iter__ is _begin:
        DataLoader.__iter__ = _watched_begin  # type: ignore[method-assign]
    if _ITERATOR.__next__ is _give:
        _ITERATOR.__next__ = _watched_give
    return unwatch


@functools.wraps(_begin)
def _watched_begin(loader: Any) -> Any:
    iterator = _begin(loader)
    for watcher in _watchers:
        watcher.began(iterator, loader)
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


_parts.hide(globals())
