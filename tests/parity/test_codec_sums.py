"""What shards have applied is the sum of the gradients, less what the codec's error feedback holds back:
exact, in whole numbers, whoever speaks to the shards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.core.config import Chunks, Config, LinkOptions, Run, Sync
from atoll.groups.chooser import Score
from atoll.groups.grouping import Grouping
from atoll.hub.planner import GroupingSettings
from atoll.train.api.place import Place
from support.pool import WorkerPool
from support.runs import run_with
from support.served import ServedRun, served_worker

pytestmark = pytest.mark.check  # sessions of two workers

STEPS, SIZES, HIGH = 8, (300, 7, 1000), 2**14


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    """Even numbers of fifteen bits: a bfloat16 has eight, and a mean of two is a whole number."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [2.0 * torch.randint(-HIGH // 2, HIGH // 2, (size,), generator=generator) for size in SIZES]


class Weights(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in SIZES)

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        return sum(((w * g).sum() for w, g in zip(self.weights, given, strict=True)), torch.zeros(()))


def held_of(session: atoll.Session) -> list[torch.Tensor]:
    """What this worker holds back, by parameter."""
    reducer: Any = session._state.prepared[0].reducer
    found = [torch.zeros(size) for size in SIZES]
    for chunk, (values, _) in reducer.feedback.state().items():
        laid = next(bound.chunk for bound in reducer._chunks if bound.chunk.id == chunk)
        for slot in laid.slots:
            found[slot.parameter].copy_(values[slot.offset : slot.offset + slot.numel])
    return found


def train(session: atoll.Session, grouped: bool, constant: bool = False) -> tuple[list[torch.Tensor], ...]:
    """The values after some steps of SGD with rate 1, and what is held back here."""
    module = Weights()
    module, optimizer = session.prepare(module, torch.optim.SGD(module.parameters(), lr=1.0))
    if grouped:
        reducer: Any = session._state.prepared[0].reducer
        assert session._runtime.regrouping is not None
        # Workers begin alone. As long as the log knows them so, a group's contribution is a part of a step.
        while session.group.size < 2 or reducer.contributors != [session._runtime.regrouping.contributor]:
            (0 * module(gradients(0, 0))).backward()
            optimizer.step()
            optimizer.zero_grad()
    for step in range(STEPS):
        module(gradients(session.rank, 0 if constant else step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    session.barrier()
    values = [weight.detach().clone() for weight in module.weights]
    return values, held_of(session)


def config_of(strategy: Any, consistency: Any, codec: str, transport: Any = "tcp") -> Config:
    return Config(
        run=Run(strategy=strategy),
        sync=Sync(timeout="60s", consistency=consistency, codec=codec),
        chunks=Chunks(size="2KiB"),
        link=LinkOptions(transport=transport),
    )


@pytest.mark.parametrize(
    ("strategy", "consistency", "codec", "transport"),
    [
        ("server", "bsp", "bfloat16", "tcp"),
        ("server", "asp", "bfloat16", "ltp"),
        ("ps-hra", "bsp", "bfloat16", "ltp"),
        ("ps-hra", "asp", "bfloat16", "tcp"),
    ],
)
def test_the_sum_of_what_is_applied_is_that_of_the_gradients_less_what_is_held(
    pool: WorkerPool, strategy: str, consistency: str, codec: str, transport: str
) -> None:
    grouped, world = strategy == "ps-hra", 1 if (strategy, consistency) == ("server", "asp") else 2
    grouping = GroupingSettings(
        1,
        by="joint",
        consistency=consistency,
        regroup=False,
        score_for=lambda _known: lambda found: Score(2.0 if found == Grouping([[0, 1]]) else 1.0),
    )
    config = config_of(strategy, consistency, codec, transport)
    grouping_of_run = grouping if grouped else None
    found = run_with(pool, config, train, grouped, world=world, shards=2, grouping=grouping_of_run)
    # Workers' residuals weigh as their gradients do, and a group's as the group's mean.
    share = 1.0 if grouped else 1.0 / world
    for place, values in enumerate(found[0][0]):
        assert all(torch.equal(values, other[0][place]) for other in found)
        given = sum(gradients(rank, step)[place].double() for rank in range(world) for step in range(STEPS))
        held = sum(each[1][place].double() for each in found)
        assert bool(torch.as_tensor(held).any()), "nothing was dropped"
        assert torch.equal(-values.double(), given / world - held * share)


def join(place: Place, address: str, config: Config) -> Any:
    site = ("paris", "berlin")[place.rank]
    with served_worker(address, place.rank, site=site), atoll.join(config) as session:
        return train(session, grouped=False, constant=True)


def test_sites_hold_back_too_and_all_of_it_comes_in_the_end(pool: WorkerPool) -> None:
    """Between a site and the others a gradient is coded once more. Without feedback each of eight steps would
    drop the same."""
    config = config_of("server", "bsp", "bfloat16")
    with ServedRun(2, shards=1, sites={"paris": 1, "berlin": 1}) as served:
        found = pool.run(join, served.address, config, world=2)
    assert not served.failures
    rounding = HIGH / 2**8  # at most, of one code
    for place, values in enumerate(found[0][0]):
        mean = sum(gradients(rank, 0)[place] for rank in range(2)) / 2
        missing = -values - STEPS * mean
        assert 0 < float(missing.abs().max()) <= 2 * rounding
