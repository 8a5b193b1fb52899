"""A module hook that a copied or saved module leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LeftBehind:
    """Calls `function`. A copy of the module, and what is pickled of it, has a hook there that does nothing:
    what `function` belongs to is not copied with it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_arguments: Any) -> None:
    return None
