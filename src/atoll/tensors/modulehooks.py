"""Module hooks that are not copied or pickled with their module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LeftBehind:
    """A hook that calls `function`, and does nothing in a copied or unpickled module.

    The owner of `function` is therefore not copied with the module.
    """

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
