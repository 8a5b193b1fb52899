"""Errors that are not those of the batch: the batch counts, and steps are plain PyTorch's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import atoll
from support.pool import WorkerPool
from support.runs import alone, model, run_at

KINDS = ["alone", "ring", "asp"]
FIRST, SECOND = 5, 3  # samples


class Run:
    """A script's model, its optimizer, and what its steps weigh on this worker."""

    def __init__(self, session: atoll.Session, net: nn.Module | None = None) -> None:
        self.session, self.net = session, net or model()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        session.prepare(self.net, self.optimizer)
        self.weights: list[float] = []

    def loss(self, samples: int, weight: bool = True) -> Tensor:
        if weight:
            self.session.weight(samples, model=self.net)
        x = torch.ones(samples, 32, dtype=torch.float64)
        return mse_loss(self.net(x), torch.zeros(samples, 4, dtype=torch.float64))

    def step(self) -> None:
        self.weights.append(self.session._models.find(self.net).samples.known or 0.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def consumed(self) -> float:
        self.session.barrier()
        return self.session._state.prepared[0].reducer.consumed


def raise_elsewhere() -> None:
    """A backward of no prepared model raises."""
    with torch.enable_grad():
        there = torch.ones(1, requires_grad=True).exp().sum()
        there.backward()
        with pytest.raises(RuntimeError, match="second time"):
            there.backward()


def in_thread(act: Callable[[], None]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def forward_raises(run: Run) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        run.net(torch.ones(1, 7, dtype=torch.float64))


def between_forwards(run: Run, act: Callable[[], None]) -> None:
    """Two batches have one backward."""
    loss = run.loss(FIRST)
    act()
    (loss + run.loss(SECOND)).backward()
    run.step()


def of_another_backward(session: atoll.Session) -> Any:
    run = Run(session)
    for _ in range(2):
        between_forwards(run, raise_elsewhere)
    return run.weights, run.consumed()


def of_another_forward(session: atoll.Session) -> Any:
    """The script tries a batch that the model does not take."""
    run = Run(session)
    for _ in range(2):
        between_forwards(run, lambda: forward_raises(run))
    return run.weights, run.consumed()


def before_the_step(session: atoll.Session) -> Any:
    run = Run(session)
    for _ in range(2):
        with session.no_sync():
            run.loss(FIRST).backward()
        raise_elsewhere()
        run.loss(SECOND).backward()
        raise_elsewhere()
        run.step()
    return run.weights, run.consumed()


def of_a_thread(session: atoll.Session) -> Any:
    """In the midst of each backward another thread's raises."""
    run = Run(session)
    for parameter in run.net.parameters():
        parameter.register_hook(lambda _: in_thread(raise_elsewhere))
    for _ in range(2):
        with session.no_sync():
            run.loss(FIRST, weight=False).backward()
        run.loss(SECOND, weight=False).backward()
        run.step()
    return run.weights, run.consumed()


def of_a_thread_between(session: atoll.Session) -> Any:
    run = Run(session)
    for _ in range(2):
        between_forwards(run, lambda: in_thread(raise_elsewhere))
    return run.weights, run.consumed()


class Keeps(nn.Module):
    """Returns nothing, and keeps its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> None:
        self.loss = self.net(x).square().mean()


def while_handling(session: atoll.Session) -> Any:
    """A script goes on in an except block, with a model that returns nothing."""
    net = Keeps()
    run = Run(session, net)
    for _ in range(2):
        try:
            raise_elsewhere()
            raise ValueError
        except ValueError:
            total = torch.zeros((), dtype=torch.float64)
            for samples in (FIRST, SECOND):
                session.weight(samples)
                net(torch.ones(samples, 32, dtype=torch.float64))
                assert net.loss is not None
                total = total + net.loss
            total.backward()
            run.step()
    return run.weights, run.consumed()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "script",
    [of_another_backward, of_another_forward, before_the_step, of_a_thread, of_a_thread_between,
     while_handling],
)  # fmt: skip
def test_a_batch_counts_whatever_else_raises(
    pool: WorkerPool, kind: str, script: Callable[[atoll.Session], Any]
) -> None:
    world = 2 if kind == "ring" else 1
    found = [alone(script)] if kind == "alone" else run_at(pool, kind, script, world=world)
    for weights, consumed in found:
        if kind != "alone":  # a mean of one has no weights
            assert weights == [FIRST + SECOND] * 2
        assert consumed == 2 * (FIRST + SECOND) * world


def of_another_model(session: atoll.Session) -> Any:
    """The loss of one of two models raises; both await a backward."""
    one, other = Run(session), Run(session)
    for _ in range(2):
        loss = other.loss(FIRST)
        raising = one.loss(4)
        raising.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            raising.backward()
        one.optimizer.zero_grad()
        one.loss(4).backward()
        one.step()
        (loss + other.loss(SECOND)).backward()
        other.step()
    return one.weights, other.weights


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_that_of_the_models_in_its_graph(pool: WorkerPool, kind: str) -> None:
    world = 2 if kind == "ring" else 1
    found = (
        [alone(of_another_model)] if kind == "alone" else run_at(pool, kind, of_another_model, world=world)
    )
    for one, other in found:
        assert one == [4.0] * 2
        assert other == [FIRST + SECOND] * 2


def two_threads(session: atoll.Session) -> list[float]:
    """In the midst of one model's backward another thread computes a batch of another model, whose first
    backward raises."""
    one, other = Run(session), Run(session)

    def act() -> None:
        loss = other.loss(SECOND, weight=False)
        loss.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        other.optimizer.zero_grad()
        other.loss(SECOND, weight=False).backward()
        other.step()

    for _ in range(4):
        loss = one.loss(FIRST, weight=False)
        hook = next(one.net.parameters()).register_hook(lambda _: in_thread(act))
        loss.backward()
        hook.remove()
        one.step()
    session.barrier()
    return [each.reducer.consumed for each in session._state.prepared]


def two_threads_raise(session: atoll.Session) -> list[float]:
    """A backward raises in each of two threads, before either computes its batch again."""
    one, other = Run(session), Run(session)
    go, done = threading.Event(), threading.Event()

    def raises(run: Run, samples: int) -> None:
        loss = run.loss(samples, weight=False)
        loss.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        run.optimizer.zero_grad()

    def act() -> None:
        raises(other, SECOND)
        done.set()
        assert go.wait(60), "waited 60 s for the batch of the other thread"
        other.loss(SECOND, weight=False).backward()
        other.step()

    for _ in range(3):
        go.clear()
        done.clear()
        raises(one, FIRST)
        thread = threading.Thread(target=act)
        thread.start()
        assert done.wait(60), "waited 60 s for the error in the other thread"
        one.loss(FIRST, weight=False).backward()
        one.step()
        go.set()
        thread.join()
    session.barrier()
    return [each.reducer.consumed for each in session._state.prepared]


def test_alone_an_error_in_a_thread_is_not_of_another_thread_s_model() -> None:
    assert alone(two_threads) == [4 * FIRST, 4 * SECOND]
    assert alone(two_threads_raise) == [3 * FIRST, 3 * SECOND]


def forwards_in_threads(session: atoll.Session) -> Any:
    """Threads of their own make the forwards; the weight is given, and backward called, in another one."""
    run, parts = Run(session), list[Tensor]()
    for _ in range(3):
        for raises in (True, False):
            session.weight(FIRST)
            parts.clear()
            for _ in range(2):
                in_thread(lambda: parts.append(run.loss(FIRST, weight=False)))
            loss = torch.stack(parts).sum()
            if raises:
                loss.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
                run.optimizer.zero_grad()
            else:
                loss.backward()
        run.step()
    return run.weights


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_heard_in_the_thread_of_the_weight(pool: WorkerPool, kind: str) -> None:
    world = 2 if kind == "ring" else 1
    found = (
        [alone(forwards_in_threads)]
        if kind == "alone"
        else run_at(pool, kind, forwards_in_threads, world=world)
    )
    assert found == [[FIRST] * 3] * world
