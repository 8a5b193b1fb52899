"""What sites send up over loss-tolerant links: nothing is lost, only late.

Hub and shards run in this process, on threads, workers in the pool's. Gradients are whole numbers that do not
depend on the parameters, and the optimizer is plain SGD: so sums are exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_tunnel import Proxy, through_proxy
from torch import Tensor, nn

import atoll
from atoll.core.config import Chunks, Config, LinkOptions, Run, Sync
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

__all__ = ["through_proxy"]

STEPS = 6
SIZE = 100_000  # elements: some 300 blocks
LTP = LinkOptions(transport="ltp")


def gradient(rank: int, step: int) -> Tensor:
    """Whole numbers, none of them 0: what is missing shows."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(1, 2**10, (SIZE,), generator=generator).float()


def trains(place: Place, address: str, consistency: str, site: str) -> Tensor:
    """What a worker ends with: minus the sum of all gradients that are in the parameters."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = Sync(timeout="60s", consistency=consistency)  # type: ignore[arg-type]
    config = Config(run=Run(strategy="server"), chunks=Chunks(size="1MiB"), sync=sync)
    with served_worker(address, place.rank, site=site), atoll.join(config) as session:
        session.prepare(model, optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            (model.weight * gradient(place.rank, step)).sum().backward()
            optimizer.step()
        session.barrier()
        return model.weight.detach().clone()


def last_seen(folder: Path) -> dict[str, Any]:
    """What the site's shard has told last of its link."""
    lines = (folder / "site-paris" / "journal.jsonl").read_text().splitlines()
    seen: list[dict[str, Any]] = [each for each in map(json.loads, lines) if each["event"] == "linkseen"]
    return seen[-1]


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_of_a_site_s_gradients_nothing_is_lost_only_late(
    pool: WorkerPool, through_proxy: Callable[[float], list[Proxy]], tmp_path: Path, consistency: str
) -> None:
    """What is not in the parameters yet was lost in the latest contributions, one after another."""
    proxies = through_proxy(0.05)
    with ServedRun(1, sites={"paris": 1}, site_link=LTP, folder=tmp_path) as run:
        (weight,) = pool.run(trains, run.address, consistency, "paris", world=1)
    assert not run.failures
    assert proxies
    held = sum(gradient(0, step) for step in range(STEPS)) + weight
    late, owed = torch.zeros(SIZE), held.clone()
    for step in reversed(range(STEPS)):
        late += gradient(0, step)
        owed[held == late] = 0
    assert not owed.any()
    seen = last_seen(tmp_path)
    assert (seen["who"], seen["peer"]) == ("site paris", "shard 0")
    assert seen["borne"] + seen["filled"] > 0
    assert seen["lost"] > 0
    assert seen["held"] == pytest.approx(float(held.sum() / gradient(0, STEPS - 1).sum()), rel=0.1)
