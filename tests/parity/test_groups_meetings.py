"""Meetings of workers in groups, which come to them at different iterations: nobody waits in vain, and all
have the same parameters then."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.hub.planner import GroupingSettings
from atoll.net.endpoint import Received
from atoll.net.tunnel import TunnelServer
from atoll.train.api.place import Place
from support.parity import ALONE, await_groups
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.check

WORKERS, STEPS = 4, 40
QUIET = 0.03  # seconds without another message, after which a Commit is received
SECONDS = 0.002  # that a step of the fastest takes; worker r's takes r times as long more


def train(place: Place, address: str, sync: dict[str, Any], every: int) -> dict[str, Any]:
    """Counts its own steps, and so meets the others at other iterations of its group than they do."""
    config = Config(run=Run(strategy="ps-hra"), sync=Sync(timeout="60s", **sync), groups=Groups(probe=2))
    with served_worker(address, place.rank), atoll.join(config) as session:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        generator = torch.Generator().manual_seed(place.rank)
        sums = []
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = torch.randn(4, 8, generator=generator, dtype=torch.float64)
            model(batch).square().mean().backward()
            time.sleep(SECONDS * (1 + place.rank))
            optimizer.step()
            if step % every == every - 1:
                sums.append(session.reduce(float(place.rank + 1), "sum"))
        session.barrier()
        parameters = [parameter.tolist() for parameter in model.parameters()]
        return {"sums": sums, "parameters": parameters, "size": session.group.size}


@pytest.mark.parametrize(
    "sync",
    [
        {"consistency": "asp", "uplink": "leader"},
        {"consistency": "asp", "uplink": "members", "pipeline": 1},
        pytest.param({"consistency": "asp", "uplink": "leader", "pipeline": 1}, marks=pytest.mark.soak),
        pytest.param({"consistency": "ssp", "uplink": "members"}, marks=pytest.mark.soak),
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [1, 2])
def test_workers_that_made_unequally_many_iterations_meet(
    pool: WorkerPool, sync: dict[str, Any], groups: int
) -> None:
    check_that_all_meet(pool, sync, groups)


def check_that_all_meet(pool: WorkerPool, sync: dict[str, Any], groups: int, every: int = 10) -> None:
    settings = GroupingSettings(count=groups, consistency=sync["consistency"], regroup=False)
    with ServedRun(WORKERS, grouping=settings) as served:
        results = pool.run(train, served.address, sync, every, world=WORKERS)
    assert not served.failures
    everyone = float(sum(range(1, WORKERS + 1)))
    for result in results:
        assert result["sums"] == [everyone] * (STEPS // every)
        assert result["parameters"] == results[0]["parameters"]
        assert result["size"] == WORKERS // groups


def let_commits_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the shard receive a Commit only once nothing else comes.

    Members of a group have connections of their own, between which messages keep no order.
    """
    receive, held, released = TunnelServer.receive, dict[bytes, list[Received]](), deque[Received]()

    def receive_commits_last(server: TunnelServer, timeout: float) -> Received | None:
        while not released:
            received = receive(server, QUIET if held else timeout)
            if received is None and not held:
                return None
            if received is None:
                released.extend(held.pop(next(iter(held))))
            elif received.peer in held or b"Commit" in received.header:
                held.setdefault(received.peer, []).append(received)
            else:
                return received
        return released.popleft()

    monkeypatch.setattr(TunnelServer, "receive", receive_commits_last)


@pytest.mark.parametrize("pipeline", [1, pytest.param(0, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("consistency", "uplink"),
    [
        ("asp", "members"),
        ("ssp", "leader"),
        pytest.param("asp", "leader", marks=pytest.mark.soak),
        pytest.param("ssp", "members", marks=pytest.mark.soak),
    ],
)
def test_groups_meet_though_another_members_commit_comes_after_their_part(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, consistency: str, uplink: str, pipeline: int
) -> None:
    let_commits_come_last(monkeypatch)
    sync = {"consistency": consistency, "uplink": uplink, "pipeline": pipeline}
    check_that_all_meet(pool, sync, 2, every=4)  # often, as the leader is drawn by lot


def keeps_gradients(place: Place, address: str, sync: dict[str, Any]) -> None:
    """A gradient that no `zero_grad` clears is the same after a meeting."""
    groups = Groups(probe=ALONE - 1)
    config = Config(run=Run(strategy="ps-hra"), sync=Sync(timeout="60s", **sync), groups=groups)
    with served_worker(address, place.rank), atoll.join(config) as session:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for step in range(ALONE + 4):
            await_groups(session, step)
            batch = torch.full((4, 8), float(step + place.rank), dtype=torch.float64)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = [p.grad.clone() for p in model[0].parameters() if p.grad is not None]
            assert len(kept) == 2
            session.barrier()
            assert all(p.grad is None for p in model[2].parameters())
            found = [p.grad for p in model[0].parameters() if p.grad is not None]
            assert len(found) == 2
            assert all(map(torch.equal, kept, found))
        assert session.group.size == WORKERS


@pytest.mark.parametrize("consistency", ["asp", "bsp"])
def test_a_gradient_that_the_script_keeps_goes_through_a_meeting(pool: WorkerPool, consistency: str) -> None:
    settings = GroupingSettings(count=1, by="joint", consistency=consistency, regroup=False)  # type: ignore[arg-type]
    with ServedRun(WORKERS, grouping=settings) as served:
        pool.run(keeps_gradients, served.address, {"consistency": consistency}, world=WORKERS)
    assert not served.failures
