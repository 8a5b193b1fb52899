"""A worker that comes late where every step has several backwards without `no_sync`: it takes part from the first
backward of a step on.

Each backward is exchanged, and adds to the mean before. A newcomer that took part from a later backward on would
lack that mean, and its loop would be a backward behind those of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from run_command import wait_for
from torch import Tensor, nn

import atoll
from atoll.server.logkeeper import LogKeeper
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.runs import KINDS, _train, model
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.check

STEPS, COMES = 7, 2  # the newcomer comes before a backward of step COMES
NEWCOMER = 2
DEADLINE = 60.0

Seen = list[tuple[int, int, list[Tensor | None]]]  # of each backward: step, part, and p.grad after it


def batch(who: int, step: int, part: int) -> Tensor:
    made = torch.Generator().manual_seed(1000 * part + 10 * step + who)
    return torch.randn(2 + (who + part) % 3, 32, dtype=torch.float64, generator=made)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in net.parameters()]


def script(session: atoll.Session, who: int, folder: Path, parts: Sequence[int], comes: int) -> dict[str, Any]:
    """`parts` are the backwards of each step."""
    net, optimizer = make()
    session.prepare(net, optimizer)
    ring = session._runtime.ring
    seen: Seen = []
    first = session.resume()
    for step in range(first, STEPS):
        for part in range(parts[step]):
            if who != NEWCOMER and (step, part) == (COMES, comes):
                (folder / f"waits-{who}").touch()
                if ring is not None and not (folder / "shards").exists():
                    wait_for(lambda: ring.is_awaited, "a newcomer", DEADLINE)
                else:
                    wait_for((folder / "arrived").exists, "a newcomer", DEADLINE)
            net(batch(who, step, part)).square().mean().backward()
            seen.append((step, part, gradients(net)))
        optimizer.step()
        optimizer.zero_grad()
    return {"seen": seen, "ends": [p.detach().clone() for p in net.parameters()]}


def work(place: Place, address: str, kind: str, folder: Path, parts: Sequence[int], comes: int) -> dict[str, Any]:
    if place.rank == NEWCOMER:
        wait_for(lambda: all((folder / f"waits-{who}").exists() for who in (0, 1)), "the others", DEADLINE)
    with served_worker(address, place.rank):
        return _train(KINDS[kind], None, script, (place.rank, folder, parts, comes))


def check(found: list[dict[str, Any]], parts: Sequence[int]) -> int:
    """Compare with plain torch on the same batches; return the newcomer's first step."""
    net, optimizer = make()
    by_worker = [{(step, part): grads for step, part, grads in each["seen"]} for each in found]
    for step in range(STEPS):
        for part in range(parts[step]):
            there = [who for who, seen in enumerate(by_worker) if (step, part) in seen]
            batches = {who: batch(who, step, part) for who in there}
            samples = sum(map(len, batches.values()))
            for each in batches.values():
                (net(each).square().mean() * (len(each) / samples)).backward()
            for who in there:
                for now, then in zip(by_worker[who][step, part], gradients(net), strict=True):
                    torch.testing.assert_close(now, then, rtol=0, atol=1e-12, msg=f"{who} at {step}, {part}")
        optimizer.step()
        optimizer.zero_grad()
    for each in found:
        for now, then in zip(each["ends"], net.parameters(), strict=True):
            torch.testing.assert_close(now, then.detach(), rtol=0, atol=1e-12)
    return min(step for step, _ in by_worker[NEWCOMER])


def run(
    pool: WorkerPool, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, parts: Sequence[int], comes: int
) -> int:
    arrive = LogKeeper.handle_arrive

    def arrives(log: LogKeeper, worker: int, incarnation: int, meeting: int = -1) -> str:
        refused = arrive(log, worker, incarnation, meeting)
        if worker == NEWCOMER:
            (folder / "arrived").touch()
        return refused

    monkeypatch.setattr(LogKeeper, "handle_arrive", arrives)
    shards = 0 if kind == "elastic" else 2
    if shards:
        (folder / "shards").touch()
    with ServedRun(workers=2, shards=shards) as served:
        found = pool.run(work, served.address, kind, folder, parts, comes, world=3)
    assert served.failures == []
    return check(found, parts)


@pytest.mark.parametrize("comes", [0, 1])
@pytest.mark.parametrize("kind", ["server", "server tiers", "ps-hra", "elastic"])
def test_a_newcomer_begins_with_the_first_of_two_backwards(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, comes: int
) -> None:
    assert run(pool, tmp_path, monkeypatch, kind, [2] * STEPS, comes) == COMES + 1
