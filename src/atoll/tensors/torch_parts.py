"""The look-up of torch's private parts, and the one line for people where a torch lacks one.

The modules that use private parts are `torch_compat.py`, `torch_scaling.py` and `torch_patches.py`. No other
module may use one; `tests/unit/test_torch_compat.py` checks that. In these three the docstring of a function
gives the purpose of its private part, the versions of torch in which it was checked, and the public way, if
there is one. "2.8 to 2.13" means: the part has this name and these arguments in 2.8.0, the oldest torch that
Atoll allows, and the tests ran with 2.13.0.

A torch without one of the parts must not stop a script that does not need the part. So an import of a
function that needs it raises a UserError that names both. Nothing here fails later, in a step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from atoll.core.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])


def _holds(holder: Any, name: str) -> bool:
    """Return whether `holder` has an attribute, or is a class whose instances have it.

    A class declares such an attribute, or its `__init__` sets it.
    """
    if hasattr(holder, name):
        return True
    if not inspect.isclass(holder):
        return False
    stored = inspect.unwrap(holder.__init__).__code__.co_names if "__init__" in vars(holder) else ()
    return name in stored or any(name in inspect.get_annotations(each) for each in inspect.getmro(holder))


def missing_part(path: str) -> str:
    """Return the first part of a dotted path ("torch.Tensor._version") that the installed torch lacks.

    Returns "" where torch has all of them. The last part may be an attribute of a class's instances.
    """
    holder: Any = torch
    names = path.split(".")
    for index, name in enumerate(names[1:], 2):
        if not _holds(holder, name):
            return ".".join(names[:index])
        holder = getattr(holder, name, None)
    return ""


class TorchParts:
    """The private parts of torch that one module of Atoll relies on, which is called `module`."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._absent: dict[str, str] = {}  # function of the module -> the part that it needs and torch lacks

    def needs(self, *paths: str) -> Callable[[F], F]:
        """Declare the private parts that a function uses; without them nobody can import the function."""

        def declare(function: F) -> F:
            missing = next(filter(None, map(missing_part, paths)), "")
            if missing:
                self._absent[function.__name__] = missing
            return function

        return declare

    def part(self, path: str, *names: str) -> Any:
        """Return torch's private object at `path`.

        Returns None if torch has none; then nobody can import these `names` of the module.
        """
        missing = missing_part(path)
        if missing:
            self._absent.update(dict.fromkeys(names, missing))
            return None
        return functools.reduce(getattr, path.split(".")[1:], torch)

    def hide(self, names: dict[str, Any]) -> None:
        """Take out of a module's `names` those that need a part that torch lacks; the module's `__getattr__`
        is then asked for them."""
        for name in self._absent:
            names.pop(name, None)

    def refuse(self, name: str) -> Any:
        """Raise UserError, naming the part that torch lacks, when someone imports a name that needs the
        part."""
        if name in self._absent:
            raise UserError(
                f"torch {torch.__version__} has no {self._absent[name]}, which {self._module}.{name} needs; "
                "install a torch from 2.8 to 2.13, with which Atoll was checked"
            )
        raise AttributeError(f"module {self._module!r} has no attribute {name!r}")
