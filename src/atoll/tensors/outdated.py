"""States of an optimizer that a script got, and that a later step has made outdated.

In plain PyTorch they are the live state. Where the steps are made elsewhere they are copies, so a change of
one has no effect, and the script must hear of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from atoll.tensors.lazy import LazyTensor
from atoll.tensors.torch_compat import tree_leaves, version_of


class GivenState(dict[str, Any]):
    """A parameter's state as the script gets it: a dict that can be watched. It copies as a plain one."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class OutdatedStates:
    """Outdated states that the script still holds. False if there are none."""

    def __init__(self) -> None:
        self._tensors: list[tuple[weakref.ref[Tensor], int]] = []  # with their versions
        self._states: list[tuple[weakref.ref[GivenState], dict[str, int]]] = []  # with their values' ids

    def __bool__(self) -> bool:
        return bool(self._tensors or self._states)

    def add(self, state: Mapping[str, Any]) -> None:
        """Watch a state from now on, for as long as the script holds it or a tensor of it."""
        if isinstance(state, GivenState):
            self._states.append((weakref.ref(state), _ids(state)))
        for leaf in tree_leaves(dict(state)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, LazyTensor):
                self._tensors.append((weakref.ref(leaf), version_of(leaf)))

    def clear(self) -> None:
        self._tensors, self._states = [], []

    def take_changes(self) -> bool:
        """Return True if the script has changed one since it was added, or since the last call."""
        tensors = [(ref, tensor, version) for ref, version in self._tensors if (tensor := ref()) is not None]
        states = [(ref, state, ids) for ref, ids in self._states if (state := ref()) is not None]
        self._tensors = [(ref, version_of(tensor)) for ref, tensor, _ in tensors]
        self._states = [(ref, _ids(state)) for ref, state, _ in states]
        return any(version_of(tensor) != version for _, tensor, version in tensors) or any(
            _ids(state) != ids for _, state, ids in states
        )


def _ids(state: GivenState) -> dict[str, int]:
    return {key: id(value) for key, value in state.items()}
