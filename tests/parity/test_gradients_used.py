"""A script that reads or changes `p.grad` between backward and step sees the mean, as in one process.

It clips, logs, overwrites, accumulates or keeps gradients, or makes sharpness-aware steps. Each step is
compared with plain PyTorch's.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from support.pool import JobFailedError, WorkerPool
from support.runs import model, run_at, run_with

SAMPLES = 8  # of all workers in a backward


def batch(step: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + number)
    x = torch.randn(SAMPLES, 32, dtype=torch.float64, generator=generator)
    return x, torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)


class Loop:
    """A script's step in parts; `session` is None in plain PyTorch."""

    def __init__(self, session: atoll.Session | None) -> None:
        self.session = session
        self.net = model()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        if session is not None:
            session.prepare(self.net, self.optimizer)
        self.step, self.number = 0, 0
        self.seen: list[Tensor] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    def backward(self) -> None:
        x, y = batch(self.step, self.number)
        if self.session is not None:
            mine = slice(self.session.rank, None, self.session.world)
            x, y = x[mine], y[mine]
        self.number += 1
        mse_loss(self.net(x), y).backward()

    def norm(self) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def clip(self, most: float) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), most)


def none(loop: Loop) -> None:
    loop.backward()


def norm_clipped(loop: Loop) -> None:
    loop.backward()
    loop.clip(0.01)


def clipped_without_effect(loop: Loop) -> None:
    loop.backward()
    loop.clip(1e6)


def value_clipped(loop: Loop) -> None:
    loop.backward()
    nn.utils.clip_grad_value_(loop.net.parameters(), 1e-4)


def logged(loop: Loop) -> None:
    loop.backward()
    loop.seen += [loop.norm(), *(p.grad.clone() for p in loop.parameters if p.grad is not None)]


def replaced(loop: Loop) -> None:
    loop.backward()
    for parameter in loop.parameters:
        parameter.grad = parameter.grad.square() if parameter.grad is not None else None


def data_changed(loop: Loop) -> None:
    loop.backward()
    for parameter in loop.parameters:
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data.abs()


def sharpness_aware(loop: Loop) -> None:
    loop.backward()
    kept = [p.detach().clone() for p in loop.parameters]
    with torch.no_grad():
        norm = loop.norm()
        for parameter in loop.parameters:
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=float(0.05 / norm))
    loop.optimizer.zero_grad()
    loop.number -= 1
    loop.backward()
    with torch.no_grad():
        for parameter, before in zip(loop.parameters, kept, strict=True):
            parameter.copy_(before)


def accumulated(loop: Loop) -> None:
    """The script clips between two backwards that are stepped together."""
    loop.backward()
    loop.clip(0.01)
    loop.backward()


def accumulated_unread(loop: Loop) -> None:
    loop.backward()
    loop.backward()
    loop.clip(0.01)


def one_overwritten(loop: Loop) -> None:
    loop.backward()
    first = loop.parameters[0]
    assert first.grad is not None
    first.grad.zero_()
    loop.clip(0.01)


