"""One session after another in a process, as a script for cross validation makes them."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
import pytest
import torch

import atoll
from atoll.core.config import Config
from atoll.core.errors import ConfigError
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.runs import IN_TIERS, KINDS, PACES, SHARDS, TOGETHER, model, run_at, train_at
from support.served import ServedRun, served_worker

WORLD = 2
AT_SHARDS = sorted(kind for kind, shards in SHARDS.items() if shards)
OTHERS = [kind for kind in [*KINDS, *PACES] if kind not in AT_SHARDS]
SLOW = frozenset(kind for kind in OTHERS if kind.startswith("peers"))  # each node starts a CPU side


def train(session: atoll.Session, fold: int) -> tuple[int, torch.Tensor]:
    """Train a fold's model from its beginning; return the iterations and the parameters."""
    net = model(fold)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer)
    generator = torch.Generator().manual_seed(10 * fold + session.rank)
    for _ in range(3):
        net(torch.randn(4, 32, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.barrier()
    with torch.no_grad():
        return session.iteration, torch.cat([each.detach().flatten().clone() for each in net.parameters()])


def sessions(place: Place, config: Config, address: str) -> tuple[list[tuple[int, torch.Tensor]], str]:
    """Train two folds, each in a session of its own; return their results, and the line of a refusal."""
    done: list[tuple[int, torch.Tensor]] = []
    with ExitStack() as stack:
        if address:
            stack.enter_context(served_worker(address, place.rank))
        try:
            for fold in range(2):
                done.append(train_at(config, None if address else place, train, (fold,)))
        except ConfigError as error:
            return done, str(error)
    return done, ""


def run_in_turn(pool: WorkerPool, kind: str) -> list[tuple[list[tuple[int, torch.Tensor]], str]]:
    config = msgspec.structs.replace({**KINDS, **PACES}[kind])
    if kind not in SHARDS:
        return pool.run(sessions, config, "", world=WORLD)
    with ServedRun(WORLD, SHARDS[kind]) as served:
        found = pool.run(sessions, config, served.address, world=WORLD)
    assert not served.failures
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.check] if kind in SLOW else []) for kind in OTHERS]
)
def test_a_second_session_trains_as_in_a_run_of_its_own(pool: WorkerPool, kind: str) -> None:
    found = run_in_turn(pool, kind)
    assert [refusal for _, refusal in found] == [""] * WORLD
    for fold in range(2):
        alone = run_at(pool, kind, train, fold, world=WORLD)
        for rank in range(WORLD):
            iterations, parameters = found[rank][0][fold]
            assert iterations == 3
            if kind in TOGETHER or kind in IN_TIERS:
                assert torch.equal(parameters, alone[rank][1])


@pytest.mark.parametrize("kind", AT_SHARDS)
def test_a_second_session_at_shards_is_refused_in_one_line(pool: WorkerPool, kind: str) -> None:
    for done, refusal in run_in_turn(pool, kind):
        assert len(done) == 1
        strategy = {**KINDS, **PACES}[kind].run.strategy
        assert refusal.startswith("atoll.join (runs.py:")
        assert f"a second session in one run, and under strategy {strategy!r}" in refusal
        assert refusal.endswith("or set run.strategy to ring or peers")
