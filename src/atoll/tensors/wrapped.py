"""Tensors that are made of other tensors, such as an optimizer's state quantised in blocks.

Their classes follow torch's protocol: `__tensor_flatten__` gives the names of the inner tensors and a
context, from which `__tensor_unflatten__` makes an equal tensor. They need not have any operation of torch,
not even `clone`. torch's own classes of this kind are none of these: their contexts are no plain values.
Source: the docstring of torch.utils._python_dispatch.is_traceable_wrapper_subclass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from atoll.core.scriptmodule import module_of, script_module
from atoll.core.texts import one_line

_SHOWN = 200  # characters of a name or an error that a message quotes


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
        why = one_line(f"{type(error).__name__}: {error}", _SHOWN)
        raise ValueError(f"what was told makes no {class_.__name__}: {why}") from None
    if made.shape != shape:
        raise ValueError(f"a {class_.__name__} of shape {tuple(made.shape)}, where {tuple(shape)} was told")
    return made


def with_parts(value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor of the same class, whose inner tensors are what `change` returns for those of
    `value`."""
    parts, context = flattened(value)
    changed = {name: change(part) for name, part in parts.items()}
    return made_of(type(value), changed, context, value.shape, value.stride())


def clone(value: Tensor) -> Tensor:
    """Return a copy of a tensor of any class."""
    return with_parts(value, clone) if is_wrapped(value) else value.clone()


def moved_to(value: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of any class on `device`; the tensor itself if it is there."""
    if value.device == device or not is_wrapped(value):
        return value.to(device)
    return with_parts(value, lambda part: moved_to(part, device))


def nbytes(value: Tensor) -> int:
    """Return the bytes of a tensor of any class, or of the tensors that it is made of."""
    return sum(map(nbytes, flattened(value)[0].values())) if is_wrapped(value) else value.nbytes


def name_of(class_: type[Tensor]) -> str:
    """Return the name by which another process finds a class.

    Raises ValueError for one that no process could find.
    """
    name = f"{module_of(class_)}:{class_.__qualname__}"
    if class_named(name) is not class_:
        raise ValueError(f"another class has the name of {name}; give it one of its own")
    return name


def class_named(name: str) -> type[Tensor]:
    """Return the class of this name, of a module that is imported already. Nothing is imported.

    Raises ValueError if there is none.
    """
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    if found is None and module == script_module():
        found = sys.modules["__main__"]
    for part in qualified.split("."):
        # Not `getattr`, by which a module may import others.
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    if not isinstance(found, type) or not _is_wrapper(found) or module_of(found) != module:
        raise ValueError(
            f"tensors of {one_line(name, _SHOWN)!r}, which is no class of tensors that is imported here; "
            "import the package that has it, and define it outside of functions"
        )
    return found


def _is_wrapper(class_: type) -> bool:
    has = hasattr(class_, "__tensor_flatten__") and hasattr(class_, "__tensor_unflatten__")
    return has and issubclass(class_, Tensor) and class_.__module__.partition(".")[0] != "torch"
