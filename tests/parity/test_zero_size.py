"""Parameters without elements (a prompt of no tokens, no extra classes) train everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import atoll
from support.pool import WorkerPool
from support.runs import KINDS, model, run_at

QUICK = ("tiers", "server tiers")


def train(session: atoll.Session, folder: str) -> int:
    """With an empty parameter that is trained in a group of its own, in one with others, or frozen."""
    net = model()
    for name in ("own", "same", "frozen"):
        empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64), requires_grad=name != "frozen")
        net.register_parameter(name, empty)
    rest = [p for name, p in net.named_parameters() if name != "own"]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": [net.own], "weight_decay": 0.0}])
    session.prepare(net, optimizer)
    for _ in range(3):
        (
            net(torch.randn(4, 32, dtype=torch.float64)).square().mean() + net.own.sum() + net.same.sum()
        ).backward()
        session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    session.save(folder)
    session.load(folder)
    assert [net.own.shape, net.same.shape, net.frozen.shape] == [(0, 3)] * 3
    iteration = session.iteration
    session.close()
    for name in ("own", "same"):  # as plain torch: their steps are counted, their averages are empty
        state = optimizer.state[net.get_parameter(name)]
        assert (name, float(state["step"]), state["exp_avg"].shape) == (name, 3, (0, 3))
    return iteration


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.soak) for kind in KINDS]
)
def test_empty_parameters_train(pool: WorkerPool, kind: str, tmp_path: Path) -> None:
    assert run_at(pool, kind, train, str(tmp_path / "checkpoint"), world=2) == [3, 3]
