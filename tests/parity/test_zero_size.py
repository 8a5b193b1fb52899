"""Parameters without elements (a prompt of no tokens, no extra classes) train everywhere."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import atoll
from atoll.memory.sharedgradients import SharedGradients
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


def hold_the_step(session: atoll.Session) -> list[bool]:
    """Step an empty parameter until the script's thread has passed its next sync point. Return, for each step
    that this worker has made of it, whether that point was passed meanwhile."""
    net = model()
    net.register_parameter("own", nn.Parameter(torch.zeros(0, 3, dtype=torch.float64)))
    rest = [p for name, p in net.named_parameters() if name != "own"]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": [net.own], "weight_decay": 0.0}])
    session.prepare(net, optimizer)
    pinned, passed, held = threading.Event(), threading.Event(), []
    stepped_with, step_made = SharedGradients.stepped_with, SharedGradients.step_made

    @contextmanager
    def hold(gradients: SharedGradients, chunk: int) -> Iterator[torch.Tensor]:
        with stepped_with(gradients, chunk) as flat:
            if not flat.numel():
                pinned.set()
                held.append(passed.wait(30))
            yield flat

    def made_meanwhile(gradients: SharedGradients, chunks: Iterable[int]) -> None:
        chunks = list(chunks)
        (empty,) = [chunk for chunk in chunks if not gradients._chunks[chunk].trained.extent]
        if gradients._sharing.holds_any(empty):
            assert pinned.wait(30)
        try:
            step_made(gradients, chunks)
        finally:
            passed.set()

    with (
        patch.object(SharedGradients, "stepped_with", hold),
        patch.object(SharedGradients, "step_made", made_meanwhile),
    ):
        for _ in range(2):
            (net(torch.randn(4, 32, dtype=torch.float64)).square().mean() + net.own.sum()).backward()
            pinned.clear()
            passed.clear()
            optimizer.step()
            session.clip_grad_norm_(1.0)  # waits for the step
            optimizer.zero_grad()
    session.close()
    return held


def test_sync_points_leave_an_empty_parameter_that_is_being_stepped(pool: WorkerPool) -> None:
    held = run_at(pool, "tiers", hold_the_step, world=2)
    assert sorted(held) == [[], [True, True]]  # one worker steps it
