"""Nodes without a server, at sync.stale_max = 0: each step equals plain PyTorch in one process, as with a
ring, and nodes have the same bits.

Each case starts the nodes' CPU sides, which import torch: some models and options in few cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.testing.models import MODELS
from atoll.testing.parity import Case, Trajectory, differences, train_atoll, train_peers, train_plain
from atoll.testing.pool import WorkerPool

CASES = [Case("odd", "adamw", workers=3, accumulation=3, clip=True, chunk_size="2KiB")]
SOAK = [
    Case(model, optimizer, workers=workers, accumulation=accumulation, clip=clip)
    for model in MODELS
    for optimizer, workers, accumulation, clip in (
        ("sgd", 2, 3, False),
        ("adamw", 3, 1, True),
        ("adamw", 4, 1, False),
    )
]


def same_bits(case: Case, nodes: list[Trajectory]) -> list[str]:
    """Where nodes' parameters differ, in any bit."""
    first, found = nodes[0], []
    for step in range(case.steps):
        for node, seen in enumerate(nodes[1:], start=1):
            for name, value in seen.parameters[step].items():
                if value.tobytes() != first.parameters[step][name].tobytes():
                    found.append(f"{case}: step {step}: {name} is another on node {node} than on node 0")
    return found


def check(pool: WorkerPool, case: Case, tolerance: float) -> list[Any]:
    pool.submit(train_peers, case, world=case.workers)
    plain = train_plain(case)
    nodes = pool.collect()
    found = differences(case, plain, nodes, tolerance) + same_bits(case, nodes)
    assert not found, "\n".join(found)
    return nodes


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.soak) for case in SOAK)], ids=str
)
def test_nodes_train_as_one_process_in_float64(pool: WorkerPool, case: Case) -> None:
    check(pool, case, tolerance=1e-9)


def test_nodes_train_as_a_ring_in_float32(pool: WorkerPool) -> None:
    case = Case("odd", "sgd", workers=2, dtype=torch.float32, chunk_size="2KiB")
    nodes = check(pool, case, tolerance=1e-5)
    ring = pool.run(train_atoll, case, world=2)
    for one, other in zip(nodes, ring, strict=True):
        assert one.losses[0] == other.losses[0]
        for name, value in one.parameters[-1].items():
            assert abs(value - other.parameters[-1][name]).max(initial=0.0) <= 1e-5, name
