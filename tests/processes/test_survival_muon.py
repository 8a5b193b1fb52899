"""Muon, which steps whole matrices, beside AdamW: workers and shards are killed, and a worker comes late."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mortal import assert_equal
from mortal_shards import kills_at, run_with
from run_command import wait_for
from test_survival_ring import (
    DEADLINE,
    IN_AN_ITERATION,
    STEPS,
    STRIKE,
    Fault,
    assert_as_plain_torch,
    case,
    each_dies,
    let_in,
    loss_of,
    make,
    members_of,
    weight_of,
)
from torch import nn

from atoll.train.api.session import Session
from support.pool import WorkerPool


def make_two() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model, _ = make()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def trains(session: Session, who: int, folder: Path, *, newcomer_at: int = -1) -> dict[str, Any]:
    """Worker r weighs 2 ** r: an iteration's sum of weights says who counted."""
    model, optimizers = make_two()
    session.prepare(model, optimizers)
    counted = []
    first = session.resume()
    for step in range(first, STEPS):
        if step == newcomer_at and first == 0:
            (folder / f"{who}.stops").touch()
            ring = session._runtime.ring
            assert ring is not None
            wait_for(lambda ring=ring: ring.is_awaited, "a newcomer", DEADLINE / 2)
        for optimizer in optimizers:
            optimizer.zero_grad()
        session.weight(2.0**who)
        loss_of(model, who, step).backward()
        counted.append(weight_of(session))
        for optimizer in optimizers:
            optimizer.step()
    return {
        "first": first,
        "counted": counted,
        "parameters": [p.detach().tolist() for p in model.parameters()],
    }


def one_dies(folder: Path, who: int, point: str) -> None:
    with case(folder, trains, Fault(who, point), groups=2 if who == 1 else None) as made:
        made.killed(who)
        results = [made.result(each) for each in range(3) if each != who]
    assert_as_plain_torch(results, make_two, loss_of)
    assert members_of(results[0]["counted"][STRIKE - 1]) == [0, 1, 2]
    assert members_of(results[0]["counted"][-1]) == [each for each in range(3) if each != who]


def test_one_of_three_is_killed_at_each_point_of_an_iteration(tmp_path: Path) -> None:
    each_dies(tmp_path, [(number % 3, point) for number, point in enumerate(IN_AN_ITERATION)], one_dies)


def test_a_newcomer_gets_the_momentum(tmp_path: Path) -> None:
    with case(tmp_path / "run", partial(trains, newcomer_at=2), workers=2) as made:
        let_in(made)
        results = [made.result(each) for each in range(3)]
    assert_as_plain_torch(results, make_two, loss_of)
    assert results[-1]["first"] > 0
    assert members_of(results[0]["counted"][-1]) == [0, 1, 2]


@pytest.mark.parametrize("tiers", [False, True])
def test_shards_that_are_killed_step_on_as_if_they_had_lived(tmp_path: Path, tiers: bool) -> None:
    with WorkerPool(deadline=120.0) as pool:
        unharmed, other = run_with(pool, tmp_path / "unharmed", [], muon=True)
        assert_equal(unharmed, other)
        assert all("momentum_buffer" in state for state in unharmed["state"])
        kills = kills_at("shard.stepped")
        for result in run_with(
            pool, tmp_path / "killed", kills, muon=True, tiers=tiers, snapshot_seconds=0.1
        ):
            assert_equal(result, unharmed)
            assert result["came_back"] == 2
