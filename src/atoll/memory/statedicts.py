"""A state_dict of a model that does not fit. Its tensors have no memory, and are read when they are used.

`nn.Module.state_dict` calls `detach()` on each parameter. Torch hooks around each module's state_dict tell
which parameters are being asked. So whoever calls `state_dict`, of the model or of a part of it, gets
`LazyTensor`s for parameters that may lie elsewhere, and nothing becomes resident.
"""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from atoll.core.callstack import caller, is_under_way
from atoll.tensors.lazy import LazyTensor
from atoll.tensors.torch_compat import own_parameters


class _Asked(threading.local):
    """The parameters of the module whose state_dict is being made on this thread.

    Attributes:
        parameters: those that have a `stored_value`, by id.
        call: the frame of that `state_dict`.
    """

    def __init__(self) -> None:
        self.parameters: dict[int, Any] = {}
        self.call: FrameType | None = None


_asked = _Asked()


class StateDicts:
    """Makes state_dicts of `model` and of its modules lazy, for parameters that have a `stored_value`, until
    `close`."""

    def __init__(self, model: nn.Module) -> None:
        self._handles: list[RemovableHandle] = []
        module: Any  # torch's hooks are not typed
        for module in model.modules():
            self._handles.append(module.register_state_dict_pre_hook(_begin))
            self._handles.append(module.register_state_dict_post_hook(_end))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def lazily(parameter: Any) -> Tensor | None:
    """Return the `LazyTensor` that `parameter.detach()` gives to a state_dict; None if another caller
    asks."""
    # The parameter stays in `_asked`: a module may have it under two names.
    if id(parameter) not in _asked.parameters or not is_under_way(_asked.call):
        return None
    return LazyTensor(parameter.stored_value, parameter.shape, parameter.dtype)


def _begin(module: nn.Module, _prefix: str, keep_vars: bool) -> None:
    own = () if keep_vars else own_parameters(module).values()
    _asked.parameters = {id(p): p for p in own if p is not None and hasattr(p, "stored_value")}
    _asked.call = caller()


def _end(_module: nn.Module, *_: Any) -> None:
    _asked.parameters, _asked.call = {}, None