def read_after_the_step(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.step()
    loop.seen.append(loop.norm())


def clipped_by_the_session(loop: Loop) -> None:
    loop.backward()
    if loop.session is not None:
        loop.session.clip_grad_norm_(0.01)
    else:
        loop.clip(0.01)


def clipped_by_the_session_and_read(loop: Loop) -> None:
    clipped_by_the_session(loop)
    loop.seen.append(loop.norm())


def read_and_clipped_by_the_session(loop: Loop) -> None:
    loop.backward()
    loop.seen.append(loop.norm())
    if loop.session is not None:
        loop.seen.append(loop.session.clip_grad_norm_(0.01))
    else:
        loop.seen.append(nn.utils.clip_grad_norm_(loop.net.parameters(), 0.01))
    loop.seen.append(loop.norm())


def kept_zeros(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward()
    loop.optimizer.step()
    loop.seen.append(loop.norm())
    loop.optimizer.zero_grad(set_to_none=False)
    loop.seen.append(loop.norm())


USES = (
    none, norm_clipped, clipped_without_effect, value_clipped, logged, replaced, data_changed,
    sharpness_aware, accumulated, accumulated_unread, one_overwritten, read_after_the_step,
    clipped_by_the_session,
    clipped_by_the_session_and_read, read_and_clipped_by_the_session, kept_zeros, none,
)  # fmt: skip
STEP_MADE = (read_after_the_step, kept_zeros)


def train(session: atoll.Session | None) -> list[dict[str, list[Tensor]]]:
    loop, found = Loop(session), []
    for loop.step, use in enumerate(USES):
        loop.number, loop.seen = 0, []
        use(loop)
        if use not in STEP_MADE:
            loop.optimizer.step()
        loop.optimizer.zero_grad()
        values = [p.detach().clone() for p in loop.parameters]
        found.append({"values": values, "seen": [each.detach().clone() for each in loop.seen]})
    return found


@functools.cache
def plain() -> list[dict[str, list[Tensor]]]:
    return train(None)


def check(found: list[Any]) -> None:
    for worker in found:
        for use, steps, right in zip(USES, worker, plain(), strict=True):
            for what in ("seen", "values"):
                for got, expected in zip(steps[what], right[what], strict=True):
                    where = f"{what} of {use.__name__}"
                    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12), where


@pytest.mark.parametrize("kind", ["ring", "peers", "peers tiers"])
def test_gradients_are_plain_pytorch_s(pool: WorkerPool, kind: str) -> None:
    check(run_at(pool, kind, train))


def test_gradients_of_nodes_of_two_devices_are_plain_pytorch_s(pool: WorkerPool) -> None:
    sync = Sync(timeout="60s", stale_max=0)
    config = Config(run=Run(strategy="peers"), sync=sync, groups=Groups(count=2))
    check(run_with(pool, config, train, world=4))


def one_reads(session: atoll.Session | None) -> list[list[Tensor]]:
    """Worker 0 alone reads gradients, before a step and after one; worker 1 has no batch in step 2, which all
    clip."""
    loop, found = Loop(session), []
    reads = session is None or session.rank == 0
    for loop.step in range(4):
        loop.number, loop.seen = 0, []
        if loop.step != 2:
            loop.backward()
        elif reads:
            x, y = batch(loop.step, 0)
            mse_loss(loop.net(x[::2]), y[::2]).backward()
        if reads and loop.step == 1:
            loop.seen.append(loop.norm())
        if loop.step == 2:
            loop.clip(0.01)
        loop.optimizer.step()
        if reads and loop.step == 0:
            loop.seen.append(loop.norm())
        loop.optimizer.zero_grad()
        found.append([p.detach().clone() for p in loop.parameters] + loop.seen)
    if session is not None:
        session.barrier()
    return found


@pytest.mark.parametrize("kind", ["peers", "peers tiers"])
def test_one_worker_may_read_gradients_alone(pool: WorkerPool, kind: str) -> None:
    right = one_reads(None)
    for worker in run_at(pool, kind, one_reads):
        for got, expected in zip(worker, right, strict=True):
            for mine, its in zip(got, expected, strict=False):  # worker 1 reads none
                assert torch.allclose(mine, its, rtol=1e-9, atol=1e-12)


def changes_by_rank(session: atoll.Session) -> list[Tensor]:
    """Node 0 doubles the mean, and node 1 has it times four."""
    loop = Loop(session)
    for loop.step in range(2):
        loop.backward()
        for parameter in loop.parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(2.0 + 2 * session.rank)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    session.barrier()
    return [p.detach().clone() for p in loop.parameters]


@pytest.mark.parametrize("kind", ["peers", "peers tiers"])
def test_the_step_is_of_the_mean_of_what_scripts_make_of_the_mean(pool: WorkerPool, kind: str) -> None:
    """Each of two nodes has half of the samples."""
    plain = Loop(None)
    for plain.step in range(2):
        plain.backward()
        for parameter in plain.parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(3.0)
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    for worker in run_at(pool, kind, changes_by_rank):
        for got, expected in zip(worker, plain.parameters, strict=True):
            assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12)


def uses_an_earlier_one(session: atoll.Session) -> None:
    loop = Loop(session)
    loop.backward()
    earlier = [p.grad for p in loop.parameters]
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.backward()
    assert earlier[0] is not None
    earlier[0].norm()


@pytest.mark.parametrize("kind", ["peers", "peers tiers"])
def test_a_gradient_of_an_earlier_backward_is_refused(pool: WorkerPool, kind: str) -> None:
    with pytest.raises(JobFailedError, match="a gradient of an earlier backward is used"):
        run_at(pool, kind, uses_an_earlier_one)


def lacks_one(session: atoll.Session) -> None:
    loop = Loop(session)
    loop.backward()
    if session.rank == 1:
        loop.parameters[0].grad = None
    loop.clip(0.1)


def test_nodes_with_gradients_of_other_parameters_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError, match=r"node 1 has no gradient of '0\.weight'"):
        run_at(pool, "peers", lacks_one)
