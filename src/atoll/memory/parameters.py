"""Parameters whose memory comes and goes.

`fit` turns a model's parameters into ChunkParameters by changing their class only. The objects, their names
and their shapes stay, so modules, optimizers and the script's own references keep working. PyTorch hands
every operation on one of them to `__torch_function__`, wherever it is called. That brings the chunks of all
ChunkParameters among the arguments to the device, and then runs the operation as on plain parameters.

Operations that read only shape, dtype or autograd's bookkeeping move nothing. Operations that give out the
memory past autograd's count of changes (`.data`, `data_ptr`) mark the chunk as possibly written to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from atoll.core.callstack import caller
from atoll.core.errors import UserError
from atoll.memory import statedicts
from atoll.memory.interrupts import uninterrupted
from atoll.memory.saved import ParameterSlot, entered
from atoll.tensors.torch_compat import (
    TYPED_STORAGE,
    AsPlainTensors,
    compare_kinds,
    flatten_rnn,
    makes_parameter,
    untraced,
    version_of,
)
from atoll.tensors.torch_patches import stand_in_for_transforms

if TYPE_CHECKING:
    from atoll.memory.engine import Engine

Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]

_BASE: Any = torch.Tensor  # the descriptors of its attributes are not typed

# Attributes that are computed from the values, or give them out.
_OF_VALUES = {"H", "T", "mH", "mT", "data", "real", "imag", "__cuda_array_interface__"}


def _attributes() -> set[Any]:
    found = set()
    for name, attribute in vars(torch.Tensor.__bases__[0]).items():
        if hasattr(attribute, "__get__") and hasattr(attribute, "__set__") and name not in _OF_VALUES:
            found |= {attribute.__get__, attribute.__set__, attribute.__delete__}
    return found


def _methods(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)}


# Functions that are right for an absent parameter too: nothing is moved for them.
_PASSED: frozenset[Any] = frozenset(
    _attributes()
    | _methods("size", "dim", "ndimension", "numel", "nelement", "__len__", "element_size", "get_device")
    | _methods("is_floating_point", "is_complex", "is_signed", "is_same_size", "is_inference", "__hash__")
    | _methods("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_")
    | {torch.is_floating_point, torch.is_complex, torch.is_signed, torch.numel, torch.is_same_size}
    | {torch.result_type, compare_kinds, torch.is_inference}
)
# Functions that are called on a meta tensor with the parameter's layout instead.
_LAYOUT: frozenset[Any] = frozenset(_methods("stride", "is_contiguous", "storage_offset", "dim_order"))
# Functions whose results may be written through without a count of autograd's.
_GIVE_OUT: frozenset[Any] = frozenset(
    {_BASE.data.__get__}
    | _methods("data_ptr", "const_data_ptr", "untyped_storage", "storage", TYPED_STORAGE, "storage_type")
    | _methods("numpy", "__array__", "__dlpack__", "tolist")
)
# Functions that would replace the parameter's memory: they are refused.
_REPLACE: frozenset[Any] = frozenset(_methods("set_", "resize_", "resize_as_", "share_memory_", "swap_"))


class ChunkParameter(nn.Parameter):
    """A parameter whose values lie in a chunk. `take_over` makes it of an `nn.Parameter`."""

    _atoll: ParameterSlot

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Arguments = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs)
        if func in _PASSED:
            with AsPlainTensors():
                return func(*args, **kwargs)
        parameters = list(_chunk_parameters((args, kwargs)))
        if func in _LAYOUT:
            place = parameters[0]._atoll
            like = _engine(parameters[0]).chunks[place.chunk].likes[place.slot]  # on the meta device
            return func(like, *args[1:], **kwargs)
        if func in _REPLACE:
            engine, place = _engine(parameters[0]), parameters[0]._atoll
            raise UserError(
                f"{getattr(func, '__name__', func)}() would replace the memory of parameter "
                f"{engine.name(place)!r}, which lies in Atoll's memory under budgets; write values with "
                "copy_(), or call it before the model is prepared, or after the session"
            )
        return cls._on_values(parameters, func, types, args, kwargs)

    @classmethod
    @uninterrupted
    def _on_values(
        cls,
        parameters: Sequence[ChunkParameter],
        func: Callable[..., Any],
        types: Sequence[type],
        args: Arguments,
        kwargs: Keywords,
    ) -> Any:
        """Run `func` with the chunks of `parameters`, which are among its arguments, on the device."""
        used = _pin(parameters, gives_out=func in _GIVE_OUT or _writes(func, kwargs))
        try:
            with entered():
                if any(kind is not cls and kind is not Tensor for kind in types):
                    with _plain(parameters):  # so that the other classes' own handling applies
                        return func(*args, **kwargs)
                with AsPlainTensors():
                    return func(*args, **kwargs)
        finally:
            _unpin(used)

    @property
    @untraced
    def grad(self) -> Tensor | None:
        """The gradient, wherever it lies. Edits of it count."""
        return _engine(self).gradients.grad_of(self)

    @grad.setter
    @untraced
    def grad(self, gradient: Tensor | None) -> None:
        _engine(self).gradients.set_grad(self, gradient)

    @grad.deleter
    @untraced
    def grad(self) -> None:
        _engine(self).gradients.set_grad(self, None)

    @untraced
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter with the present values, in ordinary memory and in no chunk."""
        if id(self) not in memo:
            memo[id(self)] = self._plain_copy()
        copy: nn.Parameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter.__reduce_ex__(self._plain_copy(), protocol)  # type: ignore[no-untyped-call]

    @untraced
    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self._plain_copy())

    @untraced
    def stored_value(self) -> Tensor:
        """Return a copy of the present values in host memory; nothing becomes resident."""
        if not hasattr(self, "_atoll"):  # given back since a state_dict took this method
            return self.detach().to("cpu", copy=True)
        return _engine(self).value(self).cpu()

    def _plain_copy(self) -> nn.Parameter:
        return nn.Parameter(_engine(self).value(self), self.requires_grad)


