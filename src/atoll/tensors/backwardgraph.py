"""The graph of a call of backward, looked through after it has raised."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge


class BackwardGraph:
    """The graph behind the tensors with which backward was called.

    A node that is written in Python may call backward itself, as that of a reentrant checkpoint does. What
    that one reaches is in no graph.

    Args:
        tensors: the first argument of `torch.autograd.backward`; an iterator that backward has used up shows
            nothing.
    """

    def __init__(self, tensors: Any) -> None:
        self._leaves = set[int]()  # the identities of the tensors that would have had a gradient
        self._may_hide = self._has_checkpoint = False
        if isinstance(tensors, (Tensor, GradientEdge)):
            given: tuple[Any, ...] = (tensors,)
        else:
            given = tuple(tensors) if isinstance(tensors, Iterable) else ()
        left = [_node(each) for each in given]
        seen = set(left)
        self._leaves.update(id(each) for each in given if isinstance(each, Tensor) and each.is_leaf)
        while left:
            node = left.pop()
            if node is None:
                continue
            if isinstance(node, FunctionCtx):  # its attributes are the script's
                self._may_hide = True
                self._has_checkpoint = self._has_checkpoint or "Checkpoint" in type(node).__name__
            elif (leaf := getattr(node, "variable", None)) is not None:
                self._leaves.add(id(leaf))
            for following, _ in node.next_functions:
                if following not in seen:
                    seen.add(following)
                    left.append(following)

    def has_any(self, parameters: Iterable[Tensor]) -> bool:
        """True if one of these parameters is in the graph."""
        return any(id(parameter) in self._leaves for parameter in parameters)

    def may_hide(self, *, found: bool) -> bool:
        """True if the backward may have been one of parameters that are not in its graph. `found`: it was one
        of others for certain, so that only a checkpoint is taken to hide more."""
        return self._has_checkpoint if found else self._may_hide


def _node(given: Any) -> Any:
    """Return the node at which backward begins for a tensor, or for a gradient edge."""
    return given.grad_fn if isinstance(given, Tensor) else getattr(given, "node", None)
