"""Random numbers after a load: each worker's own go on, and at another number of workers a line says how."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import atoll
from support.pool import WorkerPool
from support.runs import model, run_at


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def prepare(session: atoll.Session) -> None:
    net = model()
    session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    random.seed(session.rank)
    np.random.seed(session.rank)
    torch.manual_seed(session.rank)


def save(session: atoll.Session, folder: str) -> list[float]:
    """Return the numbers that follow the save."""
    prepare(session)
    session.save(folder)
    return draw()


def load(session: atoll.Session, folder: str) -> tuple[list[float], list[tuple[str, str, str]]]:
    """Return the numbers that follow the load, and the decisions that were recorded."""
    prepare(session)
    told: list[tuple[str, str, str]] = []
    session._records.decided = lambda *words: told.append(words)  # type: ignore[method-assign]
    session.load(folder)
    return draw(), [each for each in told if each[0] == "random numbers"]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_rank_goes_on_with_its_own(pool: WorkerPool, world: int, tmp_path: Path) -> None:
    right = run_at(pool, "ring", save, str(tmp_path))
    found = run_at(pool, "ring", load, str(tmp_path), world=world)
    again = run_at(pool, "ring", load, str(tmp_path), world=world)
    own = "each worker goes on with the state of its rank"
    lines = {1: own, 3: f"{own}, and those from worker 2 on derive theirs from worker 0's"}
    for rank, (numbers, told) in enumerate(found):
        assert numbers == (right[rank] if rank < 2 else again[rank][0])
        assert told == (
            []
            if world == 2
            else [("random numbers", f"of 2 saved states, for {world} workers", lines[world])]
        )
    assert world < 3 or found[2][0] not in right
