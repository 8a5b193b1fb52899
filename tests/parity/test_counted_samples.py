"""What workers report of the samples of all: under every strategy, the sum of what each has trained on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

import atoll
from atoll.core.events import AnyEvent, Counted, StepDone
from atoll.observe.journal import JournalReader
from atoll.observe.rundir import RunDirectory
from atoll.observe.samples import SampleRecords
from support.pool import WorkerPool
from support.runs import EVERYWHERE, KINDS, PACES, SHARDS, TOGETHER, model, run_with

WORLD, STEPS = 2, 12


def train(session: atoll.Session) -> None:
    """Batches of 3 samples and more, another number in each step and on each worker."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    session.prepare(net, optimizer)
    for step in range(STEPS):
        samples = 3 + (step + 2 * session.rank) % 4
        session.weight(samples)
        net(torch.ones(samples, 32, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def counted(events: list[AnyEvent]) -> float:
    """The samples that these events say to count."""
    records = SampleRecords()
    for event in events:
        records.take(event)
    return sum(end - begin for each in records._counted.values() for begin, end in each)


@pytest.mark.parametrize("kind", [*EVERYWHERE, "elastic", "server tiers"])
def test_workers_report_the_samples_of_all(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    config = {**KINDS, **PACES}[kind]
    run = RunDirectory(tmp_path / "run")
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, directory=str(run.path)))
    run_with(pool, config, train, world=WORLD, shards=SHARDS.get(kind))
    events = [list(JournalReader(run.journal(worker)).read()) for worker in range(WORLD)]
    every = [event for each in events for event in each]
    made = sum(event.samples for event in every if isinstance(event, StepDone))
    assert made == sum(3 + (step + 2 * rank) % 4 for step in range(STEPS) for rank in range(WORLD))
    assert counted(every) == made
    for each in events:
        assert any(event.whole for event in each if isinstance(event, Counted))
        assert [event.ends for event in each if isinstance(event, Counted)][-1]
        if kind in TOGETHER:  # any one of them knows of all
            assert counted(each) == made
