"""What workers report of the samples of all: under every strategy, the sum of what each has trained on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

import atoll
from atoll.core.events import AnyEvent, SamplesCounted, StepDone
from atoll.observe.journal import JournalReader
from atoll.observe.rundir import RunDirectory
from support.pool import WorkerPool
from support.runs import EVERYWHERE, KINDS, PACES, SHARDS, TOGETHER, model, run_with

pytestmark = pytest.mark.sampled

WORLD, STEPS, SKIPPED = 2, 12, 5
# These refuse several optimizers.
OF_ONE_OPTIMIZER = ("peers", "peers stale", "ps-hra asp")
EACH = (*EVERYWHERE, "elastic", "server tiers")


def samples_at(step: int, rank: int) -> int:
    """3 samples and more, another number in each step and on each worker."""
    return 3 + (step + 2 * rank) % 4


def train(session: atoll.Session, optimizers: int, skipped: int | None) -> None:
    """Train with so many optimizers, which step parts of the model, on batches of which one has a NaN."""
    net = model()
    parameters = list(net.parameters())
    steps = [torch.optim.SGD(parameters[place::optimizers], lr=0.01) for place in range(optimizers)]
    session.prepare(net, steps if optimizers > 1 else steps[0])
    for step in range(STEPS):
        samples = samples_at(step, session.rank)
        session.weight(samples)
        batch = torch.full((samples, 32), torch.nan if step == skipped else 1.0, dtype=torch.float64)
        net(batch).square().mean().backward()
        for optimizer in steps:
            optimizer.step()
        for optimizer in steps:
            optimizer.zero_grad()


def counted(events: list[AnyEvent]) -> float:
    """Return the samples that these events say to count."""
    ends = [(event.begin, event.end) for event in events if isinstance(event, SamplesCounted)]
    joined, reached = 0.0, 0.0
    for begin, end in sorted(ends):
        joined += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return joined


@pytest.mark.parametrize(
    ("kind", "optimizers", "skipped"),
    [
        *((kind, 1, None) for kind in EACH),
        *((kind, 2, None) for kind in EACH if kind not in OF_ONE_OPTIMIZER),
        *((kind, 1, SKIPPED) for kind in EACH),
    ],
)
def test_workers_report_the_samples_of_all(
    pool: WorkerPool, tmp_path: Path, kind: str, optimizers: int, skipped: int | None
) -> None:
    config = {**KINDS, **PACES}[kind]
    run = RunDirectory(tmp_path / "run")
    config = msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, directory=str(run.path)),
        sync=msgspec.structs.replace(config.sync, nonfinite="skip"),
    )
    run_with(pool, config, train, optimizers, skipped, world=WORLD, shards=SHARDS.get(kind))
    events = [list(JournalReader(run.journal(worker)).read()) for worker in range(WORLD)]
    every = [event for each in events for event in each]
    made = sum(event.samples for event in every if isinstance(event, StepDone))
    assert made == sum(samples_at(step, rank) for step in range(STEPS) for rank in range(WORLD))
    assert counted(every) == made
    for each in events:
        assert any(event.whole_at for event in each if isinstance(event, SamplesCounted))
        assert [event.ends for event in each if isinstance(event, SamplesCounted)][-1]
        if kind in TOGETHER:  # any one of them knows of all
            assert counted(each) == made
