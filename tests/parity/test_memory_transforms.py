"""Models in tiers under torch.func, where copies of parameters are transformed and a parameter itself is
refused, and under torch.compile before `prepare`, where they train as without it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn
from torch.func import functional_call, grad

import atoll
from atoll.core.errors import UserError
from support.pool import WorkerPool
from support.runs import IN_TIERS, alone, model, run_at


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


def compiled(session: atoll.Session | None, ran: bool) -> list[Tensor]:
    """Train a model that was compiled before `prepare`, and, if it `ran`, was called before."""
    torch._dynamo.reset()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 4 * 32, dtype=torch.float64).view(4, 32)
    if session is not None:
        called: nn.Module = torch.compile(net, backend="aot_eager")  # type: ignore[assignment]
        if ran:
            called(x)
        session.prepare(called, optimizer)
        mine = x[session.rank :: session.world]
    else:
        called, mine = net, x
    for _ in range(3):
        called(mine).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        session.barrier()
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("ran", [False, True])
def test_a_model_that_was_compiled_before(ran: bool) -> None:
    assert all(map(torch.equal, alone(compiled, ran, tiers=True), compiled(None, ran)))


@pytest.mark.parametrize("kind", sorted(IN_TIERS))
def test_workers_with_a_model_that_was_compiled_before(pool: WorkerPool, kind: str) -> None:
    for found in run_at(pool, kind, compiled, True):
        check_equal(found, compiled(None, True))
