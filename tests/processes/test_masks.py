"""Each worker's own dropout masks: by our recipe they differ, without it a line says that they are alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.core.events import Warned
from atoll.train.gradients.masks import ALIKE
from support.pool import WorkerPool
from support.runs import EVERYWHERE, TOGETHER, run_at


def drawn() -> list[bool]:
    mask: list[bool] = (torch.nn.functional.dropout(torch.ones(64)) > 0).tolist()
    return mask


def train(session: atoll.Session, recipe: bool, drops: float, folder: str, load: bool) -> dict[str, Any]:
    """The masks before and after a save, or the mask after a load; and what was said."""
    said: list[Any] = []
    session._records._bus.subscribe(said.append)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(drops), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    if recipe:
        torch.manual_seed(0 + session.rank)
    masks = [drawn()]
    if load:
        session.load(folder)
        masks = [drawn()]
    for _ in range(3):
        x: Tensor = torch.ones(4, 8)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if folder and not load:
        session.save(folder)
        masks.append(drawn())
    lines = [each.message for each in said if isinstance(each, Warned)]
    return {"masks": masks, "said": [line for line in lines if line == ALIKE]}


@pytest.mark.parametrize("where", EVERYWHERE)
def test_by_our_recipe_each_worker_has_masks_of_its_own(pool: WorkerPool, tmp_path: Path, where: str) -> None:
    """And a checkpoint brings each worker's generator back."""
    folder = str(tmp_path / "saved")
    trained = run_at(pool, where, train, True, 0.5, folder, False)
    for first, second in zip(trained[0]["masks"], trained[1]["masks"], strict=True):
        assert first != second
    loaded = run_at(pool, where, train, True, 0.5, folder, True)
    for rank in range(2):
        assert loaded[rank]["masks"] == trained[rank]["masks"][1:], f"worker {rank}"
        assert trained[rank]["said"] == loaded[rank]["said"] == []


@pytest.mark.parametrize("where", EVERYWHERE)
def test_workers_with_equal_masks_are_told_once(pool: WorkerPool, where: str) -> None:
    found = run_at(pool, where, train, False, 0.5, "", False)
    assert found[0]["masks"] == found[1]["masks"]
    assert [each["said"] for each in found] == [[ALIKE], []]


def look(session: atoll.Session, seeds: bool) -> list[str]:
    """Draw masks and make no step; returns what is said up to the session's end."""
    said: list[Any] = []
    session._records._bus.subscribe(said.append)
    torch.manual_seed(session.rank if seeds else 0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(), nn.Linear(64, 1))
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    drawn()
    session.close()
    return [each.message for each in said if isinstance(each, Warned) and each.message == ALIKE]


@pytest.mark.parametrize("where", TOGETHER)
def test_a_session_without_a_step_is_told_at_its_end(pool: WorkerPool, where: str) -> None:
    assert run_at(pool, where, look, False) == [[ALIKE], []]
    assert run_at(pool, where, look, True) == [[], []]


def test_nothing_is_said_of_models_without_randomness(pool: WorkerPool) -> None:
    found = run_at(pool, "ring", train, False, 0.0, "", False)
    assert [each["said"] for each in found] == [[], []]
