"""What an iteration takes: what is counted in it, and what belongs to the one before or after."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atoll.train.api import meter
from atoll.train.api.meter import Meter


class Counted:
    """A worker's clock, waits and reducers, as the meter reads them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, served: bool = False) -> None:
        self.now = 100.0
        self.workers, self.shards, self.hub, self.tiers = (
            SimpleNamespace(seconds_waited=0.0) for _ in range(4)
        )
        self.reducers = [SimpleNamespace(bytes_sent=0) for _ in range(2)]
        state: Any = SimpleNamespace(
            tiers=[self.tiers], prepared=[SimpleNamespace(reducer=reducer) for reducer in self.reducers]
        )
        service: Any = SimpleNamespace(shards=self.shards, hub=self.hub) if served else None
        workers: Any = self.workers
        monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.meter = Meter(torch.device("cpu"), workers, state, service)

    def work(self, seconds: float, waiting: float, sent: int) -> None:
        self.now += seconds
        self.tiers.seconds_waited += waiting / 2
        for source in (self.workers, self.shards):  # either of them counts
            source.seconds_waited += waiting / 2
        for reducer in self.reducers:
            reducer.bytes_sent += sent // 2


@pytest.mark.parametrize("served", [False, True])
def test_each_iteration_has_what_came_since_the_one_before(
    monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    counted = Counted(monkeypatch, served=served)
    counted.work(2.0, 0.5, 10)
    first = counted.meter.stepped()
    counted.work(1.0, 0.25, 30)
    second = counted.meter.stepped()
    assert [(each.seconds, each.waiting, each.bytes_sent) for each in (first, second)] == [
        (2.0, 0.5, 10),
        (1.0, 0.25, 30),
    ]
    assert [first.computing, second.computing] == [1.5, 0.75]
    assert second.at == counted.now
    assert first.phases == {}


def test_what_came_before_the_first_iteration_begins_is_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    counted.work(9.0, 8.0, 70)  # joining, and bringing the parameters
    counted.meter.begin()
    counted.work(1.0, 0.25, 30)
    taken = counted.meter.stepped()
    assert (taken.seconds, taken.waiting, taken.bytes_sent) == (1.0, 0.25, 30)
    assert counted.meter.seconds_waited == 8.25
