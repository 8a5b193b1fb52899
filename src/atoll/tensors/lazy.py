"""Tensors without memory: each operation reads the values from where they lie.

They carry state_dicts and checkpoints of models that do not fit in memory. A loop over the entries of such a
state_dict holds one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.tensors.torch_compat import (
    arguments_of,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    wrapper_tensor,
)
from atoll.tensors.wrapped import flattened, is_wrapped, with_parts

_DETACH = torch.ops.aten.detach.default


class LazyTensor(Tensor):
    """A tensor of `shape` and `dtype` on `device` without memory of its own.

    `source()` returns the values, at each call in fresh memory. Every operation calls it, runs below autograd
    on the result, and returns a plain tensor. Views are lazy too, since a write into a plain view would be
    lost. A pickled or deep-copied LazyTensor is a plain tensor, and `numpy()` returns a read-only array.
    Raises UserError for an operation that writes into the tensor.
    """

    source: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls,
        source: Callable[[], Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | None = None,
        strides: Sequence[int] | None = None,
    ) -> LazyTensor:
        tensor: LazyTensor = wrapper_tensor(cls, shape, strides, dtype, device or torch.device("cpu"))
        tensor.source = source
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DETACH:
            lazy = args[0]
            return LazyTensor(lazy.source, lazy.shape, lazy.dtype, lazy.device, lazy.stride())
        given = dict(zip((argument.name for argument in arguments_of(func)), args, strict=False)) | dict(
            kwargs
        )
        for argument in arguments_of(func):
            if _is_written(argument) and any(
                isinstance(value, LazyTensor) for value in tree_leaves(given.get(argument.name))
            ):
                raise UserError(
                    f"{func}: tensors of a state_dict of a model in chunks can only be read; "
                    "change the parameter, or a clone() of the tensor"
                )
        if func.is_view and isinstance(args[0], LazyTensor):
            return _viewed(func, args, kwargs)
        args, kwargs = tree_map_only(LazyTensor, read_whole, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.source())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.source()
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole: Any = self.source()
        return whole.__reduce_ex__(protocol)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a plain tensor, even without a conversion.

        A plain optimizer's `load_state_dict` keeps the result and writes to it.
        """
        moved: Tensor = super().to(*args, **kwargs)
        return read_whole(moved)

    def numpy(self, *, force: bool = False) -> Any:
        array = self.source().numpy(force=force)
        array.setflags(write=False)
        return array

    def tolist(self) -> Any:
        return self.source().tolist()


def read_whole(tensor: Tensor) -> Tensor:
    """Return `tensor` itself, or a plain tensor with its values if it is lazy. One that is made of lazy
    tensors is made of plain ones."""
    if isinstance(tensor, LazyTensor):
        return tensor.source()
    if is_wrapped(tensor) and any(read_whole(part) is not part for part in flattened(tensor)[0].values()):
        return with_parts(tensor, read_whole)
    return tensor


def _viewed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return `func`'s views of the lazy tensor `args[0]`: lazy, with the layout of a plain tensor's views."""
    base, others = args[0], args[1:]
    empty = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    layouts, structure = tree_flatten(func(empty, *others, **kwargs))

    def lazy(number: int, like: Tensor) -> LazyTensor:
        def source() -> Tensor:
            view: Tensor = tree_leaves(func(base.source(), *others, **kwargs))[number]
            return view

        return LazyTensor(source, like.shape, like.dtype, base.device, like.stride())

    return tree_unflatten([lazy(number, like) for number, like in enumerate(layouts)], structure)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
