"""Hooks on a model's forward: checks before it, and counts of samples for its backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.tensors.modulehooks import LeftBehind
from atoll.tensors.torch_compat import backward_under_way
from atoll.train.gradients.samples import SeenSamples, seen_in, tensors_in


class Forwards(Protocol):
    """The listener to a model's forwards.

    Attributes:
        forwards: the number of forwards that have ended.
        thread: the thread of the latest one.
    """

    forwards: int
    thread: int | None

    def forward_raised(self) -> None:
        """Act after a forward that has raised an error, which goes on to the script."""


class ForwardHooks:
    """Hooks on the forwards of `model` that autograd records. Recomputations inside a backward are ignored.

    `before()` is called before each forward. `accumulates()` returns whether the running backward leaves
    gradients in the model's parameters; torch.autograd.grad does not.

    `reached(forward)` is called whenever a backward that leaves gradients reaches the output of that forward.

    `tells` hears of each forward's end.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        before: Callable[[], None],
        accumulates: Callable[[], bool],
        reached: Callable[[SeenForward], None],
        tells: Forwards,
    ) -> None:
        self._tells = tells
        self._handled = 0  # the identity of the error that the script handled as the forward began
        self._model, self._before, self._accumulates, self._reached = model, before, accumulates, reached
        self._handles = [
            model.register_forward_pre_hook(BesideCompiled(self._on_forward), with_kwargs=True),
            model.register_forward_hook(BesideCompiled(self._on_output), with_kwargs=True, always_call=True),
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _on_forward(self, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        if module is self._model and torch.is_grad_enabled() and backward_under_way() == -1:
            self._handled = id(sys.exc_info()[1])
            self._before()

    def _on_output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module is not self._model or not torch.is_grad_enabled() or backward_under_way() != -1:
            return
        tells = self._tells
        if output is None and id(sys.exc_info()[1]) != self._handled:
            tells.forward_raised()
            return
        tells.forwards += 1
        tells.thread = get_ident()
        hook = SeenForward(self._accumulates, self._reached, seen_in((args, kwargs), output))
        if isinstance(output, Tensor) and output.grad_fn is not None:  # nearly always
            output.register_hook(hook)  # type: ignore[no-untyped-call]
            return
        reached = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        if not reached:  # an output of an unknown kind: count at the forward
            self._reached(hook)
        for tensor in reached:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]


class SeenForward:
    """A forward as its output shows it: a gradient hook that calls `then(self)` if `condition()` is True.

    Attributes:
        seen: the number of samples that the forward shows.
        is_counted: True if they are counted, until the backward that has counted them is given up.
        gives_zeros: True if backwards through the output give gradients of 0.
        is_differentiated: True if the script has taken gradients with a graph through the output, as for a
            penalty on them.
    """

    __slots__ = ("_condition", "_then", "gives_zeros", "is_counted", "is_differentiated", "seen")

    def __init__(
        self, condition: Callable[[], bool], then: Callable[[SeenForward], None], seen: SeenSamples
    ) -> None:
        self._condition, self._then = condition, then
        self.seen, self.is_counted = seen, False
        self.gives_zeros = self.is_differentiated = False

    def __call__(self, gradient: Tensor) -> Tensor | None:
        if self._condition():
            self._then(self)
            if self.gives_zeros:
                return torch.zeros_like(gradient)
        elif torch.is_grad_enabled():
            self.is_differentiated = True
        return None


class BesideCompiled(LeftBehind):
    """A module hook that runs in Python beside a compiled forward, and that a copied or saved module leaves
    behind. A forward of torch.export does without: other parameters stand in the place of the model's."""

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        self._outside = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_exporting():
            return
        if torch.compiler.is_dynamo_compiling():
            self._outside(*arguments)
        else:
            self._function(*arguments)
