"""Steps that a script calls within a backward, made at its end, when the mean is there.

A hook may step each parameter as its gradient comes, by an optimizer of its own, and zero the gradient, so
that no two gradients are in memory at once. The mean over the workers comes later. So such a step, and the
`zero_grad` after it, wait until the backward's gradients are reduced. Source: docs/from-ddp.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from atoll.core.errors import PrepareError, UserError
from atoll.memory.proxies import edits_of
from atoll.tensors.torch_compat import is_within_backward, note_step, version_of

_Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class _Step:
    """A step that waits.

    Attributes:
        arguments: those that the script gave to `step`.
        settings: each param group's settings when the script called it.
        values: by parameter with a gradient, how often its value was written into by then.
        edits: by the same parameters, how often the gradient was written into.
        zeroing: the arguments of the `zero_grad` after it; None: the script has called none.
    """

    arguments: _Call
    settings: list[dict[str, Any]]
    values: dict[nn.Parameter, int]
    edits: dict[nn.Parameter, int]
    zeroing: _Call | None = None


class LateSteps:
    """The steps of one model's optimizers that a script calls within a backward.

    Attributes:
        may_wait: False if no step ever waits.
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
        self.may_wait, self.are_made = bool(optimizers), False
        self._waiting: dict[int, _Step] = {}  # by the optimizer's place
        self._place_of: dict[nn.Parameter, int] = {}
        self._came: set[int] = set()  # optimizers that got a gradient here since they stepped
        self._left_out: list[int] = []  # optimizers that got none
        self._watches: list[RemovableHandle] = []  # from the first step that waits on
        self._take_back = [
            _replace(optimizer, name, functools.partial(instead, place))
            for place, optimizer in enumerate(optimizers)
            for name, instead in (("step", self._step), ("zero_grad", self._zero))
        ]

    def close(self) -> None:
        """Leave the optimizers' methods as they were."""
        for take_back in self._take_back:
            take_back()
        for watch in self._watches:
            watch.remove()
        self.forget()
        self._optimizers, self._names, self._waits = (), {}, _never
        self._take_back.clear()
        self._watches.clear()
        self._place_of.clear()

    def forget(self) -> None:
        """Forget the steps of a backward that raised."""
        self._waiting.clear()
        self._left_out.clear()

    def check_is_after_backward(self, what: str) -> None:
        """Raise PrepareError within a backward, unless steps that have waited are made."""
        if is_within_backward() and not self.are_made:
            raise PrepareError(
                f"{what} was called within backward, when the mean over the workers is not there yet; call "
                "it after backward, or step each parameter by an optimizer of its own (docs/from-ddp.md)"
            )

    def check(self, synchronous: bool) -> None:
        """Look at the steps that wait, at the end of a backward, before its gradients are reduced.

        Raises UserError for a gradient that the script has dropped since, and for a backward that is not
        synchronous, since its gradients are not reduced.
        """
        for place, step in self._waiting.items():
            if not synchronous:
                raise UserError(
                    f"{self._call(place)} was called within a backward under session.no_sync(), which leaves "
                    "the mean to a later backward; let the hook step in the last backward alone, which is "
                    "outside no_sync"
                )
            self._check(place, step)
        optimizers = range(len(self._optimizers)) if self._waiting else ()
        self._left_out = [place for place in optimizers if not self._has_own_gradient(place)]

    def make(self) -> None:
        """Make the steps that wait, in the optimizers' order: the gradients are reduced.

        So does an optimizer whose parameters have a gradient by other workers' batches alone: its hooks were
        not called here.
        """
        due: dict[int, _Step | None] = {p: None for p in self._left_out if self._has_gradient(p)}
        due |= self._waiting
        zeroing = next((step.zeroing for step in self._waiting.values() if step.zeroing is not None), None)
        self.forget()
        self.are_made = True
        try:
            for place, step in sorted(due.items()):
                optimizer = self._optimizers[place]
                if step is None:
                    zero = zeroing
                    optimizer.step()
                else:
                    zero = step.zeroing
                    with _as_they_were(optimizer, step.settings):
                        optimizer.step(*step.arguments[0], **step.arguments[1])
                if zero is not None:
                    optimizer.zero_grad(*zero[0], **zero[1])
                self._came.discard(place)
        finally:
            self.are_made = False

    def _parameters(self, place: int) -> Iterator[nn.Parameter]:
        return (each for group in self._optimizers[place].param_groups for each in group["params"])

    def _has_gradient(self, place: int) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters(place))

    def _has_own_gradient(self, place: int) -> bool:
        return place in self._came or place in self._waiting

    def _call(self, place: int) -> str:
        return f"{type(self._optimizers[place]).__name__}.step()"

    def _step(self, place: int, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self.are_made or not is_within_backward() or not self._waits():
            return call(*args, **named)
        if place in self._waiting:
            raise UserError(
                f"{self._call(place)} was called twice within one backward, at whose end it is made once; "
                "give each parameter an optimizer of its own, or call step() when the last gradient has come"
            )
        if not self._watches:
            self._watch()
        optimizer = self._optimizers[place]
        there = [parameter for parameter in self._parameters(place) if parameter.grad is not None]
        self._waiting[place] = _Step(
            (args, named),
            [_settings(group) for group in optimizer.param_groups],
            {parameter: version_of(parameter) for parameter in there},
            {parameter: edits_of(parameter.grad) for parameter in there if parameter.grad is not None},
        )
        note_step(optimizer)
        return None

    def _zero(self, place: int, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        step = self._waiting.get(place)
        if step is None or not is_within_backward():
            return call(*args, **named)
        step.zeroing = args, named
        return None

    # -- what hooks do after a step that waits -------------------------------------------------------------

    def _watch(self) -> None:
        """Have a hook run after the script's own on each parameter."""
        for place in range(len(self._optimizers)):
            for parameter in self._parameters(place):
                self._place_of[parameter] = place
                if parameter.grad is not None:  # it may have come in this backward
                    self._came.add(place)
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(self._hooks_ran)  # type: ignore[no-untyped-call]
                    self._watches.append(handle)

    def _hooks_ran(self, parameter: Tensor) -> None:
        place = self._place_of[parameter]  # type: ignore[index]
        self._came.add(place)
        if place in self._waiting:
            self._check(place, self._waiting[place], written_too=True)

    def _check(self, place: int, step: _Step, *, written_too: bool = False) -> None:
        """Raise UserError for what a hook has done after the step that waits, and a plain optimizer's would
        have come before.

        `written_too`: gradients are still where the hook has seen them.
        """
        for parameter, edits in step.edits.items():
            gradient, name = parameter.grad, self._names[parameter]
            if gradient is None or (written_too and edits_of(gradient) != edits):
                did = f"{name}.grad was {'written into' if gradient is not None else 'set to None'}"
                way_out = "call the optimizer's zero_grad() there in its place"
            elif written_too and version_of(parameter) != step.values[parameter]:
                did, way_out = f"parameter {name!r} was written into", "do it after backward"
            else:
                continue
            raise UserError(
                f"{did} within backward after {self._call(place)}, which waits for the mean at the end of "
                f"backward; {way_out}"
            )


def _never() -> bool:
    return False


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
def _as_they_were(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> Iterator[None]:
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
