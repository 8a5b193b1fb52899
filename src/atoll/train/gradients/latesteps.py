"""Steps that a script calls within a backward, made at its end, when the mean is there.

A hook may step each parameter as its gradient comes, by an optimizer of its own, and zero the gradient, so
that no two gradients are in memory at once. The mean over the workers comes later. So such a step, and the
`zero_grad` after it, wait until the backward's gradients are reduced. Source: docs/how-to/optimizers.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.tensors.torch_compat import is_within_backward, note_step

_Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class _Step:
    """A step that waits.

    Attributes:
        arguments: those that the script gave to `step`.
        settings: each param group's settings when the script called it.
        zeroing: the arguments of the `zero_grad` after it; None: the script has called none.
    """

    arguments: _Call
    settings: list[dict[str, Any]]
    zeroing: _Call | None = None


class LateSteps:
    """The steps of one model's optimizers that a script calls within a backward.

    Attributes:
        are_made: True while the steps that have waited are made.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Mapping[nn.Parameter, str],
        waits: Callable[[], bool],
    ) -> None:
        """Take the name of each parameter. `waits()` is called for each step within a backward: False if it
        must not wait."""
        self._optimizers, self._names, self._waits = optimizers, names, waits
        self.are_made = self._is_closed = False
        self._waiting: dict[int, _Step] = {}  # by the optimizer's place
        self._latest: dict[int, _Step] = {}  # each optimizer's latest step within a backward
        self._without_gradient: list[int] = []
        self._take_back = [
            _replace(optimizer, name, functools.partial(instead, place))
            for place, optimizer in enumerate(optimizers)
            for name, instead in (("step", self._step), ("zero_grad", self._zero))
        ]

    def close(self) -> None:
        """Leave the optimizers' methods as they were."""
        self._is_closed = True
        for take_back in self._take_back:
            take_back()
        self._waiting.clear()
        self._latest.clear()
        self._optimizers, self._names = (), {}

    def forget(self) -> None:
        """Forget the steps of a backward that raised."""
        self._waiting.clear()

    def check(self) -> None:
        """Look at the gradients at the end of a backward, before they are reduced.

        Raises UserError for one that the script has dropped after a step that waits for it.
        """
        for place in self._waiting:
            for parameter in self._parameters(place):
                if parameter.grad is None:
                    step = f"{type(self._optimizers[place]).__name__}.step()"
                    raise UserError(
                        f"{self._names[parameter]}.grad was set to None within backward after {step}, which "
                        "waits for the mean at the end of backward; call the optimizer's zero_grad() there "
                        "in its place"
                    )
        others = self._latest.keys() - self._waiting.keys() if self._waiting else ()
        self._without_gradient = [place for place in others if not self._has_gradient(place)]

    def make(self) -> None:
        """Make the steps that wait, in the optimizers' order: the gradients are reduced.

        So does an optimizer whose parameters got a gradient by other workers' batches alone, if it stepped
        within a backward before.
        """
        due = {place: self._latest[place] for place in self._without_gradient if self._has_gradient(place)}
        due |= self._waiting
        self._latest |= self._waiting
        self._waiting, self._without_gradient = {}, []
        self.are_made = True
        try:
            for place, step in sorted(due.items()):
                optimizer = self._optimizers[place]
                with _as_it_was(optimizer, step.settings):
                    optimizer.step(*step.arguments[0], **step.arguments[1])
                if step.zeroing is not None:
                    optimizer.zero_grad(*step.zeroing[0], **step.zeroing[1])
        finally:
            self.are_made = False

    def _parameters(self, place: int) -> Iterator[nn.Parameter]:
        return (each for group in self._optimizers[place].param_groups for each in group["params"])

    def _has_gradient(self, place: int) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters(place))

    def _step(self, place: int, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self._is_closed or self.are_made or not is_within_backward() or not self._waits():
            return call(*args, **named)
        settings = [_settings(group) for group in self._optimizers[place].param_groups]
        self._waiting[place] = _Step((args, named), settings)
        note_step(self._optimizers[place])
        return None

    def _zero(self, place: int, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        step = self._waiting.get(place)
        if step is None or not is_within_backward():
            return call(*args, **named)
        step.zeroing = args, named
        return None


def _replace(optimizer: torch.optim.Optimizer, name: str, instead: Callable[..., Any]) -> Callable[[], None]:
    """Have the optimizer's method of this name call `instead(method, *arguments)`; return a function that
    takes this back."""
    own, call = vars(optimizer).get(name), getattr(optimizer, name)

    @functools.wraps(getattr(call, "__func__", call))
    def method(_optimizer: torch.optim.Optimizer, *args: Any, **named: Any) -> Any:
        return instead(call, *args, **named)

    bound = MethodType(method, optimizer)  # schedulers of torch wrap methods, not plain functions
    setattr(optimizer, name, bound)

    def take_back() -> None:
        if vars(optimizer).get(name) is bound:  # else a scheduler has wrapped it since
            if own is None:
                delattr(optimizer, name)
            else:
                setattr(optimizer, name, own)

    return take_back


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group's settings, with copies of tensors, which schedulers write into."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


@contextmanager
def _as_it_was(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Give the param groups the settings of an earlier time inside the `with` block.

    What has changed since then, as by a scheduler's step, is there again afterwards.
    """
    since = []
    for group, before in zip(optimizer.param_groups, settings, strict=False):
        changed = {key: group[key] for key, value in _settings(group).items() if _differs(value, before, key)}
        since.append((group, changed))
        group.update({key: before[key] for key in changed if key in before})
    try:
        yield
    finally:
        for group, changed in since:
            group.update(changed)


def _differs(value: Any, before: Mapping[str, Any], key: str) -> bool:
    former = before.get(key)
    if isinstance(value, Tensor) and isinstance(former, Tensor):
        return not torch.equal(value, former)
    return value is not former and bool(value != former)
