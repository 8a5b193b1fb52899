"""Minutes of training that does something else in each step: it stays right, and nothing grows."""

from __future__ import annotations

import gc
import random
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.core.config import Chunks, Config
from atoll.train.api.place import Place
from support.pool import WorkerPool

STEPS = 2000
WARM = 500  # steps after which memory has settled


class Branches(nn.Module):
    """Five branches of odd sizes, of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 7 + 5 * i), nn.Linear(7 + 5 * i, 3)) for i in range(5)
        )

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return torch.stack([self.branches[i](x) for i in used]).sum(0)


def plan(step: int, rank: int) -> tuple[list[tuple[Tensor, list[int]]], bool, bool]:
    """A worker's micro-batches of a step, and whether the step clips and zeroes gradients in place."""
    common, own = random.Random(step), random.Random(f"{step}/{rank}")
    batches = []
    for _ in range(common.randint(1, 3)):
        x = torch.randn(own.randint(1, 5), 6, generator=torch.Generator().manual_seed(own.getrandbits(40)))
        batches.append((x.double(), own.sample(range(5), own.randint(1, 4))))
    return batches, common.random() < 0.3, common.random() < 0.3


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Branches().double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def train(place: Place) -> tuple[list[Tensor], dict[str, tuple[float, float]]]:
    """Final parameters, and (descriptors, threads, bytes) when warm and at the end."""
    model, optimizer = build()
    usage: list[tuple[float, ...]] = []
    with atoll.join(Config(chunks=Chunks(size="1KiB")), place=place) as session:
        session.prepare(model, optimizer)
        for step in range(STEPS):
            batches, clips, in_place = plan(step, session.rank)
            optimizer.zero_grad(set_to_none=not in_place)
            with session.no_sync():
                for x, used in batches[:-1]:
                    (model(x, used).square().mean() / len(batches)).backward()
            x, used = batches[-1]
            (model(x, used).square().mean() / len(batches)).backward()
            if clips:
                session.clip_grad_norm_(0.5)
            optimizer.step()
            if step in (WARM, STEPS - 1):
                gc.collect()
                process = psutil.Process()
                usage.append((process.num_fds(), process.num_threads(), process.memory_info().rss))
    names = ("descriptors", "threads", "bytes")
    return [p.detach().clone() for p in model.parameters()], dict(
        zip(names, zip(*usage, strict=True), strict=True)
    )


def plain(world: int) -> list[Tensor]:
    model, optimizer = build()
    for step in range(STEPS):
        plans = [plan(step, rank) for rank in range(world)]
        samples = [sum(len(x) for x, _ in batches) for batches, _, _ in plans]
        optimizer.zero_grad(set_to_none=not plans[0][2])
        for (batches, _, _), weight in zip(plans, samples, strict=True):
            for x, used in batches:
                (model(x, used).square().mean() / len(batches) * weight / sum(samples)).backward()
        if plans[0][1]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 3])
def test_thousands_of_unlike_steps(pool: WorkerPool, world: int) -> None:
    results: list[Any] = pool.run(train, world=world, deadline=1500)
    expected = plain(world)
    for parameters, usage in results:
        for ours, theirs in zip(parameters, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
        assert usage["descriptors"][1] <= usage["descriptors"][0]
        assert usage["threads"][1] <= usage["threads"][0]
        assert usage["bytes"][1] <= usage["bytes"][0] * 1.05 + 2**20
