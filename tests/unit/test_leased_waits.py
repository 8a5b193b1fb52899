"""When a worker waits for leased positions that others hold, and what it says if none came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import pytest
import torch

from atoll.store.leases import Leases
from atoll.train.data.leased_sampler import LeasedSampler
from atoll.wire.messages import Cut, Lease, Leased, Used

WAIT = 0.05  # seconds


class Office:
    """The hub's leases to worker 0, where worker 2 holds the first two of eight positions."""

    def __init__(self) -> None:
        self._leases = Leases()
        self.waits: list[float] = []  # seconds, of each request
        self.said: list[str] = []
        self.loop: tuple[object | None, int] = (None, 0)
        self.sampler = LeasedSampler(
            8,
            lease=self._lease,
            shuffle=False,
            lease_size=2,
            wait=WAIT,
            waited=self.said.append,
            taken=lambda _sampler: self.loop,
        )
        self.ask(2, 0, 8, 2)

    def free(self, epoch: int) -> int:
        return self._leases.progress(0, epoch).free

    def ask(
        self,
        rank: int,
        epoch: int,
        length: int,
        count: int,
        returned: Sequence[Used] = (),
        *,
        idle: bool = False,
    ) -> Leased:
        lease = Lease(
            incarnation=rank + 1,
            sampler=0,
            epoch=epoch,
            length=length,
            count=count,
            returned=list(returned),
            idle=idle,
        )
        return self._leases.handle_lease(rank, rank + 1, lease)

    def _lease(
        self,
        sampler: int,
        epoch: int,
        length: int,
        count: int,
        wait: float,
        cut: Cut | None = None,
        rewinds: int = 0,
        returned: Sequence[Used] = (),
        *,
        idle: bool = False,
    ) -> Leased:
        del sampler, cut, rewinds
        self.waits.append(wait)
        leased = self.ask(0, epoch, length, count, returned, idle=idle)
        if leased.start == leased.stop:
            time.sleep(wait)
        return leased

    def steps(self) -> None:
        """A step with two samples, which the log counts."""
        self.sampler.count(2)
        self._leases.handle_used(0, 1, self.sampler.used())


def test_a_worker_that_trains_waits_and_says_so_if_none_came() -> None:
    office = Office()
    indices = iter(office.sampler)
    while list(islice(indices, 2)):
        office.steps()
    assert office.waits[-2:] == [0.0, WAIT]
    (line,) = office.said
    assert line.startswith("session.sampler: worker 0 waited 0 s (test_leased_waits.py:")
    assert "at the end of epoch 0 for samples that other workers were given" in line
    assert "torch.no_grad()" in line


@pytest.mark.parametrize("graded", [True, False])
def test_a_loop_without_steps_does_not_wait(graded: bool) -> None:
    office = Office()
    with torch.set_grad_enabled(graded):
        assert list(office.sampler) == [2, 3, 4, 5, 6, 7]
    assert not any(office.waits)
    assert not office.said


@pytest.mark.parametrize("handed", [0, 1, 2])
def test_batches_that_a_loader_fetched_may_yet_be_trained_on(handed: int) -> None:
    """Until the script has taken a second one: its step with the first would be made by then."""
    office = Office()
    office.loop = object(), 9  # a loop before
    indices = iter(office.sampler)
    next(indices)
    if handed:
        office.loop = object(), handed
    list(indices)
    assert any(office.waits) == (handed < 2)


def test_a_worker_without_any_samples_waits() -> None:
    office = Office()
    for _ in range(3):
        office.ask(2, 0, 8, 2)
    assert list(office.sampler) == []
    assert office.waits == [0.0, WAIT]


def test_nobody_waits_for_who_is_in_a_loop_without_steps() -> None:
    office = Office()
    assert office.ask(2, 0, 8, 8, idle=True).stop == 8
    assert list(office.sampler) == []
    assert office.waits == [0.0]
    assert office.ask(0, 0, 8, 1).held  # it may come back, if the other one dies


def test_what_is_leased_of_an_epoch_that_is_left_is_given_back() -> None:
    office = Office()
    indices = iter(office.sampler)
    assert list(islice(indices, 2)) == [2, 3]
    office.steps()
    assert next(indices) == 4
    office.sampler.set_epoch(1)
    assert next(iter(office.sampler)) == 0
    assert office.ask(3, 0, 8, 8).start == 4
    assert office.free(0) == 0
