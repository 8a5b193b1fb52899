"""A backward whose forward was not a call of the prepared model: `p.grad` and the steps are plain PyTorch's.

A script may call parts of its model, or compute from its parameters, and a reentrant checkpoint calls the
model within the backward. Each batch has equally many samples on all workers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import atoll
from support.pool import JobFailedError, WorkerPool
from support.runs import KINDS, model, run_at

pytestmark = pytest.mark.sampled


def parts(net: nn.Sequential, x: Tensor) -> Tensor:
    for part in net:
        x = part(x)
    return x


def whole_checkpoint(net: nn.Sequential, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(net, x.requires_grad_(), use_reentrant=True)
    return found


def checkpoints(net: nn.Sequential, x: Tensor) -> Tensor:
    found: Tensor = checkpoint_sequential(net, 2, x.requires_grad_(), use_reentrant=True)
    return found


def parameters_alone(net: nn.Sequential, x: Tensor) -> Tensor:
    size = torch.stack([parameter.square().sum() for parameter in net.parameters()]).sum()
    return x[:, :4] * size


def train(session: atoll.Session | None, forward: Callable[[nn.Sequential, Tensor], Tensor]) -> list[Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    if session is not None:
        session.prepare(net, optimizer)
    found = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 32, dtype=torch.float64, generator=generator)
        y = torch.randn(8, 4, dtype=torch.float64, generator=generator)
        if session is not None:
            x, y = x[session.rank :: session.world], y[session.rank :: session.world]
        mse_loss(forward(net, x), y).backward()
        found.append(nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]))
        found += [parameter.detach().clone() for parameter in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "asp"])
@pytest.mark.parametrize("forward", [parts, whole_checkpoint, checkpoints, parameters_alone])
def test_gradients_and_steps_are_plain_pytorch_s(
    pool: WorkerPool, kind: str, forward: Callable[[nn.Sequential, Tensor], Tensor]
) -> None:
    right = train(None, forward)
    for worker in run_at(pool, kind, train, forward):
        for got, expected in zip(worker, right, strict=True):
            assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["server", "asp", "ssp"])
def test_parameters_that_come_at_the_next_forward_need_one(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(JobFailedError, match=r"iteration 1: .* with sync\.lazy call the model itself"):
        run_at(pool, kind, train, parts, world=1, sync={"lazy": True})
