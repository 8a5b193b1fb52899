"""Each step of a session against plain PyTorch in one process, over models, workers, optimizers, accumulation
and clipping. The workers run a case while this process computes what it should give. A quarter of the table
is in `make test`, all of it in `make soak`.
"""

from __future__ import annotations

from dataclasses import astuple
from itertools import combinations, product
from typing import Any

import pytest
import torch

from support.models import MODELS
from support.parity import OPTIMIZERS, Case, differences, train_atoll, train_plain
from support.pool import WorkerPool

WORKERS = (1, 2, 3, 4)


def cases(dtype: torch.dtype, workers: tuple[int, ...], optimizers: tuple[str, ...]) -> list[Case]:
    """Every combination; half of them in chunks so small that a model takes several."""
    size = {True: "2KiB", False: "auto"}
    table = product(MODELS, optimizers, workers, (1, 3), (False, True))
    return [
        Case(model, optimizer, n, accumulation, clip, dtype, size[(accumulation == 1) == clip])
        for model, optimizer, n, accumulation, clip in table
    ]


def is_quick(case: Case) -> bool:
    """Whether a case is of the quarter that `make test` runs."""
    model, optimizer = list(MODELS).index(case.model), list(OPTIMIZERS).index(case.optimizer)
    return (case.accumulation > 1, case.clip) == (
        (model + case.workers + optimizer) % 2,
        (model // 2 + case.workers // 2 + optimizer) % 2,
    )


def quartered(table: list[Case]) -> list[Any]:
    return [pytest.param(case, marks=[] if is_quick(case) else pytest.mark.soak) for case in table]


def meeting(table: list[Case]) -> set[tuple[int, Any, int, Any]]:
    """Any two choices that meet in a case: the columns, and what is chosen there."""
    return {
        (one, choices[one], other, choices[other])
        for choices in map(astuple, table)
        for one, other in combinations(range(5), 2)
    }


@pytest.mark.parametrize("workers", [WORKERS[1:], (1,)])
def test_any_two_choices_meet(workers: tuple[int, ...]) -> None:
    table = cases(torch.float64, workers, tuple(OPTIMIZERS))
    taken = [case for case in table if is_quick(case)]
    assert len(taken) == len(table) / 4
    assert meeting(taken) == meeting(table)


def check(pool: WorkerPool, case: Case, tolerance: float) -> None:
    pool.submit(train_atoll, case, world=case.workers)
    plain = train_plain(case)
    found = differences(case, plain, pool.collect(), tolerance)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("case", quartered(cases(torch.float64, WORKERS[1:], tuple(OPTIMIZERS))), ids=str)
def test_workers_train_as_one_process_in_float64(pool: WorkerPool, case: Case) -> None:
    check(pool, case, tolerance=1e-9)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.workers == 2 and is_quick(case) else pytest.mark.soak)
        for case in cases(torch.float32, WORKERS[1:], ("sgd",))
    ],
    ids=str,
)
def test_workers_train_as_one_process_in_float32(pool: WorkerPool, case: Case) -> None:
    check(pool, case, tolerance=1e-5)


@pytest.mark.parametrize(
    "case",
    [each for t in (torch.float64, torch.float32) for each in quartered(cases(t, (1,), tuple(OPTIMIZERS)))],
    ids=str,
)
def test_one_worker_is_bit_equal_to_plain_torch(pool: WorkerPool, case: Case) -> None:
    check(pool, case, tolerance=0.0)


def test_the_comparison_finds_what_differs() -> None:
    """The harness is worth what it would find: a nudged parameter, a NaN, a mean that forgot the samples."""
    case = Case("odd", workers=2, steps=3)
    plain = train_plain(case)
    workers = [train_plain(Case("odd", workers=1, steps=3))] * 2
    found = differences(case, plain, workers, 1e-9)
    where = "odd-sgd-float64-2w-x1-unclipped-auto: step 0, worker 1, loss: differs by "
    assert any(line.startswith(where) for line in found)

    same = train_plain(case)
    alone = [type(same)([[s[0]] for s in same.losses], same.parameters, [[b[0]] for b in same.buffers])]
    assert differences(case, plain, alone, 0.0) == []
    alone[0].parameters[1]["last.weight"][0, 0] += 1e-8
    assert differences(case, plain, alone, 1e-9) == [
        f"{case}: step 1, worker 0, last.weight: differs by 1e-08"
    ]
    assert differences(case, plain, alone, 1e-7) == []
    alone[0].parameters[0]["gain"][...] = float("nan")
    assert "step 0, worker 0, gain: differs by nan" in differences(case, plain, alone, 1e-7)[0]
