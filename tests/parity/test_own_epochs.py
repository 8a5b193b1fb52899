"""Epochs over workers' own data of unequal lengths equal one process on the joint batches, at every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

import atoll
from atoll.core.errors import MismatchError, UserError
from support.cases import kept_for
from support.pool import JobFailedError, WorkerPool
from support.runs import EVERYWHERE, TOGETHER, alone, model, run_at

pytestmark = pytest.mark.sampled

IN_STEP = (*TOGETHER, "elastic", "server tiers")
LENGTHS = (5, 3)
EPOCHS = 2


class Lines(IterableDataset[Tensor]):
    """The lines of one worker: `length` batches of four lines each, and one of two lines."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length = rank, length

    def __iter__(self) -> Iterator[Tensor]:
        if self.length:
            lines = 4 * (self.length - 1) + 2
            generator = torch.Generator().manual_seed(self.rank)
            yield from torch.randn(lines, 36, generator=generator, dtype=torch.float64)


def loader(rank: int, length: int) -> DataLoader[Tensor]:
    return DataLoader(Lines(rank, length), batch_size=4)


def loss_of(net: torch.nn.Module, batch: Tensor) -> Tensor:
    return mse_loss(net(batch[:, :32]), batch[:, 32:])


def train(session: atoll.Session, lengths: tuple[int, ...]) -> tuple[list[Tensor], list[int], int]:
    """Train on this worker's own data. Returns the first layer after each step, the sizes of the batches that
    the script saw, and the number of iterations."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    session.prepare(net, optimizer)
    data, seen, sizes = loader(session.rank, lengths[session.rank]), [], []
    for _ in range(EPOCHS):
        for batch in session.epoch_of(data):
            sizes.append(len(batch))
            loss_of(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(net[0].weight.detach().clone())
    session.barrier()
    return seen, sizes, session.iteration


def plain(lengths: tuple[int, ...]) -> list[Tensor]:
    """Return the first layer after each step of one process on the joint batches."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data, seen = [list(loader(rank, length)) for rank, length in enumerate(lengths)], []
    for _ in range(EPOCHS):
        for step in range(max(lengths)):
            loss_of(net, torch.cat([each[step] for each in data if step < len(each)])).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(net[0].weight.detach().clone())
    return seen


@pytest.mark.parametrize("where", kept_for(pytest.mark.check, IN_STEP, ("ring", "server")))
def test_unequal_data_trains_as_one_process_on_the_joint_batches(pool: WorkerPool, where: str) -> None:
    right, found = plain(LENGTHS), run_at(pool, where, train, LENGTHS)
    for rank, (seen, sizes, iterations) in enumerate(found):
        assert iterations == EPOCHS * max(LENGTHS)
        own = LENGTHS[rank]
        assert sizes == EPOCHS * ([4] * (own - 1) + [2] * (1 + max(LENGTHS) - own))
        for one, other in zip(seen, right, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("where", ["asp", "ssp"])
def test_workers_at_their_own_pace_end_by_themselves(pool: WorkerPool, where: str) -> None:
    found = run_at(pool, where, train, LENGTHS)
    for rank, (_, sizes, iterations) in enumerate(found):
        assert iterations == EPOCHS * LENGTHS[rank]
        assert sizes == EPOCHS * ([4] * (LENGTHS[rank] - 1) + [2])


def test_groups_at_their_own_pace_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError) as raised:
        run_at(pool, "ps-hra asp", train, LENGTHS)
    for failure in raised.value.failures.values():
        assert failure.kind == UserError.__name__
        assert "set sync.consistency to bsp, or let session.sampler(dataset) deal the data" in failure.message


def test_a_worker_alone_sees_its_data_once() -> None:
    seen, sizes, iterations = alone(train, (3,))
    assert (len(seen), sizes, iterations) == (6, [4, 4, 2] * 2, 6)


