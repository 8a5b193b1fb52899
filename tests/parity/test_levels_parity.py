"""Each step of a session at sites, with bsp inside and between, against plain PyTorch in one process.

Two sites of two workers, or of one and three; the models' shares have uneven samples.
"""

from __future__ import annotations

from collections import Counter

import pytest

from support.parity import Case, differences, own_buffers, train_plain, train_served
from support.pool import WorkerPool
from support.served import ServedRun

EVEN, UNEVEN = ["paris", "paris", "berlin", "berlin"], ["paris", "berlin", "berlin", "berlin"]
MIXED = ["paris", "berlin", "paris", "berlin"]  # ranks are the run's, and know nothing of sites


@pytest.mark.check
@pytest.mark.parametrize(
    ("case", "sites", "lazy", "shards"),
    [
        (Case("odd", "sgd", 4, 1, False), EVEN, False, 1),
        (Case("odd", "sgd", 4, 3, True, chunk_size="2KiB"), UNEVEN, True, 2),
        (Case("gpt", "adamw", 4, 1, True, chunk_size="2KiB"), MIXED, True, 2),
        (Case("gpt", "adamw", 4, 3, False, chunk_size="2KiB"), EVEN, False, 1),
    ],
    ids=str,
)
def test_sites_train_as_one_process(
    pool: WorkerPool, case: Case, sites: list[str], lazy: bool, shards: int
) -> None:
    with ServedRun(4, shards=shards, sites=Counter(sites)) as served:
        pool.submit(train_served, case, served.address, lazy, sites, world=4)
        plain = train_plain(case, buffers_of=own_buffers)
        found = differences(case, plain, pool.collect(), 1e-9)
    assert not served.failures
    assert not found, "\n".join(found)
