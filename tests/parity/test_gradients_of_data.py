"""`p.grad.data.clamp_(...)`, as loops of deep Q-networks have it, raises no version: it counts, or the script
is told. So does what numpy writes into a gradient."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import atoll
from support.pool import JobFailedError, WorkerPool
from support.runs import KINDS, model, run_at

COMPARING = "server", "ps-hra"  # whose shards step with a mean of their own
MEANS = [kind for kind in KINDS if kind != "asp"]  # where `p.grad` is the mean

pytestmark = pytest.mark.sampled


def clamped(gradient: Tensor) -> None:
    gradient.data.clamp_(-1e-3, 1e-3)


def negated(gradient: Tensor) -> None:
    gradient.data.neg_()


def one_set(gradient: Tensor) -> None:
    gradient.data.view(-1)[-1] = 0.25


def decayed(gradient: Tensor) -> None:
    gradient.data.add_(gradient.data, alpha=0.1)


def clipped_by_numpy(gradient: Tensor) -> None:
    array = gradient.numpy()
    np.clip(array, -1e-3, 1e-3, out=array)


def assigned(gradient: Tensor) -> None:
    gradient.data = gradient.data.abs()


WAYS: tuple[Callable[[Tensor], None], ...] = (
    clamped, negated, one_set, decayed, clipped_by_numpy, assigned,
)  # fmt: skip


class Loop:
    """A script that trains for a few steps; without `session` plain PyTorch, with all workers' samples."""

    def __init__(self, session: atoll.Session | None) -> None:
        self.session = session
        self.rank, self.world = (0, 1) if session is None else (session.rank, session.world)
        self.net = model()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        if session is not None:
            session.prepare(self.net, self.optimizer)

    def backward(self, step: int) -> None:
        made = torch.Generator().manual_seed(step)
        x = torch.randn(12, 32, generator=made, dtype=torch.float64)[self.rank :: self.world]
        y = torch.randn(12, 1, generator=made, dtype=torch.float64)[self.rank :: self.world]
        out = self.net(x)
        mse_loss(out, y.expand_as(out)).backward()

    def clip(self) -> None:
        if self.session is not None:
            self.session.clip_grad_norm_(0.5)
        else:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)

    def step(self) -> list[Tensor]:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [p.detach().clone() for p in self.net.parameters()]


def edits(session: atoll.Session | None, clips: str) -> list[list[Tensor]]:
    """Change gradients in each way, in a step each; `clips` before or after that, or never."""
    loop, found = Loop(session), []
    for step, way in enumerate(WAYS):
        loop.backward(step)
        if clips == "before":
            loop.clip()
        for parameter in loop.net.parameters():
            assert parameter.grad is not None
            way(parameter.grad)
        if clips == "after":
            loop.clip()
        found.append(loop.step())
    return found


@pytest.mark.parametrize("clips", ["never", "before", "after"])
@pytest.mark.parametrize("kind", MEANS)
def test_what_is_written_through_data_counts(pool: WorkerPool, kind: str, clips: str) -> None:
    right = edits(None, clips)
    for worker in run_at(pool, kind, edits, clips):
        for way, got, expected in zip(WAYS, worker, right, strict=True):
            for mine, its in zip(got, expected, strict=True):
                assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12), way.__name__


def begins_late(
    session: atoll.Session | None, way: Callable[[Tensor], None], first: int, steps: int
) -> list[Tensor]:
    loop = Loop(session)
    for step in range(steps):
        loop.backward(step)
        for parameter in loop.net.parameters() if step >= first else ():
            assert parameter.grad is not None
            way(parameter.grad)
        values = loop.step()
    return values


@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, clamped) for kind in MEANS if kind not in COMPARING] + [(kind, assigned) for kind in MEANS],
)
def test_what_a_script_begins_with_late_counts(
    pool: WorkerPool, kind: str, way: Callable[[Tensor], None]
) -> None:
    right = begins_late(None, way, 10, 90)
    for values in run_at(pool, kind, begins_late, way, 10, 90):
        for mine, its in zip(values, right, strict=True):
            assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", COMPARING)
def test_where_not_every_mean_is_compared_a_script_that_begins_late_is_told(
    pool: WorkerPool, kind: str
) -> None:
    with pytest.raises(
        JobFailedError, match=r"changed by the script through p\.grad\.data, and changes before"
    ):
        run_at(pool, kind, begins_late, clamped, 10, 90)
