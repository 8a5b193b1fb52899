"""Tensors that are made of other tensors, such as an optimizer's state quantised in blocks.

Their classes follow torch's protocol: `__tensor_flatten__` gives the names of the inner tensors and a
context, from which `__tensor_unflatten__` makes an equal tensor. They need not have any operation of torch,
not even `clone`. Source: the docstring of torch.utils._python_dispatch.is_traceable_wrapper_subclass.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def is_wrapped(value: object) -> bool:
    """True if a value is a tensor that is made of other tensors."""
    return isinstance(value, Tensor) and _is_wrapper(type(value))


def flattened(value: Tensor) -> tuple[dict[str, Tensor], Any]:
    """Return the inner tensors by name, and the context. An inner tensor may be made of others in turn."""
    of: Any = value
    names, context = of.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}, context


def made_of(
    class_: type[Tensor], parts: dict[str, Tensor], context: Any, shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    """Return the tensor of these inner tensors and this context, which has this shape.

    Raises ValueError if they do not make one.
    """
    of: Any = class_
    try:
        made: Tensor = of.__tensor_unflatten__(parts, context, shape, stride)
    except Exception as error:  # a class may raise anything for parts that do not fit
        raise ValueError(f"no {class_.__name__}: {type(error).__name__}: {error}") from None
    if made.shape != shape:
        raise ValueError(f"a {class_.__name__} of shape {tuple(made.shape)}, where {tuple(shape)} was told")
    return made


def clone(value: Tensor) -> Tensor:
    """Return a copy of a tensor of any class."""
    if not is_wrapped(value):
        return value.clone()
    parts, context = flattened(value)
    copies = {name: clone(part) for name, part in parts.items()}
    return made_of(type(value), copies, context, value.shape, value.stride())


def nbytes(value: Tensor) -> int:
    """Return the bytes of a tensor of any class, or of the tensors that it is made of."""
    return sum(map(nbytes, flattened(value)[0].values())) if is_wrapped(value) else value.nbytes


def name_of(class_: type[Tensor]) -> str:
    """Return the name by which another process finds a class."""
    return f"{class_.__module__}:{class_.__qualname__}"


def class_named(name: str) -> type[Tensor]:
    """Return the class of this name, of a module that is imported already. Nothing is imported.

    Raises ValueError if there is none, or if it is one of torch's own, which make more than values of their
    tensors.
    """
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not _is_wrapper(found) or module.partition(".")[0] == "torch":
        raise ValueError(f"a tensor of {name[:80]!r}, which is no class of tensors that is imported here")
    return found


def _is_wrapper(class_: type) -> bool:
    return issubclass(class_, Tensor) and hasattr(class_, "__tensor_flatten__")
