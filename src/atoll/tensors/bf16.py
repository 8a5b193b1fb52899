"""Steps of bfloat16 parameters in float32: on master copies, or with stochastic rounding.

For the length of a step, a float32 Parameter takes the place of each bfloat16 one that has a gradient. Its
gradient is the reduced one, cast to float32, and the optimizer keeps float32 state for it. After the step
the parameter is the float32 value rounded. With master copies the float32 values stay, as the state "master",
and are rounded to the nearest. With stochastic rounding they are made anew from the parameter in each step.

Sources: Micikevicius et al., "Mixed Precision Training", ICLR 2018; of stochastic rounding: `rounding.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from atoll.core.errors import PrepareError
from atoll.core.options import no_such_choice
from atoll.tensors.chunkstate import State
from atoll.tensors.lazy import read_whole
from atoll.tensors.optimizer import ParameterOptimizer, StepHooks, own_tensors
from atoll.tensors.rounding import stochastically_rounded
from atoll.tensors.torch_compat import step_hooks, tree_map_only

Precision: TypeAlias = Literal["masters", "stochastic"]
_CHOICES: tuple[Precision, ...] = get_args(Precision)
MASTER = "master"  # a state's key: the float32 copy, as under `memory.master`
ROUNDINGS = "roundings"  # a state's key: how often the parameter was rounded stochastically
SEED = "rounding_seed"  # a param group's key
_NARROW, _WIDE = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Float32Steps:
    """How a model's bfloat16 parameters are stepped in float32.

    Attributes:
        how: "masters" or "stochastic".
        positions: each parameter's position in the model.
        seed: of stochastic rounding, equal on all workers.
    """

    how: Precision
    positions: Mapping[nn.Parameter, int]
    seed: int


def check_precision(asked: str | None, parameters: Mapping[str, nn.Parameter]) -> Precision | None:
    """Return `session.prepare(bf16=...)`.

    Raises PrepareError for another choice, and for a model without a trained bfloat16 parameter.
    """
    if asked is None:
        return None
    how = next((each for each in _CHOICES if each == asked), None)
    if how is None:
        raise PrepareError(f"session.prepare(bf16=...): {no_such_choice(asked, _CHOICES)}")
    if not any(each.dtype == _NARROW and each.requires_grad for each in parameters.values()):
        raise PrepareError(
            f"session.prepare(bf16={asked!r}): the model trains no parameter in bfloat16; leave bf16 out, or "
            "call model.to(torch.bfloat16) before the optimizer is made"
        )
    return how


class Float32Optimizer(ParameterOptimizer):
    """Makes `optimizer` step float32 copies of its bfloat16 parameters; others it steps themselves.

    Its states are float32, and travel as they are in `state_dict` and `load_state_dict`. A value that the
    script writes into a parameter counts for its copy: a master is kept where, rounded, it is the parameter's
    value.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, hooks: StepHooks, steps: Float32Steps) -> None:
        _forget_plain_steps(optimizer)
        super().__init__(optimizer, hooks)
        self._steps = steps
        # One copy object for each parameter: an optimizer inside another one may know it by identity.
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._exchanged: dict[nn.Parameter, int] = {}  # parameters in a step, with their numbers of roundings
        self._loaded: dict[str, Any] | None = None  # the state_dict of a load under way
        self._mark_groups()
        self._handles += [
            optimizer.register_state_dict_pre_hook(lambda _: self.restore()),
            optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: self._note(state_dict)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._load_exactly()),
        ]

    def close(self) -> None:
        """Leave the optimizer to the user as a plain one. A plain step makes its state bfloat16."""
        super().close()
        self.optimizer.register_step_pre_hook(_PlainSteps())

    def restore(self) -> None:
        """Undo what a failed step has left behind."""
        self._put_back()
        super().restore()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = super()._before(optimizer, args, kwargs)
        self._mark_groups()
        with torch.no_grad():
            for group in optimizer.param_groups:  # without parameters, if the step is left out
                group["params"] = list(map(self._float32_for, group["params"]))
        return args, kwargs

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._round()
        super()._after(optimizer, args, kwargs)

    def _mark_groups(self) -> None:
        """Keep the seed in the param groups, where a load may have put a run's own."""
        if self._steps.how == "stochastic":
            for group in self.optimizer.param_groups:
                group.setdefault(SEED, self._steps.seed)

    def _float32_for(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter to step in the place of this one, with its gradient and state."""
        if parameter.dtype != _NARROW or parameter.grad is None:
            return parameter
        state = self.optimizer.state.get(parameter, {})
        values, roundings = state.get(MASTER), state.get(ROUNDINGS, 0)
        if self._steps.how == "masters" and values is not None and values.dtype == _WIDE:
            torch.where(values.to(_NARROW) == parameter, values, parameter.to(_WIDE), out=values)
        else:
            values = parameter.detach().to(_WIDE)
            if any(isinstance(each, Tensor) and each.dtype == _NARROW for each in state.values()):
                state = tree_map_only(Tensor, _widened, dict(state))  # it is of plain steps
        copy = self._copies.get(parameter)
        if copy is None:
            copy = self._copies[parameter] = nn.Parameter(values)
        copy.data, copy.grad = values, parameter.grad.to(_WIDE)
        # Nothing fails from here on: a step that does not begin leaves the state whole.
        for key in (MASTER, ROUNDINGS):  # optimizers begin a state that is empty
            state.pop(key, None)
        self.optimizer.state.pop(parameter, None)
        self.optimizer.state[copy] = state
        self._exchanged[parameter] = roundings
        return copy

    @torch.no_grad()
    def _round(self) -> None:
        """Round the stepped copies into their parameters."""
        if self._steps.how == "masters":
            for parameter in self._exchanged:
                parameter.copy_(self._copies[parameter])
            return
        places: defaultdict[tuple[torch.device, int], list[nn.Parameter]] = defaultdict(list)
        for group, parameters in zip(self.optimizer.param_groups, self._group_parameters, strict=True):
            for parameter in parameters:
                if parameter in self._exchanged:
                    places[parameter.device, group[SEED]].append(parameter)
        for (_, seed), parameters in places.items():
            values = [self._copies[each].detach() for each in parameters]
            streams = [(self._exchanged[each], self._steps.positions[each]) for each in parameters]
            for parameter, result in zip(
                parameters, stochastically_rounded(seed, values, streams), strict=True
            ):
                parameter.copy_(result)
                self._exchanged[parameter] += 1

    def _put_back(self) -> None:
        """Put the parameters and their states back in the places of the copies."""
        if not self._exchanged:
            return
        for group, parameters in zip(self.optimizer.param_groups, self._group_parameters, strict=True):
            group["params"] = list(parameters)
        for parameter, roundings in self._exchanged.items():
            copy = self._copies[parameter]
            state: State = self.optimizer.state.pop(copy, {})
            copy.grad = None
            if self._steps.how == "masters":
                state[MASTER] = copy.detach()
            else:
                state[ROUNDINGS] = roundings
                copy.data = copy.new_empty(0)
            self.optimizer.state[parameter] = state
        self._exchanged.clear()

    def _note(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def _load_exactly(self) -> None:
        """Undo torch's cast of loaded states to the dtype of their parameters."""
        state_dict, self._loaded = self._loaded, None
        if state_dict is None:
            return
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        for index, parameter in zip(saved, parameters, strict=True):
            if parameter.dtype != _NARROW or index not in state_dict["state"]:
                continue
            cast = self.optimizer.state[parameter]
            for key, value in state_dict["state"][index].items():
                if key in cast:
                    cast[key] = _exact(cast[key], value)
        own_tensors(self.optimizer.state.values())


def _exact(cast: Any, saved: Any) -> Any:
    """Return a loaded state with its saved dtypes, where torch has cast it."""
    if isinstance(saved, Tensor):
        return cast if cast.dtype == saved.dtype else read_whole(saved).to(cast.device)
    if type(saved) in (list, tuple):
        return type(saved)(map(_exact, cast, saved))
    if type(saved) is dict:
        return {key: _exact(cast[key], each) for key, each in saved.items()}
    return cast


def _widened(state: Tensor) -> Tensor:
    return state.to(_WIDE) if state.dtype == _NARROW else state


class _PlainSteps:
    """A pre-hook that makes an optimizer's state plain torch's own in its first step after a session.

    torch's optimizers refuse a state of another dtype than its parameter, and cast a state that they load. A
    state_dict before that step is still exact.
    """

    def __call__(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        _forget_plain_steps(optimizer)
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, Tensor) or parameter.dtype != _NARROW:
                continue  # optimizers may have other entries, too
            state.pop(MASTER, None)
            state.pop(ROUNDINGS, None)
            for key, value in state.items():
                if key != "step":
                    state[key] = tree_map_only(Tensor, _narrowed, value)


def _narrowed(state: Tensor) -> Tensor:
    return state.to(_NARROW) if state.is_floating_point() else state


def _forget_plain_steps(optimizer: torch.optim.Optimizer) -> None:
    """Take the hooks of former sessions off the optimizer."""
    before, _ = step_hooks(optimizer)
    for number in [number for number, hook in before.items() if isinstance(hook, _PlainSteps)]:
        del before[number]
