"""Pairwise averaging (`examples/own_strategy.py`) under Atoll and in one process of plain torch: equal values
after every step, whoever sums first and wherever the model lies.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.core.memory import Memory
from atoll.exchange.synchronizer import Contributors
from atoll.testing.pool import WorkerPool
from atoll.testing.runs import model, run_with
from own_strategy import partner_of

pytestmark = pytest.mark.check  # sessions of several workers

STEPS, SAMPLES, SEED = 6, 4, 5
BUDGET = Memory(device="24KiB", chunk="4096", step="host")  # the model takes more


def configured(strategy: str = "pairs", *, groups: int = 0, tiers: bool = False) -> Config:
    config = Config(run=Run(strategy=strategy), sync=Sync(timeout="60s"), groups=Groups(count=groups))
    return msgspec.structs.replace(config, memory=BUDGET) if tiers else config


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    batch = torch.randn(SAMPLES, 32, generator=generator, dtype=torch.float64)
    return module(batch).square().mean()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().clone().flatten() for parameter in module.parameters()])


def train(session: atoll.Session) -> tuple[list[torch.Tensor], Any]:
    """The values after each step; and this worker's group."""
    module = model()
    torch.manual_seed(SEED)  # of which all take worker 0's
    module, optimizer = session.prepare(module, optimizer_of(module))
    seen = []
    for step in range(STEPS):
        loss_of(module, session.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(flat(module))
    group = session.group
    return seen, (group.index, group.count, group.rank, group.size)


def train_plain(contributors: list[list[int]], period: int = 1) -> list[list[torch.Tensor]]:
    """The same in one process: each contributor's values after each step."""
    modules = [model() for _ in contributors]
    optimizers = [optimizer_of(module) for module in modules]
    names = tuple(range(len(contributors)))
    seen: list[list[torch.Tensor]] = [[] for _ in contributors]
    for step in range(STEPS):
        for ranks, module, optimizer in zip(contributors, modules, optimizers, strict=True):
            for rank in ranks:
                (loss_of(module, rank, step) / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % period == 0:
            pairs = {name: partner_of(Contributors(name, names), SEED, step + 1) for name in names}
            before = [[p.detach().clone() for p in module.parameters()] for module in modules]
            for name, partner in pairs.items():
                if partner is not None:
                    assert pairs[partner] == name
                    for parameter, own, other in zip(
                        modules[name].parameters(), before[name], before[partner], strict=True
                    ):
                        parameter.data.copy_((own + other) / 2)
        for name, module in enumerate(modules):
            seen[name].append(flat(module))
    return seen


CASES = {
    "two workers": ([[0], [1]], {}),
    "three workers": ([[0], [1], [2]], {}),
    "two workers in tiers": ([[0], [1]], {"tiers": True}),
    "two groups": ([[0, 1], [2, 3]], {"groups": 2}),
    "groups of two and one": ([[0, 1], [2]], {"groups": 2}),
    "two groups in tiers": ([[0, 1], [2, 3]], {"groups": 2, "tiers": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_pairwise_averaging_is_that_of_plain_torch(pool: WorkerPool, case: str) -> None:
    contributors, options = CASES[case]
    world = sum(map(len, contributors))
    found = run_with(pool, configured(**options), train, world=world)
    expected = train_plain(contributors)
    for index, ranks in enumerate(contributors):
        for place, rank in enumerate(ranks):
            seen, group = found[rank]
            assert group == (index, len(contributors), place, len(ranks))
            for step, (own, other) in enumerate(zip(seen, expected[index], strict=True)):
                assert float((own - other).abs().max()) < 1e-12, f"worker {rank} at step {step}"
    if len(contributors) == 2:  # all replicas are equal after each step, to the bit
        first = found[0][0]
        for seen, _ in found:
            assert all(torch.equal(own, other) for own, other in zip(seen, first, strict=True))


def test_between_exchanges_replicas_train_by_themselves(pool: WorkerPool) -> None:
    found = run_with(pool, configured("pairs-of-8"), train, world=2)
    for rank, expected in enumerate(train_plain([[0], [1]], period=8)):
        for own, other in zip(found[rank][0], expected, strict=True):
            assert float((own - other).abs().max()) < 1e-12
    assert not torch.equal(found[0][0][-1], found[1][0][-1])
