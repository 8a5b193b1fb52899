"""Nodes of several devices: at sync.stale_max = 0 each step equals plain PyTorch in one process, as with a ring
of as many workers, and all workers have the same bits."""

from __future__ import annotations

import torch
from test_peers_parity import same_bits

from atoll.testing.parity import Case, differences, train_atoll, train_peers, train_plain
from atoll.testing.pool import WorkerPool

STEPWISE = Case("odd", "adamw", workers=4, accumulation=3, clip=True, chunk_size="2KiB")


def test_two(pool: WorkerPool) -> None:
    case = STEPWISE
    pool.submit(train_peers, case, 0, 2, world=4)
    plain = train_plain(case)
    nodes = pool.collect()
    found = differences(case, plain, nodes, 1e-9) + same_bits(case, nodes)
    assert not found, "\n".join(found)
