"""A worker that comes late where each step has several backwards without `no_sync`: it begins with the first.

Each backward is exchanged, and adds to the mean before. A newcomer that took part from a later backward on
would lack that mean, and its loop would be a backward behind those of the others. A ring admits newcomers
only after a step. At shards each backward is an iteration of its own: there the workers foresee which one is
a step's last (`ScriptLoop`), the log lets nobody in after a step that was left out (`Rounds`), and a worker
gives its state only where gradients begin anew (`ServedEntrance`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from run_command import wait_for
from torch import Tensor, nn

import atoll
from atoll.server.logkeeper import LogKeeper
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.runs import KINDS, model, train_at
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.check

SITES = ("paris", "berlin", "paris")  # of the workers, by rank
STEPS, COMES = 7, 2  # the newcomer comes before a backward of step COMES
NEWCOMER = 2
DEADLINE = 60.0
GLOBAL_BATCH, LENGTH = 12, 100  # the last global batch is short
DATA = torch.randn(LENGTH, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

# Of each backward: its step and part, the batch, its samples' numbers where a sampler gives them, and p.grad.
Seen = list[tuple[int, int, Tensor, list[int], list[Tensor | None]]]


def batch(who: int, step: int, part: int) -> Tensor:
    made = torch.Generator().manual_seed(1000 * part + 10 * step + who)
    return torch.randn(2 + (who + part) % 3, 32, dtype=torch.float64, generator=made)


@dataclass(frozen=True)
class Loop:
    """A script's loop.

    Attributes:
        parts: the number of backwards of each step.
        seldom: 0: the model has one optimizer. Else the second of two optimizers steps at the end of every so
            many steps, and leaves its gradients to the next backward at the others.
        shares: True if workers share the batches of an epoch of `DATA`.
        left_out: steps before COMES whose gradients are zeroed instead, as after a GradScaler's overflow.
    """

    parts: tuple[int, ...] = (2,) * STEPS
    seldom: int = 0
    shares: bool = False
    left_out: tuple[int, ...] = ()

    def make(self) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        net = model()
        halves = (net[:6], net[6:]) if self.seldom else (net,)
        return net, [torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9) for half in halves]

    def step(self, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for number, optimizer in enumerate(optimizers):
            if number == 0 or (step + 1) % self.seldom == 0:
                if step not in self.left_out:
                    optimizer.step()
                optimizer.zero_grad()


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in net.parameters()]


def script(session: atoll.Session, who: int, folder: Path, loop: Loop, comes: int) -> dict[str, Any]:
    net, optimizers = loop.make()
    session.prepare(net, optimizers)
    sampler = session.batches(range(LENGTH), seed=5) if loop.shares else None
    ring = session._runtime.ring
    seen: Seen = []
    step, part = session.resume(), 0
    if who == NEWCOMER:
        step += len(loop.left_out)
    given = iter(() if sampler is None else sampler)
    while step < STEPS:
        if who != NEWCOMER and (step, part) == (COMES, comes):
            (folder / f"waits-{who}").touch()
            if ring is not None and not (folder / "shards").exists():
                wait_for(lambda: ring.is_awaited, "a newcomer", DEADLINE)
            else:
                wait_for((folder / "arrived").exists, "a newcomer", DEADLINE)
        samples = [] if sampler is None else next(given, [])
        if sampler is not None and not samples:
            break
        made = batch(who, step, part) if sampler is None else DATA[samples]
        net(made).square().mean().backward()
        if session._state.models[0].samples.latest == 0:  # a batch that fills up
            made, samples = made[:0], []
        seen.append((step, part, made, samples, gradients(net)))
        part += 1
        if part == loop.parts[step]:
            loop.step(step, optimizers)
            step, part = step + 1, 0
    return {"seen": seen, "ends": [p.detach().clone() for p in net.parameters()]}


def work(place: Place, address: str, kind: str, folder: Path, loop: Loop, comes: int) -> dict[str, Any]:
    if place.rank == NEWCOMER:
        wait_for(lambda: all((folder / f"waits-{who}").exists() for who in (0, 1)), "the others", DEADLINE)
    kind, _, levels = kind.partition(" at ")
    with served_worker(address, place.rank, site=SITES[place.rank] if levels else ""):
        config = KINDS[kind]
        if loop.shares:
            config = replace(config, sync=replace(config.sync, global_batch=GLOBAL_BATCH))
        return train_at(config, None, script, (place.rank, folder, loop, comes))


def check(found: list[dict[str, Any]], loop: Loop) -> int:
    """Compare with plain torch on the same batches; return the newcomer's first step."""
    net, optimizers = loop.make()
    by_worker = [{(step, part): rest for step, part, *rest in each["seen"]} for each in found]
    for step in range(STEPS):
        for part in range(loop.parts[step]):
            there = [seen[step, part] for seen in by_worker if (step, part) in seen]
            if not there:
                break
            samples = sum(len(made) for made, *_ in there)
            for made, *_ in there:
                (net(made).square().mean(1).sum() / samples).backward()
            for *_, shown in there:
                for now, then in zip(shown, gradients(net), strict=True):
                    torch.testing.assert_close(now, then, rtol=0, atol=1e-12, msg=f"step {step}, part {part}")
        else:
            loop.step(step, optimizers)
    for each in found:
        for now, then in zip(each["ends"], net.parameters(), strict=True):
            torch.testing.assert_close(now, then.detach(), rtol=0, atol=1e-12)
    if loop.shares:
        used = Counter(sample for seen in by_worker for _, samples, _ in seen.values() for sample in samples)
        assert used == Counter(range(LENGTH))
    assert by_worker[NEWCOMER], "the newcomer has not entered"
    return min(step for step, _ in by_worker[NEWCOMER])


