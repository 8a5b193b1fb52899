"""Each step of workers in groups, under bsp, against plain PyTorch in one process: strategy ps-hra.

The workers begin alone, and are in groups after their first steps: what is compared goes over the move, too.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from atoll.groups.chooser import Score
from atoll.groups.grouping import Grouping, sizes_of
from atoll.hub.planner import GroupingSettings, ScoreFor
from support.cases import kept_for
from support.parity import ALONE, Case, Trajectory, differences, train_grouped, train_plain
from support.pool import WorkerPool
from support.served import ServedRun

SMALL = "2KiB"  # chunks, so that a model takes several
CASES = [  # groups, shards, case
    (1, 1, Case("gpt", "sgd", 2, clip=True, chunk_size=SMALL)),
    (1, 2, Case("odd", "adamw", 3, 3, chunk_size=SMALL)),
    (2, 1, Case("tied", "adamw", 4, clip=True)),
    (2, 2, Case("unused", "sgd", 4, 3, True, chunk_size=SMALL)),
    (2, 1, Case("frozen", "adamw", 4)),
    (2, 2, Case("batchnorm", "sgd", 3, chunk_size=SMALL)),
]


def score_for(wanted: Grouping) -> ScoreFor:
    """Whatever the workers' speeds, these groups are the best."""
    return lambda _known: lambda grouping: Score(2.0 if grouping == wanted else 1.0)


def train(pool: WorkerPool, groups: int, shards: int, case: Case, uplink: str) -> list[Trajectory]:
    by_rank = iter(range(case.workers))
    wanted = Grouping(list(islice(by_rank, size)) for size in sizes_of(case.workers, groups))
    settings = GroupingSettings(
        groups, by="joint", consistency="bsp", regroup=False, score_for=score_for(wanted)
    )
    with ServedRun(case.workers, shards, grouping=settings) as served:
        found: list[Trajectory] = pool.run(train_grouped, case, served.address, uplink, world=case.workers)
    assert not served.failures
    return found


def firsts_of(workers: int, groups: int) -> list[tuple[int, int]]:
    """Each group's first worker, whose buffers its members share, and its size."""
    sizes = sizes_of(workers, groups)
    return [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("groups", "shards", "case"), kept_for(pytest.mark.check, CASES, (CASES[0], CASES[5])), ids=str
)
def test_groups_train_as_one_process_whoever_talks_to_the_shards(
    pool: WorkerPool, groups: int, shards: int, case: Case
) -> None:
    by_leader = train(pool, groups, shards, case, "leader")
    firsts = [first for first, size in firsts_of(case.workers, groups) for _ in range(size)]
    alike = train_plain(case, buffers_of=lambda step, share: firsts[share] if step > ALONE else share)
    found = differences(case, alike, by_leader, 1e-9)
    assert not found, "\n".join(found)
    by_members = train(pool, groups, shards, case, "members")
    for leaders, members in zip(by_leader, by_members, strict=True):
        for one, other in zip(leaders.parameters, members.parameters, strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in one)  # to the bit
