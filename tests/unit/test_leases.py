"""Leases by example: who gets which samples, and what comes back."""

from __future__ import annotations

import pytest

from atoll.core.errors import UserError
from atoll.store.leases import Leases
from atoll.wire.messages import Lease, Leased, Used


def lease(count: int, incarnation: int = 1, length: int = 10, epoch: int = 0) -> Lease:
    return Lease(incarnation=incarnation, sampler=0, epoch=epoch, length=length, count=count)


def leased(start: int, stop: int, over: bool = False) -> Leased:
    return Leased(sampler=0, epoch=0, start=start, stop=stop, over=over)


def test_a_dead_workers_lease_returns_but_for_what_it_used() -> None:
    leases = Leases()
    assert leases.handle_lease(0, 1, lease(6)) == leased(0, 6)
    assert leases.handle_lease(1, 2, lease(6)) == leased(6, 10)
    leases.handle_used(1, 2, [Used(sampler=0, epoch=0, start=6, stop=10)])
    assert leases.handle_lease(1, 2, lease(6)) == leased(0, 0)  # worker 0 may yet fail
    assert leases.handle_fenced(0, 1, [Used(sampler=0, epoch=0, start=1, stop=3)]) == 4
    assert leases.handle_fenced(0, 1, []) == 0
    assert leases.handle_lease(1, 2, lease(6)) == leased(0, 1)
    assert leases.handle_lease(1, 2, lease(6)) == leased(3, 6)
    assert leases.handle_lease(1, 2, lease(6)) == leased(0, 0, over=True)
    progress = leases.progress(0, 0)
    assert (progress.used, progress.leased, progress.free) == (6, 4, 0)
    with pytest.raises(UserError, match="fenced"):
        leases.handle_lease(0, 1, lease(1))


def test_two_who_wait_for_each_other_do_not_wait() -> None:
    leases = Leases()
    leases.handle_lease(0, 1, lease(5))
    leases.handle_lease(1, 2, lease(5))
    assert not leases.handle_lease(0, 1, lease(1)).over
    assert leases.handle_lease(1, 2, lease(1)).over
    assert not leases.handle_lease(0, 1, lease(1)).over
    assert leases.handle_lease(0, 1, lease(1), patient=False).over


def test_all_must_have_the_same_data() -> None:
    leases = Leases()
    leases.handle_lease(0, 1, lease(5))
    with pytest.raises(UserError, match="12 samples in epoch 0, others have 10"):
        leases.handle_lease(1, 2, lease(5, length=12))
    assert leases.handle_lease(1, 2, lease(5, length=12, epoch=1)).stop == 5
    assert leases.handle_lease(1, 2, lease(5, length=0, epoch=2)).over


def test_a_lease_that_is_asked_for_twice_counts_once() -> None:
    leases = Leases()

    def ask(number: int, incarnation: int = 1) -> tuple[int, int]:
        lease = Lease(incarnation=incarnation, sampler=0, epoch=0, length=10, count=4, number=number)
        leased = leases.handle_lease(incarnation - 1, incarnation, lease)
        assert leased.number == number
        return leased.start, leased.stop

    assert [ask(1), ask(1), ask(1, 2), ask(2), ask(2)] == [(0, 4), (0, 4), (4, 8), (8, 10), (8, 10)]
    changes = leases.changes
    assert (ask(3), ask(3)) == ((0, 0), (0, 0))  # it waits for what the other has
    assert leases.changes == changes + 1
    leases.handle_fenced(1, 2, [])
    assert (ask(3), ask(3)) == ((4, 8), (4, 8))  # what gave nothing is asked again
