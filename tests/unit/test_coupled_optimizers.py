"""Optimizers that look at all gradients in a step are told from those that step each parameter by itself."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from atoll.tensors.coupling import is_coupled
from atoll.tensors.stepunit import unit_of
from support.optimizers import SETTINGS

CPU = torch.device("cpu")


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(4, 2))]


def coupled(optimizer: torch.optim.Optimizer) -> bool:
    return any(is_coupled(optimizer, group, CPU) for group in optimizer.param_groups)


def test_no_optimizer_of_torch_is_coupled() -> None:
    for (name, variants), lr in itertools.product(SETTINGS.items(), (0.0, 1e-9, 0.01, 1.0)):
        for settings in variants:
            made = getattr(torch.optim, name)(parameters(), **{**settings, "lr": lr})
            assert not coupled(made), made
    for made in (torch.optim.Muon(parameters()), torch.optim.Adafactor(parameters())):
        assert not coupled(made)


class Clipping:
    """Clips to `bound` by the norm of all gradients in each step."""

    bound = 1.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:  # type: ignore[attr-defined]
            nn.utils.clip_grad_norm_(group["params"], self.bound)
        return super().step(closure)  # type: ignore[misc]


class ClippedSGD(Clipping, torch.optim.SGD):
    pass


class ClippedAdam(Clipping, torch.optim.AdamW):
    pass


@pytest.mark.parametrize("bound", [1e-6, 1e-3, 0.1, 1.0, 100.0, 1e5])
@pytest.mark.parametrize("lr", [0.0, 1e-5, 0.1])
@pytest.mark.parametrize("kind", [ClippedSGD, ClippedAdam])
def test_one_that_clips_by_the_norm_of_all_is(kind: Any, lr: float, bound: float) -> None:
    made = kind(parameters(), lr=lr)
    made.bound = bound
    assert coupled(made)
    assert unit_of(made).facts["coupled"]
    assert "coupled" not in unit_of(made, "element").facts, "who says so knows better"
    assert unit_of(made, "tensor").facts["coupled"]


class OneRate(torch.optim.Optimizer):
    """SGD with one rate for all parameters, by how far all have come, as D-Adaptation has it."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("first", p.detach().clone())
        moved = sum(float((p.grad * (self.state[p]["first"] - p)).sum()) for p in every if p.grad is not None)
        norm = sum(float(p.grad.abs().sum()) for p in every if p.grad is not None)
        for group in self.param_groups:
            group["d"] = max(group["d"], moved / norm)
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * group["d"])


@pytest.mark.parametrize("lr", [0.0, 1e-3, 0.05, 1.0])
def test_one_that_estimates_a_rate_for_all_is(lr: float) -> None:
    assert coupled(OneRate(parameters(), lr=lr)), "also where a warm-up has left little of the rate"


class Counting(torch.optim.SGD):
    """SGD with a warm-up of its own, and a history, beside its param groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.t, self.info, self.norms = torch.zeros(()), {"steps": [0]}, list[float]()
        self.numbers = np.random.default_rng(3)
        self.drawn = torch.Generator().manual_seed(5)

    def step(self, closure: Any = None) -> Any:
        self.t += 1
        self.info["steps"][0] += 1
        self.norms.append(float(self.param_groups[0]["params"][0].grad.norm()))
        noise = float(self.numbers.normal()) + float(torch.rand((), generator=self.drawn))
        self.param_groups[0]["lr"] = 0.1 * min(1.0, float(self.t) / 20, self.info["steps"][0] / 20) + noise
        return super().step(closure)


def test_a_trial_leaves_the_optimizer_and_the_script_s_numbers_alone() -> None:
    made = Counting(parameters())
    numbers, drawn = made.numbers.bit_generator.state, made.drawn.get_state()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with mock.patch("torch.cuda.manual_seed_all") as seeded:
        assert "coupled" not in unit_of(made).facts
        assert "coupled" not in unit_of(NumpyNoise(parameters(), lr=0.1)).facts
    assert not seeded.called
    assert (float(made.t), made.info, made.norms) == (0.0, {"steps": [0]}, [])
    assert made.numbers.bit_generator.state == numbers
    assert torch.equal(made.drawn.get_state(), drawn)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


class NumpyNoise(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.detach().add_(np.random.normal() + random.random(), alpha=0.01)
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """SGD with noise that it draws, as Langevin dynamics has it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)
        return super().step(closure)


def test_one_that_draws_numbers_is_not_and_leaves_the_script_s_numbers_alone() -> None:
    before = torch.get_rng_state()
    assert "coupled" not in unit_of(Noisy(parameters(), lr=0.1)).facts
    assert torch.equal(torch.get_rng_state(), before)
