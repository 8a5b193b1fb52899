"""Transforms of torch.func of a model in tiers: copies of parameters work, a parameter itself is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

import atoll
from atoll.core.errors import UserError
from support.runs import alone, model


def loss_of(net: nn.Module, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    found: Tensor = functional_call(net, dict(values), (x,)).square().mean()
    return found


def adapt(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], list[Tensor]]:
    """Train through an inner step of `torch.func.grad`, as MAML does."""
    x, losses = torch.linspace(-1, 1, 4 * 32, dtype=torch.float64).view(4, 32), []
    for _ in range(3):
        values = {name: p.clone() for name, p in net.named_parameters()}
        slopes = grad(lambda given: loss_of(net, given, x[:2]))(values)
        loss = loss_of(net, {name: value - 0.1 * slopes[name] for name, value in values.items()}, x[2:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in net.parameters()]


def adapt_in_tiers(session: atoll.Session) -> tuple[list[float], list[Tensor]]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    x = torch.ones(2, 32, dtype=torch.float64)
    with pytest.raises(UserError, match=r"torch\.func cannot follow parameter '0\.weight' itself.*p\.clone"):
        grad(lambda given: loss_of(net, given, x))(dict(net.named_parameters()))
    return adapt(net, optimizer)


def test_copies_of_parameters_are_transformed_and_a_parameter_itself_is_refused() -> None:
    losses, values = alone(adapt_in_tiers, tiers=True)
    net = model()
    right = adapt(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert losses == right[0]
    assert all(map(torch.equal, values, right[1]))
