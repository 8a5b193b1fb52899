"""Jobs of a pool do not see one another."""

from __future__ import annotations

from datetime import timedelta

from atoll.train.api.place import Place
from support.pool import WorkerPool


def leaves_a_timeout(place: Place) -> None:
    """As a process group does that is made with one."""
    assert place.store is not None
    place.store.set_timeout(timedelta(milliseconds=1))


def timeout_of(place: Place) -> float:
    assert place.store is not None
    seconds: float = place.store.timeout.total_seconds()
    return seconds


def test_a_jobs_store_has_its_own_timeout(pool: WorkerPool) -> None:
    (before,) = pool.run(timeout_of, world=1)
    pool.run(leaves_a_timeout, world=1)
    assert pool.run(timeout_of, world=1) == [before]
