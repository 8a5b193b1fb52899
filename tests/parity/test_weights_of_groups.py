"""How much groups count in their mean (ps-hra): by their samples where these are certain in all groups, else
by their numbers of workers. A group that is certain of its own samples keeps its own mean by them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.core.config import Config, Groups, Run, Sync
from atoll.groups.chooser import Score
from atoll.groups.grouping import Grouping
from atoll.hub.planner import GroupingSettings
from atoll.train.api.place import Place
from support.parity import ALONE, await_groups
from support.pool import WorkerPool
from support.served import ServedRun, served_worker

SIZES, LENGTH = (1, 3, 5), 6


class Parts(nn.Module):
    """One number for each worker, of which its output is."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Parameter(torch.zeros(3, dtype=torch.double))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        """(N, LENGTH, 2) or (LENGTH, N, 2), in which N is not the first dimension, to (N, 4)."""
        return self.parts[rank].expand(SIZES[rank], 4) + 0 * x.sum()


def train(place: Place, guesses: list[int], address: str) -> tuple[list[float], bool]:
    """What each worker's gradient has counted for in the latest step, and whether anybody was told of
    counts. Workers of `guesses` have sequences first."""
    config = Config(
        run=Run(strategy="ps-hra"),
        sync=Sync(timeout="60s", consistency="bsp"),
        groups=Groups(probe=ALONE - 1),
    )
    with served_worker(address, place.rank), atoll.join(config) as session:
        lines: list[str] = []
        session._records.warn = lines.append  # type: ignore[method-assign]
        model = Parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        size = SIZES[place.rank]
        shape = (LENGTH, size, 2) if place.rank in guesses else (size, LENGTH, 2)
        for step in range(ALONE + 3):
            await_groups(session, step)
            before = model.parts.detach().clone()
            model(torch.zeros(shape, dtype=torch.double), place.rank).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (before - model.parts.detach()).tolist(), any("count alike" in line for line in lines)


@pytest.mark.parametrize(
    ("guesses", "shares"),
    [
        ([], [1 / 9, 3 / 9, 5 / 9]),
        ([0], [1 / 3, 1 / 3, 1 / 3]),
        ([2], [2 / 3 * 1 / 4, 2 / 3 * 3 / 4, 1 / 3]),
    ],
    ids=["certain", "in the group of two", "the one beside it"],
)
def test_groups_weigh_by_samples_where_they_are_certain(
    guesses: list[int], shares: list[float], pool: WorkerPool
) -> None:
    wanted = Grouping([[0, 1], [2]])
    settings = GroupingSettings(
        2,
        by="joint",
        consistency="bsp",
        regroup=False,
        score_for=lambda _known: lambda grouping: Score(2.0 if grouping == wanted else 1.0),
    )
    with ServedRun(workers=3, shards=2, grouping=settings) as served:
        found = pool.run(train, guesses, served.address, world=3)
    for seen, _ in found:
        assert seen == pytest.approx(shares, abs=1e-9)
    assert any(told for _, told in found) == bool(guesses)
