"""Copies of a prepared model: copy.deepcopy, torch.save, and torch's AveragedModel."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import atoll
from support.pool import WorkerPool
from support.runs import KINDS, alone, model, run_at

QUICK = ("ring", "tiers")


def saved(net: nn.Module) -> nn.Module:
    """What is loaded of the whole module, saved by torch."""
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def backward(net: nn.Module) -> Tensor:
    loss: Tensor = net(torch.randn(4, 32, dtype=torch.float64)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def train(session: atoll.Session) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    session.prepare(net, optimizer)
    average = AveragedModel(net)
    backward(net)
    optimizer.step()
    optimizer.zero_grad()
    if session.config.memory.is_given:  # `update_parameters` keeps views of all parameters: all must fit
        average = AveragedModel(net)
    else:
        average.update_parameters(net)
    copies = {"copied": copy.deepcopy(net), "saved": saved(net), "averaged": average.module}
    for name, other in copies.items():
        for one, two in zip(net.parameters(), other.parameters(), strict=True):
            assert type(two) is nn.Parameter, name
            assert torch.equal(one, two), name
        sgd = torch.optim.SGD(other.parameters(), lr=0.1)
        backward(other)  # a plain module: nothing of it is reduced, nothing of the run is counted
        sgd.step()
        other.load_state_dict(other.state_dict())
        assert not torch.equal(next(net.parameters()), next(other.parameters())), name
    before = session.iteration
    backward(net)
    optimizer.step()
    assert session.iteration == before + 1


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.soak) for kind in KINDS]
)
def test_a_copy_is_a_plain_module(pool: WorkerPool, kind: str) -> None:
    run_at(pool, kind, train, world=2)


@pytest.mark.parametrize("tiers", [False, True])
def test_alone_too(tiers: bool) -> None:
    alone(train, tiers=tiers)
