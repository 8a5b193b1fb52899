"""Over loopback, where nothing is lost, training over the loss-tolerant transport is what it is over TCP: to
the bit, with error feedback on."""

from __future__ import annotations

import numpy as np
import pytest
from test_groups_parity import score_for

from atoll.groups.grouping import Grouping
from atoll.hub.planner import GroupingSettings
from support.parity import Case, Trajectory, train_grouped, train_served
from support.pool import WorkerPool
from support.served import ServedRun

pytestmark = pytest.mark.check

SMALL = "2KiB"  # chunks, so that a model takes several
CASES = [
    Case("gpt", "adamw", 2, clip=True),
    Case("unused", "sgd", 2, 3, True, chunk_size=SMALL),
]


def compare(over_tcp: list[Trajectory], over_ltp: list[Trajectory]) -> None:
    for one, other in zip(over_tcp, over_ltp, strict=True):
        assert one.losses == other.losses
        for before, after in zip(one.parameters, other.parameters, strict=True):
            assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bsp_over_ltp_is_bsp_over_tcp(pool: WorkerPool, case: Case) -> None:
    found = []
    for transport in ("tcp", "ltp"):
        with ServedRun(case.workers, shards=2) as served:
            arguments = case, served.address, False, (), transport
            found.append(pool.run(train_served, *arguments, world=case.workers))
        assert not served.failures
    compare(*found)


def test_a_group_over_ltp_is_a_group_over_tcp(pool: WorkerPool) -> None:
    case = Case("odd", "adamw", 2, chunk_size=SMALL)
    settings = GroupingSettings(
        1, by="joint", consistency="bsp", regroup=False, score_for=score_for(Grouping([[0, 1]]))
    )
    found = []
    for transport in ("tcp", "ltp"):
        with ServedRun(2, 2, grouping=settings) as served:
            found.append(pool.run(train_grouped, case, served.address, "members", transport, world=2))
        assert not served.failures
    compare(*found)
