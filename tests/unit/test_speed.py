"""A worker slowed down: by the clock of a test, and in sessions that train."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import atoll
from atoll.core import events
from atoll.core.config import LAB_JOURNALS_VARIABLE, SPEED_VARIABLE
from atoll.core.errors import ConfigError
from atoll.observe.journal import JournalReader
from atoll.train.api.place import Place
from atoll.train.api.speed import Stretch, speed_from
from atoll.train.gradients.ring import RingBuckets
from support.pool import WorkerPool


class Clock:
    """Time that passes when the test says so, and in sleeps, which last `too_long` more."""

    def __init__(self, too_long: float = 0.0) -> None:
        self.now, self.computed = 100.0, 7.0
        self.slept: list[float] = []
        self.too_long = too_long

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.computed += seconds

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.too_long

    def stretch(self, speed: float) -> Stretch:
        return Stretch(speed, lambda: self.computed, clock=lambda: self.now, sleep=self.sleep)


def test_computing_is_stretched_and_waiting_is_not() -> None:
    clock = Clock()
    stretch = clock.stretch(0.25)
    stretch.begin()
    clock.work(1.0)
    stretch.settle()
    clock.wait(10.0)
    clock.work(0.5)
    clock.wait(10.0)
    stretch.settle()
    clock.wait(3.0)
    stretch.settle()
    assert clock.slept == pytest.approx([3.0, 1.5])
    assert clock.now == pytest.approx(100 + 4 * 1.5 + 23)


def test_nothing_is_measured_before_the_first_forward() -> None:
    clock = Clock()
    stretch = clock.stretch(0.5)
    stretch.settle()
    clock.work(60.0)
    stretch.settle()
    stretch.begin()
    clock.work(1.0)
    stretch.begin()  # each forward says so
    clock.work(1.0)
    stretch.settle()
    assert clock.slept == pytest.approx([2.0])


def test_pauses_are_no_computing() -> None:
    clock = Clock()
    stretch = clock.stretch(0.5)
    with stretch.paused():
        clock.work(10.0)
    stretch.settle()
    stretch.begin()
    clock.work(1.0)
    with stretch.paused():
        clock.work(10.0)
        stretch.settle()
    clock.work(2.0)
    stretch.settle()
    assert clock.slept == pytest.approx([1.0, 2.0])


def test_what_was_slept_too_long_is_made_good() -> None:
    """And what is too short for a sleep is added up: in the long run, the speed is right."""
    clock = Clock(too_long=0.0003)
    stretch = clock.stretch(0.8)
    stretch.begin()
    start = clock.now
    for _ in range(10_000):
        clock.work(0.0001)
        stretch.settle()
    assert clock.now - start == pytest.approx(1.0 / 0.8, rel=1e-3)
    assert len(clock.slept) < 1000


@pytest.mark.parametrize("given", ["0", "-1", "1.01", "2", "nan", "inf", "fast"])
def test_a_speed_that_is_none_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPEED_VARIABLE, given)
    with pytest.raises(ConfigError, match=f"ATOLL_SPEED={given}: not a speed; give a number above 0"):
        atoll.join()


def test_speeds() -> None:
    assert speed_from({}) == speed_from({SPEED_VARIABLE: ""}) == speed_from({SPEED_VARIABLE: "1.0"}) == 1
    assert speed_from({SPEED_VARIABLE: "0.25"}) == 0.25


class Works(nn.Module):
    """A model whose forward computes for a known time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.layer = seconds, nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        return self.layer(x)


