"""Nodes without a server, at sync.stale_max = 0: each step equals plain PyTorch in one process, as with a
ring, and nodes have the same bits.

Each case starts the nodes' CPU sides, which import torch: some models and options in few cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_optimizer import RenewedMomentum, SignMomentum, TwoInTurn
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

import atoll
from atoll.core.config import Config, Run, Sync
from atoll.train.api.place import Place
from support.models import MODELS
from support.parity import (
    OPTIMIZERS,
    Case,
    Trajectory,
    differences,
    own_buffers,
    train_atoll,
    train_peers,
    train_plain,
)
from support.pool import JobFailedError, WorkerPool

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
    plain = train_plain(case, buffers_of=own_buffers)
    nodes = pool.collect()
    found = differences(case, plain, nodes, tolerance) + same_bits(case, nodes)
    assert not found, "\n".join(found)
    return nodes


@pytest.mark.check
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


def make_own(model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
    """One that the CPU side has to import, from the folder of this test."""
    return SignMomentum(model.parameters(), lr=1e-3, decay=0.1), None


def make_renewed(model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
    return RenewedMomentum(model.parameters(), lr=1e-2), None


def make_in_turn(model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
    return TwoInTurn(model.parameters(), lr=1e-2), None


OWN = {"sign": make_own, "renewed": make_renewed, "in turn": make_in_turn}


def train_own(place: Place, case: Case, which: str) -> Trajectory:
    OPTIMIZERS["own"] = OWN[which]
    return train_peers(place, case, stale_max=0)


@pytest.mark.parametrize(
    "which", ["sign", *(pytest.param(each, marks=pytest.mark.soak) for each in OWN if each != "sign")]
)
def test_the_script_s_own_optimizer_is_imported(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "own", OWN[which])
    case = Case("odd", "own", workers=2, clip=True)
    nodes = pool.run(train_own, case, which, world=2)
    found = differences(case, train_plain(case, buffers_of=own_buffers), nodes, 1e-9) + same_bits(case, nodes)
    assert not found, "\n".join(found)


def train_with_a_class_of_a_function(place: Place) -> None:
    class Mine(torch.optim.SGD):
        pass

    with atoll.join(Config(run=Run(strategy="peers"), sync=Sync(timeout="60s")), place=place) as session:
        model = nn.Linear(2, 2)
        session.prepare(model, Mine(model.parameters(), lr=0.1))


def test_an_optimizer_that_cannot_be_imported_is_refused_with_the_way_out(pool: WorkerPool) -> None:
    with pytest.raises(JobFailedError) as caught:
        pool.run(train_with_a_class_of_a_function, world=2)
    for failure in caught.value.failures.values():
        assert failure.kind == "PrepareError"
        assert failure.message == (
            "strategy 'peers' steps the optimizer in a process of its own, which cannot import Mine: it is "
            "defined within a function; put it into a module of its own, beside the script, or into the "
            'script with all training under `if __name__ == "__main__":`'
        )
