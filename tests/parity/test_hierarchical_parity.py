"""Strategy `hierarchical` against plain PyTorch: groups change the order in which gradients are added, and
nothing else. Where there is one group, or each worker is one, the order is the same.
"""

from __future__ import annotations

import pytest
import torch

from support.models import MODELS
from support.parity import Case, differences, train_atoll, train_plain
from support.pool import WorkerPool

pytestmark = pytest.mark.check  # many groups of processes, one after another

WORKERS, STEPS = 4, 5


def cases() -> list[Case]:
    """Each model once: with accumulation or without, clipped or not, in one chunk or in several."""
    made = []
    for number, model in enumerate(MODELS):
        size = "2KiB" if number % 2 else "auto"
        optimizer = "adamw" if number % 3 else "sgd"
        more, clip = 1 + 2 * (number % 2), number % 3 > 0
        made.append(Case(model, optimizer, WORKERS, more, clip, chunk_size=size, steps=STEPS))
    return made


@pytest.mark.parametrize("case", cases(), ids=str)
def test_any_number_of_groups_trains_as_one_process(pool: WorkerPool, case: Case) -> None:
    pool.submit(train_atoll, case, 1, world=WORKERS)
    plain = train_plain(case)
    one_group = pool.collect()
    assert not (wrong := differences(case, plain, one_group, 1e-9)), "1 group: " + "\n".join(wrong)
    for groups in (0, 3, WORKERS):
        found = pool.run(train_atoll, case, groups, world=WORKERS)
        assert not (wrong := differences(case, plain, found, 1e-9)), f"{groups} groups: " + "\n".join(wrong)
        if groups == WORKERS:  # the same additions in the same order
            for worker, seen in enumerate(found):
                alone = Case(case.model, workers=1, steps=case.steps)
                assert not differences(alone, one_group[worker], [seen], 0.0), f"worker {worker}"


@pytest.mark.parametrize(("workers", "groups"), [(3, 2), (2, 1), (2, 2), (1, 1), (1, 0)])
def test_uneven_groups_and_few_workers(pool: WorkerPool, workers: int, groups: int) -> None:
    case = Case("odd", workers=workers, steps=5, dtype=torch.float32, chunk_size="2KiB")
    pool.submit(train_atoll, case, groups, world=workers)
    plain = train_plain(case)
    wrong = differences(case, plain, pool.collect(), 1e-5 if workers > 1 else 0.0)
    assert not wrong, "\n".join(wrong)
