"""Hooks around an optimizer's step, inside those of the script.

torch runs step hooks in order of registration. A script's pre-hook may change the learning rate, a gradient
or a value for the coming step, and its post-hook sees the step's result, whenever it was registered. So
Atoll's hooks run last before the step, and first after it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from atoll.core.callstack import is_under_way
from atoll.tensors.modes import ShownInModes
from atoll.tensors.torch_compat import step_hooks

Before: TypeAlias = Callable[[torch.optim.Optimizer, Any, Any], Any]
After: TypeAlias = Callable[[torch.optim.Optimizer, Any, Any], None]

Handle: TypeAlias = "AroundStep | ShownInModes | RemovableHandle"

_REGISTER = "register_step_pre_hook"


class AroundStep:
    """A pair of step hooks, in force until `remove`.

    `before` runs after all of the script's pre-hooks, and `after` before all of its post-hooks. Several pairs
    on one optimizer run in order of construction.

    Both run once in a step. torch runs an optimizer's hooks again where the step of its class calls the step
    of a class that it is derived from, if an optimizer of that class was ever made.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, before: Before, after: After | None = None) -> None:
        self._before, self._after = before, after
        self._step: FrameType | None = None  # the call of the step under way
        within = vars(optimizer).get(_REGISTER)
        self._within = within if isinstance(within, _Within) else _Within(optimizer)
        self.before: RemovableHandle = self._within.register(self._begins)
        self.after: RemovableHandle = optimizer.register_step_post_hook(self._ends)
        self._within.ours.append(self)
        self._within.put_in_order()

    def remove(self) -> None:
        self.before.remove()
        self.after.remove()
        self._within.forget(self)

    @property
    def is_under_way(self) -> bool:
        """True inside a step; a step that raised is over."""
        return is_under_way(self._step)

    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self._step is not None and is_under_way(self._step):
            return None
        # In no variable: a frame that holds itself would keep what the step uses until a collection.
        self._step = inspect.currentframe().f_back  # type: ignore[union-attr]  # CPython has frames
        try:
            return self._before(optimizer, args, kwargs)
        except BaseException:
            self._step = None
            raise

    def _ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if inspect.currentframe().f_back is not self._step:  # type: ignore[union-attr]
            return
        self._step = None
        if self._after is not None:
            self._after(optimizer, args, kwargs)


class _Within:
    """Replaces an optimizer's `register_step_pre_hook` so that Atoll's pre-hooks stay last.

    Post-hooks need no such care: those that the script registers later run later.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self.ours = optimizer, list[AroundStep]()
        self._own = vars(optimizer).get(_REGISTER)  # the script's own replacement, if any
        self.register = getattr(optimizer, _REGISTER)
        setattr(optimizer, _REGISTER, self)

    def __call__(self, hook: Before) -> RemovableHandle:
        handle: RemovableHandle = self.register(hook)
        self.put_in_order()
        return handle

    def put_in_order(self) -> None:
        before, after = step_hooks(self._optimizer)
        for each in self.ours:
            before.move_to_end(each.before.id)
        for each in reversed(self.ours):
            after.move_to_end(each.after.id, last=False)

    def forget(self, gone: AroundStep) -> None:
        if gone in self.ours:
            self.ours.remove(gone)
        if self.ours or vars(self._optimizer).get(_REGISTER) is not self:
            return
        delattr(self._optimizer, _REGISTER)
        if self._own is not None:
            setattr(self._optimizer, _REGISTER, self._own)
