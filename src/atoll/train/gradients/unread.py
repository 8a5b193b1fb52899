"""Gradients on the device that become a mean when the script first uses one of them.

After a backward `p.grad` is an `UnreadGradient`: the worker's own gradient, in its own memory, that asks for
the mean before the script reads or changes it. Autograd adds to it as to any other gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.memory.proxies import CHEAP, OVERWRITE
from atoll.memory.untilread import UntilRead, gone
from atoll.tensors.torch_compat import (
    GET_VERSION,
    AsPlainTensors,
    tree_leaves,
    tree_map,
    untraced,
    version_of,
)

# Functions that `zero_grad` calls, and that neither read nor change a value.
_UNREADING = CHEAP | {torch.Tensor.detach_, torch.Tensor.requires_grad_, GET_VERSION}


class UnreadGradient(torch.Tensor):
    """A gradient that becomes the mean at its first use, and stands for the tensor `plain` afterwards.

    Attributes:
        until: asked before the first use; None once the script has overwritten the gradient unread.
        of: the parameter.
        edits: how often `plain` was written into when it was hidden.
    """

    plain: Tensor
    edits: int
    until: UntilRead | None
    of: weakref.ref[nn.Parameter]

    @staticmethod
    def over(parameter: weakref.ref[nn.Parameter], plain: Tensor) -> UnreadGradient:
        """Return a tensor over the memory of `plain`, the parameter's gradient."""
        if plain.requires_grad:  # it has a graph, and autograd may add to it
            with torch.enable_grad():
                made = plain.as_subclass(UnreadGradient)
        else:
            made = plain.as_subclass(UnreadGradient)
        made.plain, made.of = plain, parameter
        return made

    def use(self, *, overwrites: bool) -> None:
        """Become the mean, unless the script only overwrites this gradient, or it is the mean by now.

        Raises UserError if the mean cannot be had: a later backward has come, or the parameter has another
        gradient.
        """
        until, parameter = self.until, self.of()
        if until is None or until.is_over:
            return
        if parameter is None or parameter.grad is not self:
            raise gone()
        if overwrites:
            self.until = None
        else:
            until.use()

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
                if isinstance(each, UnreadGradient):
                    each.use(overwrites=func.__name__ in OVERWRITE)
        with AsPlainTensors():
            args, kwargs = tree_map(_plain, (args, dict(kwargs)))
            return func(*args, **kwargs)


class UnreadGradients:
    """The gradients of `parameters`, which are hidden from the script until it uses the first of them.

    It keeps no gradient alive that neither the parameter nor the script has.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._held = [weakref.ref(parameter) for parameter in self._parameters]
        self._latest: list[weakref.ref[UnreadGradient] | None] = [None] * len(self._parameters)
        self._put_back: list[UnreadGradient] = []  # in whose place their parameters have the plain ones now

    def begin(self, until: UntilRead) -> None:
        """Hide the dense gradients that the parameters have now. A sparse one has no second tensor over its
        memory."""
        self._put_back = []
        for place, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is not None and gradient.layout == torch.strided:
                parameter.grad = self._unread(place, gradient, until)

    def _unread(self, place: int, gradient: Tensor, until: UntilRead) -> UnreadGradient:
        """Return an unread gradient over `gradient`: the one that the script has of it, if any."""
        latest = self._latest[place]
        unread = None if latest is None else latest()
        if isinstance(gradient, UnreadGradient):
            gradient = gradient.plain
        if unread is None or unread.plain is not gradient:
            unread = UnreadGradient.over(self._held[place], gradient)
            self._latest[place] = weakref.ref(unread)
        unread.until, unread.edits = until, version_of(gradient)
        return unread

    def first_written(self, unscaled: bool) -> nn.Parameter | None:
        """Return the first parameter whose hidden gradient was changed, though not through `p.grad`.

        A script may have other tensors over a gradient's memory. `unscaled`: a GradScaler has written into
        each gradient once.
        """
        for parameter in self._parameters:
            unread = parameter.grad
            if not isinstance(unread, UnreadGradient) or unread.until is None or not unread.until.waits:
                continue
            if version_of(unread.plain) > unread.edits + unscaled:
                return parameter
        return None

    def hide(self) -> None:
        """Hide the gradients again that `put_back` has shown."""
        for unread in self._put_back:
            parameter = unread.of()
            if parameter is not None and parameter.grad is unread.plain:
                parameter.grad = unread
        self._put_back = []

    def put_back(self) -> None:
        """Let parameters show plain gradients."""
        for parameter in self._parameters:
            if isinstance(gradient := parameter.grad, UnreadGradient):
                parameter.grad = gradient.plain
                self._put_back.append(gradient)

    def become(self, means: Mapping[nn.Parameter, Tensor]) -> None:
        """Overwrite the gradients that `put_back` has shown by `means`, but for those that the script has
        overwritten."""
        shown = {id(unread) for unread in self._put_back}
        for parameter, latest in zip(self._parameters, self._latest, strict=True):
            unread = None if latest is None else latest()
            if unread is None or unread.until is None:
                continue
            if id(unread) in shown and parameter.grad is unread.plain:
                unread.plain.data.copy_(means[parameter])  # a graph stays, and no write is counted
            else:  # the script has taken it away from its parameter: it has no part in the mean
                unread.until = UntilRead(None)
        self._put_back = []


def _plain(leaf: Any) -> Any:
    return leaf.plain if isinstance(leaf, UnreadGradient) else leaf
