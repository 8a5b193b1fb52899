"""Settings that an optimizer keeps beside its param groups count, or the script is told."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import atoll
from support.optimizers import Damped
from support.pool import JobFailedError, WorkerPool
from support.runs import KINDS, PACES, alone, model, run_at

ALL = {**KINDS, **PACES}
HOME = [kind for kind, config in ALL.items() if config.run.strategy in ("ring", "hierarchical")]
ELSEWHERE = [kind for kind in ALL if kind not in HOME]
CLASS = "support.optimizers:Damped"

pytestmark = pytest.mark.sampled


def train(session: atoll.Session | None, damping: float, offset: float, later: str) -> list[Tensor]:
    """Make steps with a damping that is given to the class, an offset that is set before `prepare`, and
    `later` one of both that is changed after two steps."""
    net = model()
    optimizer = Damped(net.parameters(), damping=damping)
    optimizer.offset = offset
    if session is not None:
        session.prepare(net, optimizer)
    for step in range(4):
        if step == 2 and later:
            setattr(optimizer, later, 3.0)
        made = torch.Generator().manual_seed(step)
        x = torch.randn(4, 32, generator=made, dtype=torch.float64)
        mse_loss(out := net(x), torch.zeros_like(out)).backward()  # the same on all workers
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.steps == 4
    if session is not None:
        session.barrier()
    return [p.detach().clone() for p in net.parameters()]


@cache
def plain(damping: float, offset: float, later: str) -> list[Tensor]:
    return train(None, damping, offset, later)


@pytest.mark.parametrize(
    "settings", [(1.0, 0.0, ""), (2.0, 0.0, ""), (2.0, 1.0, "damping"), (1.0, 0.0, "offset")], ids=str
)
@pytest.mark.parametrize("kind", HOME)
def test_where_workers_step_they_count(
    pool: WorkerPool, kind: str, settings: tuple[float, float, str]
) -> None:
    for worker in run_at(pool, kind, train, *settings):
        for mine, its in zip(worker, plain(*settings), strict=True):
            assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12)


MEANS = [kind for kind in ELSEWHERE if kind not in ("asp", "ssp", "ps-hra asp", "peers stale")]


@pytest.mark.parametrize("damping", [1.0, 2.0])
@pytest.mark.parametrize("kind", MEANS)
def test_elsewhere_arguments_count(pool: WorkerPool, kind: str, damping: float) -> None:
    for worker in run_at(pool, kind, train, damping, 0.0, "", optimizer=CLASS):
        for mine, its in zip(worker, plain(damping, 0.0, ""), strict=True):
            assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ((1.0, 1.0, ""), r"optimizer\.offset is 1\.0 here, and 0\.0 in the process that makes"),
        ((2.0, 0.0, "damping"), r"optimizer\.damping is 3\.0 here, and 2\.0 in the process that makes"),
        ((1.0, 0.0, "offset"), r"optimizer\.offset is 3\.0 here, and 0\.0 in the process that makes"),
    ],
    ids=["before prepare", "an argument", "another attribute"],
)
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_elsewhere_the_script_is_told_of_what_does_not(
    pool: WorkerPool, kind: str, settings: tuple[float, float, str], line: str
) -> None:
    with pytest.raises(JobFailedError, match=line):
        run_at(pool, kind, train, *settings, optimizer=CLASS)


class Held(torch.optim.SGD):
    """Clips the gradients of parameters that it holds beside its param groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.every = [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(self.every, 1e-3)
        return super().step(closure)


def clips(session: atoll.Session | None) -> list[Tensor]:
    net = model()
    optimizer = Held(net.parameters())
    if session is not None:
        session.prepare(net, optimizer)
    for step in range(4):
        made = torch.Generator().manual_seed(step)
        out = net(torch.randn(4, 32, generator=made, dtype=torch.float64))
        mse_loss(out, torch.ones_like(out)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def test_a_worker_alone_steps_with_what_the_optimizer_makes_of_parameters_that_it_holds() -> None:
    for mine, its in zip(alone(clips), clips(None), strict=True):
        assert torch.equal(mine, its)
