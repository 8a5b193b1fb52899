"""Several backwards before one step, without `no_sync`: the gradients add up, as in plain PyTorch."""

from __future__ import annotations

import functools

import msgspec
import pytest
import torch
from kinds import check_equal
from torch import Tensor, nn

import atoll
from support.pool import WorkerPool
from support.runs import KINDS, model, run_at, run_with

WORLD, STEPS = 2, 4


def batch(rank: int, step: int, part: int) -> Tensor:
    made = torch.Generator().manual_seed(100 * part + 10 * step + rank)
    return torch.randn(4, 32, dtype=torch.float64, generator=made)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def loop(net: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], clips: bool) -> list[Tensor]:
    """Two losses, each with a backward of its own; the gradients between them may be clipped."""
    for step in range(STEPS):
        for part in range(2):
            for rank in ranks:
                (net(batch(rank, step, part)).square().mean() / len(ranks)).backward()
            if clips and part == 0:
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def train(session: atoll.Session, clips: bool) -> list[Tensor]:
    net, optimizer = made()
    session.prepare(net, optimizer)
    return loop(net, optimizer, [session.rank], clips)


@functools.cache
def plain(clips: bool) -> list[Tensor]:
    return loop(*made(), list(range(WORLD)), clips)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("kind", ["ring", "server", "ps-hra", "server tiers"])
def test_gradients_of_two_backwards_add_up(pool: WorkerPool, kind: str, clips: bool) -> None:
    for found in run_at(pool, kind, train, clips, world=WORLD):
        check_equal(found, plain(clips))


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_of_two_backwards_add_up_in_a_groups_tiers(pool: WorkerPool, clips: bool) -> None:
    config = msgspec.structs.replace(KINDS["ps-hra"], memory=KINDS["tiers"].memory)
    for found in run_with(pool, config, train, clips, world=WORLD, shards=1):
        check_equal(found, plain(clips))
