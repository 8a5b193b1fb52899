"""Torch's element-wise optimizers, with settings that show what each keeps: for tests of parity."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.05}, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}],
    "Adam": [{"lr": 1e-2}, {"lr": 1e-2, "amsgrad": True, "maximize": True}],
    "AdamW": [{"lr": 1e-2, "weight_decay": 0.1}],
    "Adamax": [{"lr": 1e-2}],
    "NAdam": [{"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"lr": 1e-2}],
    "Adagrad": [{"lr": 1e-2, "initial_accumulator_value": 0.1, "lr_decay": 0.01}],
    "Adadelta": [{"lr": 1.0}],
    "RMSprop": [{"lr": 1e-2, "momentum": 0.9, "centered": True}],
    "ASGD": [{"lr": 1e-2, "t0": 3}],
    "Rprop": [{"lr": 1e-2}],
}


class BlockwiseSGD(torch.optim.Optimizer):
    """SGD with a momentum quantised in blocks, like 8-bit optimizers: an int8 code for each element, a scale
    for each block.

    Only parameters of `least` elements or more are quantised. With `whole_blocks`, only parameters that fill
    their blocks are (torchao); else the last block may be shorter (bitsandbytes).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.05,
        momentum: float = 0.9,
        block: int = 256,
        least: int = 4096,
        whole_blocks: bool = False,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "block": block}
        super().__init__(params, {**settings, "least": least, "whole_blocks": whole_blocks})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(group, parameter, self.state[parameter])

    def _step(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        numel, block = parameter.numel(), group["block"]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"]
        if momentum.dtype == torch.int8:
            scales = state["scales"].repeat_interleave(block)[:numel].view(parameter.shape)
            momentum = momentum.to(parameter.dtype) * scales
        momentum = momentum * group["momentum"] + parameter.grad
        parameter.sub_(momentum, alpha=group["lr"])
        if numel < group["least"] or (group["whole_blocks"] and numel % block):
            state["momentum"] = momentum
            return
        padded = torch.nn.functional.pad(momentum.reshape(-1), (0, -numel % block)).view(-1, block)
        state["scales"] = padded.abs().amax(1).clamp(min=1e-12) / 127
        codes = (padded / state["scales"][:, None]).round().to(torch.int8)
        state["momentum"] = codes.reshape(-1)[:numel].view(parameter.shape)


class ManyStates(torch.optim.Optimizer):
    """Scales each parameter by the norms of its rows and columns, and keeps states of every form."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(group, parameter, self.state[parameter])

    def _step(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        matrix = parameter.grad.reshape(parameter.shape[0] if parameter.ndim else 1, -1)  # type: ignore[union-attr]
        if not state:
            state["step"], state["since"], state["mask"] = torch.tensor(0.0), 0, None
            state["sides"] = [matrix.new_zeros(matrix.shape[0]), matrix.new_zeros(matrix.shape[1])]
            state["codes"] = torch.zeros(5, dtype=torch.int8)
        state["step"] += 1
        state["since"] += 1
        for side, axis in zip(state["sides"], (1, 0), strict=True):
            side.mul_(0.9).add_(matrix.square().mean(axis))
        state["codes"] = state["codes"] + 1
        rows, columns = state["sides"]
        scale = (rows[:, None] * columns[None, :] + 1e-12).rsqrt().clamp(max=10)
        parameter.sub_((matrix * scale).reshape(parameter.shape), alpha=group["lr"] / float(state["step"]))


class Halves(torch.Tensor):
    """A tensor that is made of two others, whose sum it stands for, as quantised states are made of codes and
    scales. Of torch's operations it has `detach` alone."""

    @staticmethod
    def __new__(cls, high: torch.Tensor, rest: torch.Tensor) -> Halves:
        made: Halves = torch.Tensor._make_wrapper_subclass(cls, rest.shape, dtype=rest.dtype)
        made.high, made.rest = high, rest
        return made

    high: torch.Tensor
    rest: torch.Tensor

    def whole(self) -> torch.Tensor:
        return self.high.to(self.rest.dtype) + self.rest

    def become(self, values: torch.Tensor) -> None:
        self.high.copy_(values)
        self.rest.copy_(values - self.high.to(values.dtype))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["high", "rest"], [self.rest.dtype, True]

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, shape: Any, stride: Any) -> Halves:
        assert context == [parts["rest"].dtype, True]
        assert shape == parts["rest"].shape
        return cls(parts["high"], parts["rest"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.detach.default:
            return cls(args[0].high.detach(), args[0].rest.detach())
        raise NotImplementedError(f"Halves has no {function}")


class HalvesSGD(torch.optim.Optimizer):
    """SGD whose momentum is a tensor of a class of its own, whose learning rate must be a tensor, which keeps
    arguments beside its param groups, as torchao's and bitsandbytes' optimizers do, and counts steps in
    them."""

    def __init__(
        self, params: Any, lr: float = 0.05, momentum: float = 0.9, *, weight: float = 1.0, part: float = 1.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.weight, self.arguments = weight, SimpleNamespace(part=part)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = torch.as_tensor(self.param_groups[-1]["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                raise RuntimeError("the learning rate is no tensor any more; fill it")
            group["count"] = group.get("count", 0) + 1  # as in the optimizers of pytorch_optimizer
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if "momentum" not in state:
                        high = torch.zeros_like(parameter, dtype=torch.float32)
                        state["momentum"] = Halves(high, torch.zeros_like(parameter))
                        state["blocks"] = torch.ones(3)  # no element-wise state either
                    moving = state["momentum"].whole() * group["momentum"] + parameter.grad
                    state["momentum"].become(moving)
                    rate = group["lr"] * self.weight * self.arguments.part / group["count"]
                    parameter.sub_(moving * rate)


class ScheduleFreeSGD(torch.optim.Optimizer):
    """SGD whose parameters are the average of its iterates after `eval()`, as in the package schedulefree.

    A step outside of its training mode raises an error. Defazio et al., "The Road Less Scheduled", 2024.
    """

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "training": False, "steps": 0})

    @torch.no_grad()
    def train(self) -> None:
        self._turn(True)

    @torch.no_grad()
    def eval(self) -> None:
        self._turn(False)

    def _turn(self, training: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
            for p in group["params"] if group["training"] != training else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("The optimizer is not in train mode. Call optimizer.train().")
            group["steps"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["steps"])
                p.sub_(p.grad, alpha=group["lr"] * (1 - group["beta"] * (1 - 1 / group["steps"])))
                z.sub_(p.grad, alpha=group["lr"])


class ModulusSGD(torch.optim.Optimizer):
    """SGD with a momentum, divided by the root of a mean of |gradient| ** 2: one real number for each complex
    one, and another for each real one."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["square"] = torch.zeros_like(parameter.abs())
                state["momentum"].mul_(0.9).add_(parameter.grad)
                state["square"].mul_(0.9).add_(parameter.grad.abs().square())
                parameter.sub_(group["lr"] * state["momentum"] / (state["square"].sqrt() + 0.1))


class Damped(torch.optim.Optimizer):
    """SGD with settings beside its param groups: an argument, what follows from it, and a count of steps."""

    def __init__(self, params: Any, lr: float = 0.1, damping: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.damping, self.offset, self.steps = damping, 0.0, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / (self.damping + self.offset))


class Looking(torch.optim.Optimizer):
    """SGD with momentum whose step looks at its whole state, in one of the ways that `how` names."""

    def __init__(self, params: Any, lr: float = 0.1, how: str = "empty") -> None:
        super().__init__(params, {"lr": lr})
        self.how = how

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        if self.how == "empty" and not self.state:
            self.first = True
        elif self.how == "values":
            self.largest = max([float(each["buffer"].abs().max()) for each in self.state.values()], default=0)
        elif self.how == "replaced":
            kept: Any = {p: state for p, state in self.state.items() if p.requires_grad}
            self.state = defaultdict(dict, kept)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    buffer = state.setdefault("buffer", torch.zeros_like(p))
                    buffer.mul_(0.9).add_(p.grad)
                    p.sub_(buffer, alpha=group["lr"])
