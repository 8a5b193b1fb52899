"""Each step of a session with a parameter server, under bsp, against plain PyTorch in one process.

The cases are the ring's, over one to three shards in turn; `make test` takes an eighth of them, in which any
two choices of the table meet. Hub and shards run in this process, on threads.
"""

from __future__ import annotations

import pytest
import torch
from test_parity import WORKERS, cases, is_quick, meeting

from support.models import MODELS
from support.parity import OPTIMIZERS, Case, differences, own_buffers, train_plain, train_served
from support.pool import WorkerPool
from support.served import ServedRun

pytestmark = pytest.mark.sampled

FLOAT64 = cases(torch.float64, WORKERS, tuple(OPTIMIZERS))
FLOAT32 = cases(torch.float32, WORKERS, ("sgd",))


def check(pool: WorkerPool, case: Case, number: int, tolerance: float) -> None:
    """One worker alone is held to the bit: its mean is its own gradient."""
    with ServedRun(case.workers, shards=1 + number % 3) as served:
        lazy = bool(number // 3 % 2)
        pool.submit(train_served, case, served.address, lazy, world=case.workers)
        plain = train_plain(case, buffers_of=own_buffers)
        found = differences(case, plain, pool.collect(), 0.0 if case.workers == 1 else tolerance)
    assert not served.failures
    assert not found, "\n".join(found)


def is_quickest(case: Case) -> bool:
    """Whether a case is of the eighth: what the ring's table proves of models is proved there."""
    model, workers = list(MODELS).index(case.model), WORKERS.index(case.workers)
    return (case.accumulation > 1, case.clip, list(OPTIMIZERS).index(case.optimizer)) == (
        (model + workers) % 2,
        (model // 2 + workers) % 2,
        (model // 4 + workers) % 2,
    )


def test_any_two_choices_meet() -> None:
    assert meeting([case for case in FLOAT64 if is_quickest(case)]) == meeting(FLOAT64)


@pytest.mark.parametrize(
    ("number", "case"),
    [
        pytest.param(number, case, marks=[] if is_quickest(case) else pytest.mark.soak)
        for number, case in enumerate(FLOAT64)
    ],
    ids=str,
)
def test_bsp_trains_as_one_process_in_float64(pool: WorkerPool, number: int, case: Case) -> None:
    check(pool, case, number, tolerance=1e-9)


@pytest.mark.parametrize(
    ("number", "case"),
    [
        pytest.param(number, case, marks=[] if case.workers == 2 and is_quick(case) else pytest.mark.soak)
        for number, case in enumerate(FLOAT32)
    ],
    ids=str,
)
def test_bsp_trains_as_one_process_in_float32(pool: WorkerPool, number: int, case: Case) -> None:
    check(pool, case, number, tolerance=1e-5)
