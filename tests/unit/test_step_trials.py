"""Trials of an optimizer's steps on sparse gradients and complex parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atoll.tensors.steptrials import steps_complex_as_real, why_not_dense
from atoll.tensors.stepunit import unit_of

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Lazy(torch.optim.Optimizer):
    """Decays a parameter where it has a gradient: of a sparse one, in its rows alone."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.is_sparse:
                    rows = p.grad.coalesce().indices()[0]
                    p[rows] *= 1 - group["lr"]
                    p.add_(p.grad, alpha=-group["lr"])
                elif p.grad is not None:
                    p.mul_(1 - group["lr"]).sub_(p.grad, alpha=group["lr"])


class Squares(torch.optim.Optimizer):
    """Divides by the root of a complex gradient's own square, not of its magnitude's."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / ((p.grad * p.grad).sqrt() + 1), alpha=group["lr"])


def made(make: Any, dtype: torch.dtype = torch.float32, **options: Any) -> torch.optim.Optimizer:
    return make([nn.Parameter(torch.zeros(3, 2, dtype=dtype))], lr=0.1, **options)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_sgd_takes_dense_gradients_for_sparse_ones(options: dict[str, Any]) -> None:
    assert why_not_dense(made(torch.optim.SGD, **options), sparse=True) == ""


def test_adagrad_takes_dense_gradients_for_sparse_ones() -> None:
    assert why_not_dense(made(torch.optim.Adagrad), sparse=True) == ""


@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_adam_takes_no_dense_gradients(sparse: bool) -> None:
    said = why_not_dense(made(torch.optim.SparseAdam), sparse=sparse)
    assert said.startswith("RuntimeError: SparseAdam does not support dense gradients")


def test_a_lazy_optimizer_is_asked_only_where_gradients_are_sparse() -> None:
    assert why_not_dense(made(Lazy), sparse=False) == ""
    assert why_not_dense(made(Lazy), sparse=True) == "it steps a sparse gradient otherwise than a dense one"


def test_adam_gives_its_own_error() -> None:
    assert why_not_dense(made(torch.optim.Adam), sparse=False) == ""
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        why_not_dense(made(torch.optim.Adam), sparse=True)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop,
        torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta, torch.optim.ASGD,
    ],
)  # fmt: skip
def test_torchs_element_wise_optimizers_step_complex_parameters_by_their_parts(make: Any) -> None:
    optimizer = made(make, torch.complex64)
    assert steps_complex_as_real(optimizer)
    assert not unit_of(optimizer).by_tensor


def test_another_optimizer_steps_complex_parameters_whole() -> None:
    assert not unit_of(made(Squares)).by_tensor
    unit = unit_of(made(Squares, torch.complex64))
    assert unit.by_tensor
    assert unit.why == "it steps complex parameters otherwise than their real views"
    assert unit.facts["complex"]
