"""Gradients that become a mean when the script first uses one."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.memory.untilread import UntilRead
from atoll.train.gradients.unread import UnreadGradient, UnreadGradients


class Model:
    """Two parameters, whose gradients are ones and whose means are twos."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
        self.unread = UnreadGradients(self.parameters)
        self.until = UntilRead(self._read)
        self.reads = 0
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.unread.begin(self.until)

    def _read(self) -> None:
        self.reads += 1
        self.unread.put_back()
        self.until.end()
        self.unread.become({each: torch.full_like(each, 2.0) for each in self.parameters})

    def grad(self, index: int = 0) -> Tensor:
        gradient = self.parameters[index].grad
        assert gradient is not None
        return gradient


def test_the_first_use_makes_all_gradients_the_mean() -> None:
    model = Model()
    held = model.grad(1)
    assert float(model.grad().sum()) == 6.0
    assert (model.reads, float(held.sum()), float(model.grad(1).sum())) == (1, 4.0, 4.0)
    assert not isinstance(model.grad(), UnreadGradient)


def test_looks_at_a_gradient_s_kind_and_zeros_are_no_use() -> None:
    model = Model()
    assert (model.grad().shape, model.grad().dtype, model.grad().is_sparse) == ((3,), torch.float32, False)
    model.grad().zero_()
    assert model.reads == 0
    assert float(model.grad(1).sum()) == 4.0
    assert float(model.grad().sum()) == 0.0  # what the script has written stays


def test_a_change_through_another_tensor_is_seen() -> None:
    model = Model()
    model.unread.put_back()
    view = model.grad(1).view(-1)
    model.unread.hide()
    model.grad().zero_()  # through p.grad
    assert model.unread.first_written(False) is None
    view.mul_(0.5)
    assert model.unread.first_written(False) is model.parameters[1]
    assert model.unread.first_written(True) is None  # that was a GradScaler's
    assert float(model.grad(1).sum()) == 4.0
    assert model.unread.first_written(False) is None  # the mean is here
    assert model.reads == 1


def test_no_gradient_is_kept_alive() -> None:
    model = Model()
    model.unread.put_back()
    alive = [weakref.ref(model.grad(index)) for index in (0, 1)]
    model.unread.hide()
    assert isinstance(model.grad(), UnreadGradient)
    for parameter in model.parameters:
        parameter.grad = None
    assert [each() for each in alive] == [None, None]


def test_a_gradient_that_left_its_parameter_unread_is_refused() -> None:
    model = Model()
    held = model.grad()
    model.parameters[0].grad = None
    with pytest.raises(UserError, match="use p.grad, or clone it, before"):
        held.sum()
    assert float(model.grad(1).sum()) == 4.0
    with pytest.raises(UserError, match="use p.grad, or clone it, before"):
        held.sum()  # and it has no part in the mean


def test_a_gradient_that_stays_from_step_to_step_is_one_object() -> None:
    model = Model()
    held = model.grad()
    model.unread.put_back()
    model.until.forget()
    with pytest.raises(UserError, match="a gradient of an earlier backward is used"):
        model.until.use()
    model.until = UntilRead(model._read)
    model.unread.begin(model.until)
    assert model.grad() is held
    assert float(held.sum()) == 6.0


def test_a_gradient_with_a_graph_keeps_it() -> None:
    model = Model()
    weight = torch.ones(3, requires_grad=True)
    model.parameters[0].grad = weight * 3.0
    model.unread.begin(model.until)
    loss = model.grad().square().sum()
    (graph,) = torch.autograd.grad(loss, [weight])
    assert float(loss.detach()) == 12.0
    assert graph.tolist() == [12.0, 12.0, 12.0]  # 2 * 2 * 3
