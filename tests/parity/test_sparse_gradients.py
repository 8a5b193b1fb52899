"""Sparse gradients that a function makes, where no layer says so before: one line, or plain torch alone."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.core.errors import AtollError
from support.pool import WorkerPool
from support.runs import KINDS, alone, run_at

QUICK = ("ring", "asp")


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(200, 8, dtype=torch.float64))
        self.others = nn.ParameterList(nn.Parameter(torch.ones(32, 32).double()) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.w, sparse=True)


def train(session: atoll.Session) -> Tensor:
    net = Lookup()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    for step in range(2):
        net(torch.tensor([1, 2 + step])).square().sum().backward()
        session.clip_grad_norm_(1e9)
        optimizer.step()
        optimizer.zero_grad()
    return net.w.detach().clone()


def refused(session: atoll.Session) -> str:
    try:
        train(session)
    except AtollError as error:
        session._leaving.leave()
        return str(error)
    return ""


GONE = re.compile(
    r"^worker \d (lost touch with another worker, waiting for|cannot have) worker \d's values of "
)
LINE = "the gradient of 'w' is sparse, which chunks cannot hold; give its embedding sparse=False"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.soak) for kind in KINDS]
)
def test_it_is_one_line(pool: WorkerPool, kind: str) -> None:
    said = run_at(pool, kind, refused, world=2)
    assert LINE in said
    # Whoever still fetches values as the other one has left is told of that.
    assert set(said) == {LINE} or (kind == "tiers" and GONE.search(next(s for s in said if s != LINE)))


@pytest.mark.parametrize("tiers", [False, True])
def test_alone_it_is_the_same_line(tiers: bool) -> None:
    assert alone(refused, tiers=tiers) == LINE