def skip(session: atoll.Session, how: str) -> None:
    """Train on equal numbers of batches, of which worker 1 skips one."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session.prepare(net, optimizer)
    for number, batch in enumerate(session.epoch_of(loader(session.rank, 5))):
        if session.rank == 1 and number == 2:
            if how == "continue":
                continue
            break
        loss_of(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("where", kept_for(pytest.mark.check, TOGETHER, ("ring", "server")))
def test_a_batch_that_one_worker_skips_is_reported_at_once(pool: WorkerPool, where: str) -> None:
    for how in ("continue", "break"):
        with pytest.raises(JobFailedError) as raised:
            run_at(pool, where, skip, how)
        failures = list(raised.value.failures.values())
        assert [each.kind for each in failures] == [MismatchError.__name__] * 2
        for line in [each.message for each in failures]:
            assert "0 is at the gradients of step 2" in line
            there = "in session.epoch_of" if how == "continue" else "at the end of its session after 2 steps"
            assert f"1 is {there}" in line
            assert f"({__name__}.py:" in line
            assert how == "break" or "train on it with session.weight(0)" in line


def accumulate(session: atoll.Session, lengths: tuple[int, ...]) -> tuple[Tensor, int]:
    """Step by every second batch."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session.prepare(net, optimizer)
    for number, batch in enumerate(session.epoch_of(loader(session.rank, lengths[session.rank]))):
        if number % 2 == 0:
            with session.no_sync():
                loss_of(net, batch).backward()
            continue
        loss_of(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    session.barrier()
    return net[0].weight.detach().clone(), session.iteration


@pytest.mark.parametrize("where", ["ring", "server"])
def test_a_step_of_several_batches_may_repeat_all_of_them(pool: WorkerPool, where: str) -> None:
    long, short = run_at(pool, where, accumulate, (4, 2)), alone(accumulate, (4,))
    assert [iterations for _, iterations in long] == [2, 2]
    assert not torch.equal(long[0][0], short[0])  # worker 1's first batches count
    assert torch.equal(long[0][0], long[1][0])


@pytest.mark.parametrize("lengths", [(4, 3), (3, 2)])
def test_a_step_of_batches_and_repeated_ones_is_refused(pool: WorkerPool, lengths: tuple[int, ...]) -> None:
    with pytest.raises(JobFailedError) as raised:
        run_at(pool, "ring", accumulate, lengths)
    assert "give each worker a multiple of the batches of a step" in raised.value.failures[1].message


def test_data_without_a_batch_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError) as raised:
        run_at(pool, "ring", train, (2, 0))
    assert "give every worker at least one batch in an epoch" in raised.value.failures[1].message


def empty(session: atoll.Session) -> Any:
    return list(session.epoch_of([]))


@pytest.mark.parametrize("where", kept_for(pytest.mark.check, EVERYWHERE, ("ring",)))
def test_an_epoch_without_any_batch_is_over_at_once(pool: WorkerPool, where: str) -> None:
    if where != "ps-hra asp":
        assert run_at(pool, where, empty) == [[], []]


def weigh_out(session: atoll.Session) -> Tensor:
    """Train on equal numbers of batches, of which worker 1's third has a loss of NaN and weighs nothing."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session.prepare(net, optimizer)
    for number, batch in enumerate(session.epoch_of(loader(session.rank, 5))):
        if session.rank == 1 and number == 2:
            session.weight(0)
            batch = batch * float("nan")
        loss_of(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    session.barrier()
    return net[0].weight.detach().clone()


@pytest.mark.parametrize("where", kept_for(pytest.mark.check, IN_STEP, ("ring", "server")))
def test_a_batch_of_weight_0_may_have_a_loss_that_is_no_number(pool: WorkerPool, where: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = [list(loader(rank, 5)) for rank in range(2)]
    for step in range(5):
        loss_of(net, torch.cat([data[0][step]] if step == 2 else [each[step] for each in data])).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_at(pool, where, weigh_out):
        torch.testing.assert_close(found, net[0].weight.detach(), rtol=0.0, atol=1e-12)
