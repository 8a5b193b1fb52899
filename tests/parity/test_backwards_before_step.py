"""Several backwards before one step, without `no_sync`: the gradients add up, as in plain PyTorch."""

from __future__ import annotations

import functools

import msgspec
import pytest
import torch
from kinds import check_equal
from test_groups_parity import score_for
from torch import Tensor, nn

import atoll
from atoll.core.config import Groups
from atoll.groups.grouping import Grouping
from atoll.hub.planner import GroupingSettings
from support.parity import ALONE, await_groups
from support.pool import WorkerPool
from support.runs import KINDS, model, run_at, run_with

pytestmark = pytest.mark.sampled

PARTS = 3  # backwards before a step
SAMPLES = [4, 2, 3]  # by worker, and part: uneven batches
LEFT_OUT = (1, ALONE + 2)  # steps: alone, and in groups

Values = list[list[Tensor]]


def batch(rank: int, step: int, part: int, uneven: bool) -> Tensor:
    made = torch.Generator().manual_seed(1000 * part + 10 * step + rank)
    samples = SAMPLES[(rank + part) % len(SAMPLES)] if uneven else 4
    return torch.randn(samples, 32, dtype=torch.float64, generator=made)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def treat(net: nn.Module, how: str) -> None:
    """Do what the script does to gradients after a backward that is not the last one."""
    if how == "clipped":
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    elif how == "edited":
        parameters = list(net.parameters())
        parameters[0].grad = None
        assert parameters[1].grad is not None
        with torch.no_grad():
            parameters[1].grad.mul_(0.5)


def loop(
    net: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], world: int, steps: range, how: str
) -> Values:
    """Several losses, each with a backward of its own. A step that is left out, as a GradScaler's, leaves
    gradients to which the next one's are added."""
    seen = []
    for step in steps:
        for part in range(PARTS):
            batches = [batch(rank, step, part, how == "uneven") for rank in range(world)]
            samples = sum(map(len, batches))
            for rank in ranks:
                share = 1.0 if len(ranks) < world else len(batches[rank]) / samples
                (net(batches[rank]).square().mean() * share).backward()
            if part < PARTS - 1:
                treat(net, how)
        if how != "left out" or step not in LEFT_OUT:
            optimizer.step()
            optimizer.zero_grad()
        seen.append([p.detach().clone() for p in net.parameters()])
    return seen


def train(session: atoll.Session, steps: int, how: str) -> Values:
    net, optimizer = made()
    session.prepare(net, optimizer)
    seen = []
    for step in range(steps):
        if session._runtime.regrouping is not None and steps > ALONE:
            await_groups(session, step)
        seen += loop(net, optimizer, [session.rank], session.world, range(step, step + 1), how)
    if steps > ALONE:
        assert session._runtime.regrouping is not None
        assert session._runtime.regrouping.contributor != session.rank, "it has not moved to a group"
    return seen


@functools.cache
def plain(world: int, steps: int, how: str) -> Values:
    return loop(*made(), list(range(world)), world, range(steps), how)


def check(found: list[Values], right: Values) -> None:
    for seen in found:
        for now, then in zip(seen, right, strict=True):
            check_equal(now, then)


HOW = ["as they are", "uneven", "clipped", "edited", "left out"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["ring", "server", "ps-hra", "tiers", "server tiers"])
def test_gradients_of_several_backwards_add_up(pool: WorkerPool, kind: str, how: str) -> None:
    check(run_at(pool, kind, train, ALONE, how, world=2), plain(2, ALONE, how))


@pytest.mark.parametrize("how", ["uneven", "edited", "left out"])
@pytest.mark.parametrize("store", ["resident", "tiers"])
def test_in_groups_they_add_up(pool: WorkerPool, store: str, how: str) -> None:
    """A group of two and one worker alone, after the steps in which each is alone."""
    grouping = GroupingSettings(
        2, by="joint", consistency="bsp", regroup=False, score_for=score_for(Grouping([[0, 1], [2]]))
    )
    config = msgspec.structs.replace(KINDS["ps-hra"], groups=Groups(probe=ALONE - 2))
    if store == "tiers":
        config = msgspec.structs.replace(config, memory=KINDS["tiers"].memory)
    steps = 2 * ALONE
    found = run_with(pool, config, train, steps, how, world=3, shards=2, grouping=grouping)
    check(found, plain(3, steps, how))
