"""Workers that give `session.save` different folders: refused on all of them, and nothing is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import atoll
from atoll.core.errors import UserError
from support.pool import WorkerPool
from support.runs import EVERYWHERE, run_at


@contextmanager
def within(folder: str) -> Iterator[None]:
    """`folder` is the working directory."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def save_apart(session: atoll.Session, folder: str) -> str:
    model = torch.nn.Linear(3, 1)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        session.save(Path(folder) / f"worker{session.rank}")
    except UserError as error:
        refused = str(error)
    else:
        refused = ""
    with within(folder):
        session.save("together" if session.rank else "./together/")
        session.save("together" if session.rank else Path(folder) / "together")
    return refused


@pytest.mark.parametrize("where", EVERYWHERE)
def test_workers_that_save_into_two_folders_are_refused(pool: WorkerPool, tmp_path: Path, where: str) -> None:
    """One folder under several names is one, and the run goes on after a refusal."""
    refused = run_at(pool, where, save_apart, str(tmp_path))
    assert (
        refused
        == [
            f"session.save: worker 0 gives {str(tmp_path / 'worker0')!r}, and worker 1 "
            f"{str(tmp_path / 'worker1')!r}; give one folder on every worker: one of them writes for all"
        ]
        * 2
    )
    assert [path.name for path in tmp_path.iterdir()] == ["together"]