def run(
    pool: WorkerPool, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, loop: Loop, comes: int
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
    sites = dict.fromkeys(SITES, 1) if kind.endswith("sites") else None
    with ServedRun(workers=2, shards=shards, sites=sites) as served:
        found = pool.run(work, served.address, kind, folder, loop, comes, world=3)
    assert served.failures == []
    return check(found, loop)


@pytest.mark.parametrize("comes", [0, 1])
@pytest.mark.parametrize("kind", ["server", "server tiers", "server at sites", "ps-hra", "elastic"])
def test_a_newcomer_begins_with_the_first_of_two_backwards(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, comes: int
) -> None:
    assert run(pool, tmp_path, monkeypatch, kind, Loop(), comes) == COMES + 1


@pytest.mark.parametrize("kind", ["server", "ps-hra", "elastic"])
def test_a_newcomer_whose_entering_was_foreseen_waits_where_one_more_backward_comes(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Steps 0 and 1 have one backward, so all members expect the newcomer after the first one of step 2."""
    first = run(pool, tmp_path, monkeypatch, kind, Loop((1, 1, 2, 2, 1, 2, 1)), 0)
    assert first == (COMES + 1 if kind == "elastic" else COMES + 2)


@pytest.mark.parametrize("kind", ["server", "server tiers", "ps-hra", "elastic"])
def test_a_newcomer_waits_for_the_optimizer_that_steps_more_seldom(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The gradients of step 2 are left to the second optimizer's step, at the end of step 3."""
    assert run(pool, tmp_path, monkeypatch, kind, Loop((1,) * STEPS, seldom=2), 0) == COMES + 2


@pytest.mark.parametrize("kind", ["server", "server tiers", "ps-hra", "elastic"])
def test_a_step_that_was_left_out_before_makes_no_newcomer_wait(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert run(pool, tmp_path, monkeypatch, kind, Loop((1,) * STEPS, left_out=(1,)), 0) == COMES + 1


@pytest.mark.parametrize("parts", [(2,) * STEPS, (1, 1, 2, 2, 1, 2, 1)], ids=["alike", "one more"])
@pytest.mark.parametrize("kind", ["server", "ps-hra", "elastic"])
def test_what_was_dealt_to_a_newcomer_that_must_wait_is_dealt_again(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, parts: tuple[int, ...]
) -> None:
    """Each sample counts once, in the mean that all workers' p.grad shows."""
    assert run(pool, tmp_path, monkeypatch, kind, Loop(parts, shares=True), 0) > COMES