def train(seconds: float, steps: int, micro: int = 1, place: Place | None = None) -> None:
    torch.manual_seed(0)
    model = Works(seconds)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.join(place=place) as session:
        session.prepare(model, optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            with session.no_sync():
                for _ in range(micro - 1):
                    model(torch.ones(2, 4)).sum().backward()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


def events_in(folder: Path) -> list[events.AnyEvent]:
    return [event for path in folder.glob("*.jsonl") for event in JournalReader(path).read()]


@pytest.mark.parametrize("micro", [1, 3])
def test_a_session_at_a_quarter_takes_four_times_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro: int
) -> None:
    """And tells the lab of it; micro-batches under no_sync count too."""
    monkeypatch.setenv(SPEED_VARIABLE, "0.25")
    monkeypatch.setenv(LAB_JOURNALS_VARIABLE, str(tmp_path))
    train(0.01, 4, micro)
    said = events_in(tmp_path)
    steps = [event.seconds for event in said if isinstance(event, events.StepDone)]
    assert len(steps) == 4
    assert sum(steps) >= 4 * 0.04 * micro * 0.99  # one that slept too long is made up for by the next
    (decided,) = [event for event in said if isinstance(event, events.Decided) and event.what == "speed"]
    assert decided.choice == "0.25 of this device's"
    assert "ATOLL_SPEED" in decided.reason


def slow_job(place: Place, folder: str) -> tuple[list[str], float]:
    """In which order gradients were held back and left, and how long the worker waited in one iteration at
    most; worker 1 computes for 10 ms at a tenth of its speed."""
    if place.rank == 1:
        os.environ[SPEED_VARIABLE] = "0.1"
    os.environ[LAB_JOURNALS_VARIABLE] = f"{folder}/{place.rank}"
    order: list[str] = []
    settle, send = Stretch.settle, RingBuckets._send
    Stretch.settle = lambda self: (order.append("settle"), settle(self))[1]  # type: ignore[method-assign]
    RingBuckets._send = lambda self, *a: (order.append("send"), send(self, *a))[1]  # type: ignore[method-assign]
    try:
        train(0.01 if place.rank == 1 else 0.0, 4, place=place)
    finally:
        Stretch.settle, RingBuckets._send = settle, send  # type: ignore[method-assign]
        os.environ.pop(SPEED_VARIABLE, None)
        del os.environ[LAB_JOURNALS_VARIABLE]
    steps = [
        event for event in events_in(Path(folder, str(place.rank))) if isinstance(event, events.StepDone)
    ]
    return order, max(step.waiting for step in steps)


@pytest.mark.check
def test_gradients_of_a_slow_worker_leave_late(pool: WorkerPool, tmp_path: Path) -> None:
    (fast, waited), (slow, _) = pool.run(slow_job, str(tmp_path), world=2)
    assert "settle" not in fast
    assert slow.count("send") == 4
    for place, what in enumerate(slow):
        if what == "send":
            assert slow[place - 1] == "settle"
    assert waited >= 0.09, "the other one waits for its gradients, not only for its step"


def meeting_job(place: Place, folder: str) -> tuple[float, float]:
    """Seconds that a meeting of the script's own took worker 0, and the waiting of that iteration as it is
    told; worker 1 comes half a second after it."""
    os.environ[LAB_JOURNALS_VARIABLE] = f"{folder}/{place.rank}"
    there = Path(folder, "there")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with atoll.join(place=place) as session:
            session.prepare(model, optimizer)
            if place.rank == 0:
                there.touch()
            else:
                until = time.monotonic() + 60
                while not there.exists():
                    assert time.monotonic() < until, "waited 60 s for worker 0 to come to the meeting"
                    time.sleep(0.01)
                time.sleep(0.5)
            start = time.perf_counter()
            session.reduce(1.0)
            took = time.perf_counter() - start
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            session.log(loss=2.0)
    finally:
        del os.environ[LAB_JOURNALS_VARIABLE]
    told = events_in(Path(folder, str(place.rank)))
    assert [event.values for event in told if isinstance(event, events.Logged)] == [{"loss": 2.0}]
    (step,) = [event for event in told if isinstance(event, events.StepDone)]
    return took, step.waiting


@pytest.mark.check
def test_waiting_in_the_scripts_own_meetings_is_told(pool: WorkerPool, tmp_path: Path) -> None:
    (took, waiting), _ = pool.run(meeting_job, str(tmp_path), world=2)
    assert took >= 0.5
    assert waiting >= 0.5 * took
