"""Detect steps on prepared parameters by optimizers that `session.prepare` was not given.

An optimizer may run in backward: a hook steps each parameter as its gradient comes, then zeroes the gradient.
Its steps use this worker's own gradients, so the workers' models diverge in silence. The models also diverge
if a second optimizer steps while `p.grad` is not the mean, or while the steps are made elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from atoll.core.errors import PrepareError
from atoll.core.scriptline import at_script_line, script_line
from atoll.tensors.torch_compat import is_within_backward


class OtherSteps:
    """The refusal of steps on the named `parameters` by any optimizer except `optimizers`, until `close`.

    While `shows_mean()` is True, `p.grad` is the mean on every worker, and every worker makes an equal step.
    A step by another optimizer is then refused only inside a backward; otherwise `warn_once(subject, line)`
    warns of it once.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, nn.Parameter],
        *,
        shows_mean: Callable[[], bool],
        warn_once: Callable[[str, str], None],
    ) -> None:
        self._prepared = {id(each): each for each in optimizers}
        self._shows_mean, self._warn_once = shows_mean, warn_once
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        self._handle.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in self._prepared:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is not None:
                    self._found(optimizer, name)
                    return

    def _found(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        within = is_within_backward()
        step = f"{type(optimizer).__name__}.step() of parameter {name!r}{' within backward' * within}"
        step = at_script_line(step, script_line())
        if within or not self._shows_mean():
            raise PrepareError(
                f"{step}: session.prepare was not given this optimizer, so each worker would step by itself "
                "and the workers' models would part; give session.prepare a list with all optimizers that "
                "step the model"
            )
        self._warn_once(
            f"a step of {name!r} by another optimizer",
            f"{step}: session.prepare was not given this optimizer, so its state is in no checkpoint, its "
            "steps end no iteration and the workers do not compare it; give session.prepare a list with both "
            "optimizers, or the inner one alone if one is within the other, as in SAM",
        )
