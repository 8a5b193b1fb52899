"""`p.grad.data.clamp_(...)`, as loops of deep Q-networks have it, raises no version: it counts, or the script
is told. So does what numpy writes into a gradient."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import atoll
from atoll.train.sync import stores
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


@pytest.mark.parametrize("way", [clamped, assigned])
@pytest.mark.parametrize("kind", MEANS)
def test_what_a_script_begins_with_late_counts(
    pool: WorkerPool, kind: str, way: Callable[[Tensor], None]
) -> None:
    right = begins_late(None, way, 10, 90)
    for values in run_at(pool, kind, begins_late, way, 10, 90):
        for mine, its in zip(values, right, strict=True):
            assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12)


def begins_late_in_a_large_model(session: atoll.Session, first: int) -> list[Tensor]:
    with mock.patch.object(stores, "_SMALL_BYTES", 0):
        return begins_late(session, clamped, first, 90)


@pytest.mark.parametrize("kind", COMPARING)
def test_of_a_large_model_a_script_that_begins_late_is_told(pool: WorkerPool, kind: str) -> None:
    """Not every mean is compared, until a change is found."""
    right = begins_late(None, clamped, 3, 90)
    for values in run_at(pool, kind, begins_late_in_a_large_model, 3):
        for mine, its in zip(values, right, strict=True):
            assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12)
    with pytest.raises(
        JobFailedError, match=r"changed by the script through p\.grad\.data, and changes before"
    ):
        run_at(pool, kind, begins_late_in_a_large_model, 10)


def seldom(session: atoll.Session | None) -> list[Tensor]:
    """The clamp changes nothing but in some steps."""
    loop = Loop(session)
    for step in range(40):
        loop.backward(step)
        for parameter in loop.net.parameters():
            assert parameter.grad is not None
            most = 1e-3 if step in (20, 33) else 1e6
            parameter.grad.data.clamp_(-most, most)
        values = loop.step()
    return values


@pytest.mark.parametrize("kind", MEANS)
def test_changes_now_and_then_count(pool: WorkerPool, kind: str) -> None:
    right = seldom(None)
    for values in run_at(pool, kind, seldom):
        for mine, its in zip(values, right, strict=True):
            assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12)


def not_a_number(session: atoll.Session, is_large: bool) -> int:
    """Skip the steps whose mean holds NaN; returns the number of steps made."""
    made = 0
    with mock.patch.object(stores, "_SMALL_BYTES", 0 if is_large else 2**22):
        loop = Loop(session)
        for step in range(70):
            loop.backward(step)
            if step in (2, 20, 63, 64):
                for parameter in loop.net.parameters():
                    assert parameter.grad is not None
                loop.optimizer.zero_grad()
                (loop.net(torch.zeros(2, 32, dtype=torch.float64)).sum() * float("nan")).backward()
            if bool(torch.isfinite(session.clip_grad_norm_(1.0))):
                loop.step()
                made += 1
            else:
                loop.optimizer.zero_grad()
    return made


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("kind", COMPARING)
def test_nan_is_no_change(pool: WorkerPool, kind: str, is_large: bool) -> None:
    assert run_at(pool, kind, not_a_number, is_large, sync={"nonfinite": "allow"}) == [66, 66]