def take_over(parameter: nn.Parameter, place: ParameterSlot) -> None:
    """Make a plain parameter a ChunkParameter at `place`."""
    stand_in_for_transforms(ChunkParameter, _copy, _refuse_functional)
    parameter.__class__ = ChunkParameter
    assert isinstance(parameter, ChunkParameter)
    parameter._atoll = place


def give_back(parameter: nn.Parameter, value: Tensor) -> None:
    """Make a ChunkParameter a plain parameter again, with `value` as its memory."""
    assert isinstance(parameter, ChunkParameter)
    del parameter._atoll
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    parameter.data = value


def place_of(parameter: nn.Parameter) -> ParameterSlot | None:
    """Return the place of a ChunkParameter; None for other parameters."""
    return parameter._atoll if isinstance(parameter, ChunkParameter) else None


def put(parameter: nn.Parameter, memory: Tensor) -> None:
    """Point a ChunkParameter at `memory`, without changing autograd's count of changes."""
    with AsPlainTensors():
        parameter.data = memory


def version(parameter: nn.Parameter) -> int:
    """Return the number of writes into a ChunkParameter, by autograd's count."""
    with AsPlainTensors():
        return version_of(parameter)


def _copy(parameter: ChunkParameter) -> Tensor:
    """Return a copy for a transform of torch.func, through which derivatives reach the parameter.

    What a transform writes into its copy is lost: then the next use of a parameter raises.
    """
    engine, place = _engine(parameter), parameter._atoll
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        copy = parameter.clone()
        alias = copy.detach()  # of the same memory and version
    gone = weakref.finalize(
        copy, _check_unwritten, alias, version_of(alias), weakref.ref(engine), engine.name(place)
    )
    gone.atexit = False
    return copy


def _check_unwritten(alias: Tensor, before: int, owner: weakref.ref[Engine], name: str) -> None:
    """Note a parameter whose copy, which is gone now, was written to."""
    engine = owner()
    if engine is not None and version_of(alias) != before:
        engine.lost_writes.append(name)


def _refuse_functional(parameter: ChunkParameter) -> Tensor:
    raise UserError(
        f"functionalize() of parameter {_engine(parameter).name(parameter._atoll)!r}, which lies in Atoll's "
        "memory under budgets; give it copies: {name: p.clone() for name, p in model.named_parameters()}"
    )


def _engine(parameter: ChunkParameter) -> Engine:
    engine: Engine = parameter._atoll.owner  # type: ignore[assignment]
    if engine.lost_writes:
        name = engine.lost_writes[0]
        engine.lost_writes.clear()
        raise UserError(
            f"a transform of torch.func has written into parameter {name!r}, which lies in Atoll's memory "
            "under budgets, so that the written values are lost; write outside of the transform"
        )
    return engine


def _chunk_parameters(arguments: Any) -> Iterator[ChunkParameter]:
    """Yield all ChunkParameters in nested tuples, lists and dictionaries."""
    if isinstance(arguments, dict):
        arguments = arguments.values()
    for each in arguments:
        if type(each) is ChunkParameter:
            yield each
        elif isinstance(each, (tuple, list, dict)):
            yield from _chunk_parameters(each)


def _writes(func: Any, kwargs: Keywords) -> bool:
    """True if a function writes into an argument, by its name. Autograd counts most such writes, but not a
    fused step's."""
    name: str = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or "out" in kwargs


def _pin(parameters: Iterable[ChunkParameter], *, gives_out: bool) -> dict[Engine, list[int]]:
    """Make the parameters' chunks resident together until `_unpin`; return them by engine."""
    used: dict[Engine, list[int]] = {}
    for parameter in parameters:
        used.setdefault(_engine(parameter), []).append(parameter._atoll.chunk)
    pinned: dict[Engine, list[int]] = {}
    try:
        for engine, chunks in used.items():
            engine.pin(chunks, gives_out=gives_out)
            pinned[engine] = chunks
    except BaseException:
        _unpin(pinned)
        raise
    return used


