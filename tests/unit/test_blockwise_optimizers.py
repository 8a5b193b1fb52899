"""Optimizers whose state is quantised in blocks, as 8-bit ones have it, are refused by name where
parts of tensors are stepped: they are element-wise for small parameters only."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atoll.memory.stepping import state_dtypes
from atoll.tensors import stepunit as tried
from atoll.tensors.stepunit import unit_of
from support.optimizers import SETTINGS, BlockwiseSGD


@pytest.mark.parametrize("lr", [0.05, 1e-7, 0.0])
@pytest.mark.parametrize("whole_blocks", [False, True])
@pytest.mark.parametrize("least", [0, 1024, 4096, 16384])
@pytest.mark.parametrize("block", [64, 128, 256, 2048])
def test_every_kind_of_blocks_is_seen(block: int, least: int, whole_blocks: bool, lr: float) -> None:
    settings = {"block": block, "least": least, "whole_blocks": whole_blocks, "lr": lr}
    assert unit_of(BlockwiseSGD(nn.Linear(3, 3).parameters(), **settings)).by_tensor


def test_it_is_element_wise_where_it_never_quantises() -> None:
    assert unit_of(BlockwiseSGD(nn.Linear(3, 3).parameters(), least=2**40)).keys == {"momentum"}


def test_a_plan_counts_states_that_are_as_large_as_their_parameter() -> None:
    assert state_dtypes(BlockwiseSGD(nn.Linear(2, 2).parameters()), torch.float32) == {"momentum": torch.int8}
    assert state_dtypes(torch.optim.Adafactor(nn.Linear(2, 2).parameters()), torch.float32) == {}


class ByShape(torch.optim.Optimizer):
    """SGD, but that parameters of some shapes are stepped by the sign of their mean gradient."""

    def __init__(self, params: Any, rule: Callable[[torch.Size], bool], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_mean = self.rule(parameter.shape)
                    by = parameter.grad.mean().sign() if by_mean else parameter.grad
                    parameter.sub_(by, alpha=group["lr"])


@pytest.mark.parametrize(
    "rule",
    [
        lambda shape: len(shape) == 1,
        lambda shape: len(shape) == 2,
        lambda shape: len(shape) == 3,
        lambda shape: len(shape) == 4,
        lambda shape: len(shape) > 1 and min(shape) >= 128,
        lambda shape: shape.numel() >= 4096,
        lambda shape: shape == (7, 11),  # of the optimizer's own parameter alone
    ],
    ids=["vectors", "matrices", "cubes", "filters", "sides of 128", "large", "own"],
)
def test_a_rule_for_some_shapes_is_seen(rule: Callable[[torch.Size], bool]) -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(7, 11))]
    unit = unit_of(ByShape(parameters, rule))
    assert unit.by_tensor
    assert "shape [" in unit.why or "differ" in unit.why or "by blocks" in unit.why
    assert not unit_of(ByShape(parameters, lambda _: False)).by_tensor


def test_optimizers_of_torch_pass_at_any_rate_of_learning() -> None:
    """Also where a warm-up has left nothing of the rate, and with tensors as rates."""
    for (name, variants), lr in itertools.product(SETTINGS.items(), (0.0, 1e-9, 1.0)):
        for settings in variants:
            made = getattr(torch.optim, name)(nn.Linear(2, 2).parameters(), **{**settings, "lr": lr})
            assert not unit_of(made).by_tensor, made
    rate = torch.tensor(0.0)
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=rate)
    assert unit_of(optimizer).keys == {"exp_avg", "exp_avg_sq"}
    assert float(rate) == 0.0


def test_param_groups_that_differ_in_their_rate_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[dict[str, Any]] = []
    real = tried.elementwise_state_keys
    monkeypatch.setattr(
        tried,
        "elementwise_state_keys",
        lambda o, g, *rest, **more: tries.append(g) or real(o, g, *rest, **more),
    )
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": 1e-4 * n} for n in range(1, 50)]
    groups += [{"params": [nn.Parameter(torch.zeros(2))], "betas": (0.8, 0.9)}]
    unit_of(torch.optim.AdamW(groups))
    assert len(tries) == 2
