"""What one member writes to parameters in tiers is seen by the others from the next sync point on, and not
before: their scripts may be at an earlier line."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from support.pool import WorkerPool
from support.runs import model, run_at

WORLD, DEADLINE = 2, 60.0


def wait_for(file: Path) -> None:
    until = time.monotonic() + DEADLINE
    while not file.exists():
        assert time.monotonic() < until, f"no {file.name}"
        time.sleep(0.005)


def write(parameter: nn.Parameter, value: float, how: str) -> None:
    if how == "assign":
        parameter.data = torch.full_like(parameter, value)
    else:
        with torch.no_grad():
            parameter.fill_(value)


def behind(session: atoll.Session, folder: Path, how: str) -> None:
    """Worker 0 writes to all parameters, and more than once, before worker 1 has read them."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    net(torch.ones(2, 32, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    session.barrier()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    session.barrier()
    if session.rank == 0:
        for value in (7.0, 2.0):
            for parameter in net.parameters():
                write(parameter, value, how)
            sum(float(parameter.detach().sum()) for parameter in net.parameters())  # all have left the device
        (folder / "written").touch()
        wait_for(folder / "read")
    else:
        wait_for(folder / "written")
        found = [parameter.detach().clone() for parameter in net.parameters()]
        assert all(map(torch.equal, found, before))
        (folder / "read").touch()
        for parameter in net.parameters():
            write(parameter, 2.0, how)
    net(torch.ones(2, 32, dtype=torch.float64))  # a sync point
    assert all(bool((parameter == 2.0).all()) for parameter in net.parameters())
    assert not tiers_of(session)._originals  # nothing is kept after it


def tiers_of(session: atoll.Session) -> Any:
    tiers = session._state.prepared[0].tiers
    assert tiers is not None
    return tiers.fitted.sharing  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["assign", "fill"])
def test_others_read_what_was_there_before(pool: WorkerPool, tmp_path: Path, how: str) -> None:
    run_at(pool, "tiers", behind, tmp_path, how, world=WORLD)