def _unpin(used: dict[Engine, list[int]]) -> None:
    for engine, chunks in used.items():
        engine.unpin(chunks)


@contextmanager
def _plain(parameters: Sequence[ChunkParameter]) -> Iterator[None]:
    """Make these parameters plain ones within the context."""
    for parameter in parameters:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.__class__ = ChunkParameter


def _assign(_func: Any, args: Arguments, _kwargs: Keywords) -> None:
    """Assign `parameter.data = value` by copying, so that the parameter stays in its chunk."""
    parameter, value = args
    if type(parameter) is ChunkParameter:
        _engine(parameter).assign(parameter, value)
    else:  # plain.data = parameter: copied, as otherwise the chunk could never leave
        parameter.data = _engine(value).value(value)


def _detach(func: Any, args: Arguments, _kwargs: Keywords) -> Tensor:
    """Return what `detach()` gives: for a state_dict a tensor that is read when it is used, else a view."""
    (parameter,) = args
    if makes_parameter(caller(1)):  # 1: above __torch_function__
        name = _engine(parameter).name(parameter._atoll)
        raise UserError(
            f"nn.Parameter(...) of parameter {name!r} would be another one in its memory, as "
            "parametrizations make them; do it before the model is prepared, or give it p.detach().clone()"
        )
    lazy = statedicts.lazily(parameter)
    if lazy is not None:
        return lazy
    used = _pin([parameter], gives_out=False)
    try:
        with AsPlainTensors():
            view: Tensor = func(parameter)
            return view
    finally:
        _unpin(used)


def _backward(_func: Any, args: Arguments, kwargs: Keywords) -> None:
    """Run `parameter.backward(...)` by autograd's own function, so that the engine sees every use in
    backward."""
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    gradient = given.pop("gradient", None)
    torch.autograd.backward(args[0], gradient, **given)


def _gradient_of(func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run `torch.autograd.grad` with ChunkParameters among its inputs.

    The inputs are given as their edges in the graph, so that the backward runs outside `__torch_function__`
    and the engine sees every use in it.
    """
    names = (
        "outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused",
        "is_grads_batched", "materialize_grads",
    )  # fmt: skip
    given = dict(zip(names, args, strict=False)) | kwargs
    outputs = [given["outputs"]] if isinstance(given["outputs"], Tensor) else given["outputs"]
    inputs = given["inputs"]
    keys = list(inputs) if isinstance(inputs, dict) else None
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs.values() if keys is not None else inputs)
    materialize = given.pop("materialize_grads", False)
    if given.get("allow_unused") is None:
        given["allow_unused"] = materialize
    with AsPlainTensors():
        given["inputs"] = [get_gradient_edge(p) if type(p) is ChunkParameter else p for p in wanted]
    given["outputs"] = [o.view_as(o) if type(o) is ChunkParameter else o for o in outputs]
    # Tensors that the backward saves for another backward must not hold their chunks either.
    with entered() if given.get("create_graph") else nullcontext():
        found: Sequence[Tensor | None] = func(**given)
    if materialize:
        found = [torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True)]
    return dict(zip(keys, found, strict=True)) if keys is not None else tuple(found)


def _backward_of(func: Any, args: Arguments, kwargs: Keywords) -> None:
    """Run `torch.autograd.backward` with ChunkParameters among its `tensors` or its `inputs`.

    Inputs are given as their edges in the graph, as in `_gradient_of`.
    """
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    roots = [given["tensors"]] if isinstance(given["tensors"], Tensor) else given["tensors"]
    with torch.enable_grad():
        given["tensors"] = [r.view_as(r) if type(r) is ChunkParameter else r for r in roots]
    if given.get("inputs") is not None:
        with AsPlainTensors():
            given["inputs"] = [
                get_gradient_edge(p) if type(p) is ChunkParameter else p for p in given["inputs"]
            ]
    func(**given)


def _keep_apart(_func: Any, _args: Arguments, _kwargs: Keywords) -> None:
    """Do nothing, in place of an RNN's `flatten_parameters()` on CUDA.

    It would move the parameters into one piece of memory, out of their chunks. cuDNN takes them where they
    lie, by copying.
    """


_SPECIAL: dict[Any, Callable[[Any, Arguments, Keywords], Any]] = {
    _BASE.data.__set__: _assign,
    torch.Tensor.detach: _detach,
    torch.detach: _detach,
    torch.Tensor.backward: _backward,
    torch.autograd.backward: _backward_of,
    torch.autograd.grad: _gradient_of,
    flatten_rnn: _keep_apart,
}
