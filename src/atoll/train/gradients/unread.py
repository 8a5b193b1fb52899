"""Gradients on the device that become a mean when the script first uses one of them.

After a backward `p.grad` is an `UnreadGradient`: the worker's own gradient, in its own memory, that asks for
the mean before the script reads or changes it. Autograd adds to it as to any other gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.memory.proxies import CHEAP, OVERWRITE
from atoll.memory.untilread import UntilRead
from atoll.tensors.torch_compat import AsPlainTensors, tree_leaves, tree_map, untraced

_TENSOR: Any = torch.Tensor  # its getters are no attributes for a type checker
# Functions that `zero_grad` calls, and that neither read nor change a value.
_UNREADING = CHEAP | {torch.Tensor.detach_, torch.Tensor.requires_grad_, _TENSOR._version.__get__}


class UnreadGradient(torch.Tensor):
    """A gradient that becomes the mean at its first use, and stands for the tensor `plain` afterwards."""

    plain: Tensor
    until: UntilRead | None

    @staticmethod
    def over(plain: Tensor, until: UntilRead) -> UnreadGradient:
        """Return a tensor over the memory of `plain`."""
        with torch.set_grad_enabled(plain.requires_grad):  # autograd may add to one that has a graph
            made = plain.as_subclass(UnreadGradient)
        made.plain, made.until = plain, until
        return made

    @classmethod
    @untraced
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _UNREADING:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, UnreadGradient) and each.until is not None:
                    if func.__name__ in OVERWRITE:
                        each.until = None  # nobody reads what was there
                    else:
                        each.until.use()
        with AsPlainTensors():
            args, kwargs = tree_map(_plain, (args, dict(kwargs)))
            return func(*args, **kwargs)


class UnreadGradients:
    """The gradients that `parameters` have now, to be hidden until the first of them is used.

    Attributes:
        until: that moment.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], until: UntilRead) -> None:
        self.until = until
        self._unread = {
            parameter: UnreadGradient.over(gradient, until)
            for parameter in parameters
            if (gradient := parameter.grad) is not None
            and not gradient.is_sparse  # a sparse one has no views
        }

    def hide(self) -> None:
        """Let parameters show unread gradients in place of the plain ones."""
        for parameter, unread in self._unread.items():
            if parameter.grad is unread.plain:
                parameter.grad = unread

    def put_back(self) -> None:
        """Let parameters show plain gradients."""
        for parameter, unread in self._unread.items():
            if parameter.grad is unread:
                parameter.grad = unread.plain

    def become(self, parameter: nn.Parameter, mean: Tensor) -> None:
        """Overwrite a parameter's gradient by `mean`, unless the script has overwritten it."""
        unread = self._unread.get(parameter)
        if unread is not None and unread.until is not None:
            unread.plain.data.copy_(mean)  # a graph stays, and no write is counted


def _plain(leaf: Any) -> Any:
    return leaf.plain if isinstance(leaf, UnreadGradient) else leaf
