"""Records of any length: what is held of them is bounded, and a look at them costs what is new."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.events import Logged, StepDone, Warned, encode
from atoll.observe import metrics
from atoll.observe.curves import read_curves
from atoll.observe.journal import JournalReader
from atoll.observe.metrics import LATE_SECONDS, MOST_NUMBERS, MOST_PENDING, Line, Merger, read_lines
from atoll.observe.recorder import MOST_NAMES, Recorder
from atoll.observe.rundir import RunDirectory

MIB = 2**20


def step(worker: int, iteration: int, at: float) -> StepDone:
    return StepDone(
        time=at, worker=worker, iteration=iteration, samples=2, seconds=0.1, waiting=0.05, bytes_sent=10
    )


def logged(worker: int, iteration: int, at: float, **values: float | None) -> Logged:
    return Logged(time=at, worker=worker, iteration=iteration, weight=1.0, values=values)


def peak(act: Callable[[], object]) -> int:
    """The most bytes that `act` held at any time."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# -- the merger --------------------------------------------------------------------------------------------


class Plain:
    """The merger's rule, looked at for every iteration and every worker in each look."""

    def __init__(self, workers: int) -> None:
        self.workers, self.ended = set(range(workers)), dict[int, float]()
        self.latest: dict[int, StepDone] = {}
        self.before: dict[int, float] = {}
        self.ends: dict[int, dict[int, float]] = {}
        self.logged: dict[int, float] = {}

    def add(self, event: StepDone | Logged) -> list[int]:
        at, again = event.iteration, []
        if isinstance(event, Logged):
            self.ends.setdefault(at, {})
            self.logged[at] = max(self.logged.get(at, 0.0), event.time)
            return []
        if event.worker in self.ends.get(at, {}):
            again, _ = [at], self.ends.pop(at)
            self.logged.pop(at, None)
        self.ends.setdefault(at, {})[event.worker] = event.time
        if event.worker in self.latest:
            self.before[event.worker] = self.latest[event.worker].time
        self.latest[event.worker] = event
        if event.time > self.ended.get(event.worker, math.inf):
            del self.ended[event.worker]
        return again

    def look(self) -> list[int]:
        whole = [
            each for each in sorted(self.ends) if all(self.past(worker, each) for worker in self.workers)
        ]
        for each in whole:
            del self.ends[each]
            self.logged.pop(each, None)
        return whole

    def past(self, worker: int, iteration: int) -> bool:
        ends = self.ends[iteration]
        if worker in self.ended:
            return True
        if worker not in self.before or (worker not in ends and self.latest[worker].iteration <= iteration):
            return False
        time = max(ends.values(), default=self.logged.get(iteration, 0.0))
        return self.before[worker] >= ends.get(worker, time) + LATE_SECONDS


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "log", "end", "look", "look"]),
        st.integers(0, 2),
        st.integers(-2, 3),  # by how much its iteration goes on
        st.integers(0, 6),  # by how many tenths of a second the time does
    ),
    max_size=80,
)


@given(EVENTS)
def test_a_look_at_what_is_new_finds_what_a_look_at_everything_does(
    events: list[tuple[str, int, int, int]],
) -> None:
    merger, plain, now, at = Merger(3), Plain(3), 0.0, [0, 0, 0]
    for kind, worker, forward, tenths in events:
        now += tenths / 10
        if kind == "look":
            assert [line.iteration for line in merger.whole()] == plain.look()
        elif kind == "end":
            merger.end(worker, now)
            plain.ended[worker] = now
        else:
            at[worker] = max(0, at[worker] + forward)
            event = (
                step(worker, at[worker], now) if kind == "step" else logged(worker, at[worker], now, a=1.0)
            )
            assert [line.iteration for line in merger.add(event)] == plain.add(event)
    assert [line.iteration for line in merger.rest()] == sorted(plain.ends)
    assert list(merger.rest()) == []
    assert merger.newest() == {}


def follow(merger: Merger, iterations: int, keys: int) -> Iterator[Line]:
    """Worker 0 goes on, and worker 1 never comes."""
    names = [f"layer {key}: gradient norm" for key in range(keys)]
    for iteration in range(iterations):
        yield from merger.add(step(0, iteration, iteration * 0.1))
        yield from merger.add(logged(0, iteration, iteration * 0.1, **dict.fromkeys(names, float(iteration))))
        if iteration % 10 == 0:
            yield from merger.whole()


@pytest.mark.check
def test_a_worker_that_is_dead_for_good_holds_little() -> None:
    """Of 100 names, 10,000 iterations were held: 488 MB. Lines are written in order, each once."""
    merger = Merger(2)
    lines: list[int] = []
    most = peak(lambda: lines.extend(line.iteration for line in follow(merger, 1500, 100)))
    assert most < 50 * MIB
    assert len(lines) >= 1500 - MOST_NUMBERS / 101 - 20
    lines += [line.iteration for line in merger.rest()]
    assert lines == list(range(1500))


def test_iterations_without_values_are_bounded_too() -> None:
    merger = Merger(2)
    lines = sum(1 for _ in follow(merger, MOST_PENDING + 3000, 0))
    assert lines >= 2900


def test_a_look_costs_what_is_new() -> None:
    """With 10,000 iterations held, a look took 7 ms, and with 100 names in each a second."""
    merger = Merger(2)
    for _ in follow(merger, MOST_PENDING - 1, 5):
        raise AssertionError("nothing is whole")
    began = time.perf_counter()
    for look in range(1000):
        assert list(merger.whole()) == []
        assert merger.newest()["layer 0: gradient norm"] == MOST_PENDING - 2
        merger.add(logged(1, look, 1.0))  # news of one iteration
    assert time.perf_counter() - began < 1.0


def test_a_worker_that_was_started_again_counts_again() -> None:
    merger = Merger(2)
    for iteration in range(5):
        merger.add(step(0, iteration, float(iteration)))
    merger.end(1, 3.5)
    assert [line.iteration for line in merger.whole()] == [0, 1, 2]
    merger.add(step(1, 4, 4.0))  # it is back
    for iteration in range(5, 9):
        merger.add(step(0, iteration, float(iteration)))
    assert list(merger.whole()) == []


# -- metrics.jsonl and the picture -------------------------------------------------------------------------


def write_metrics(path: Path, lines: int, keys: int = 20) -> None:
    with path.open("wb") as file:
        for iteration in range(lines):
            values: dict[str, float | None] = {f"value {key}": float(iteration + key) for key in range(keys)}
            line = Line(iteration, float(iteration), 8, 0.1, 0.02, 100, values, {"ring": 0.01})
            file.write(msgspec.json.encode(line) + b"\n")


@pytest.mark.check
def test_the_memory_that_curves_take_does_not_grow_with_the_file(tmp_path: Path) -> None:
    write_metrics(tmp_path / "short", 4000, keys=8)
    write_metrics(tmp_path / "long", 12000, keys=8)
    short, long = (peak(lambda name=name: read_curves(tmp_path / name, 3)) for name in ("short", "long"))  # type: ignore[misc]
    assert long < 1.2 * short + 2**18
    assert long < 3 * MIB


def test_a_long_curve_keeps_its_peaks_its_mean_and_its_end(tmp_path: Path) -> None:
    with (tmp_path / "m").open("wb") as file:
        for iteration in range(10_000):
            value = {5000: 99.0, 5001: -99.0}.get(iteration, 1.0)
            line = Line(iteration, 0.0, 1, 0.1, 0.0, 0, {"a": value, "rare": None if iteration % 2 else 2.0})
            file.write(msgspec.json.encode(line) + b"\n")
    curves = read_curves(tmp_path / "m", 3)
    curve = curves.values["a"]
    assert len(curve.extremes) <= 4000
    assert (5000, 99.0) in curve.extremes
    assert (5001, -99.0) in curve.extremes
    assert curve.extremes == sorted(curve.extremes)
    assert curve.means[0] == 1.0
    assert curve.last == (9999, 1.0)
    assert len(curves.values["rare"].extremes) <= 4000
    assert len(curves.steps.bins) <= 120
    assert sum(part.count for part in curves.steps.bins) == 10_000
    assert sum(part.seconds for part in curves.steps.bins) == pytest.approx(1000.0)


def test_a_short_curve_has_every_value(tmp_path: Path) -> None:
    write_metrics(tmp_path / "m", 100, keys=2)
    curves = read_curves(tmp_path / "m", 3)
    assert curves.values["value 1"].extremes == [(each, float(each + 1)) for each in range(100)]
    assert [part.iteration for part in curves.steps.bins] == list(range(100))


def test_lines_without_end_and_of_nothing_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_LONGEST_LINE", 1000)
    monkeypatch.setattr(metrics, "_PIECE", 300)
    write_metrics(tmp_path / "m", 2, keys=1)
    with (tmp_path / "m").open("ab") as file:
        file.write(b"x" * 10_000 + b"\n\n\xff\n")
        file.write(msgspec.json.encode(Line(7, 0.0, 1, 0.1, 0.0, 0, {})) + b'\n{"iteration": 8')
    assert [line.iteration for line in read_lines(tmp_path / "m")] == [0, 1, 7]


# -- journals ----------------------------------------------------------------------------------------------


def write_journal(path: Path, steps: int) -> None:
    with path.open("wb") as file:
        for iteration in range(steps):
            file.write(encode(step(0, iteration, float(iteration))) + b"\n")


def test_the_memory_that_a_journal_takes_does_not_grow_with_the_file(tmp_path: Path) -> None:
    write_journal(tmp_path / "0.jsonl", 40_000)
    assert (tmp_path / "0.jsonl").stat().st_size > 4 * MIB
    count = [0]

    def read() -> None:
        count[0] = sum(1 for _ in JournalReader(tmp_path / "0.jsonl").read())

    assert peak(read) < 3 * MIB
    assert count == [40_000]


def test_a_journal_is_read_in_parts(tmp_path: Path) -> None:
    write_journal(tmp_path / "0.jsonl", 100)
    reader = JournalReader(tmp_path / "0.jsonl")
    found, reads = [], 0
    while part := list(reader.read(1000)):
        found += part
        reads += 1
    assert [event.iteration for event in found if isinstance(event, StepDone)] == list(range(100))
    assert reads > 5


def test_a_line_of_any_length_is_passed_over_and_the_next_is_read(tmp_path: Path) -> None:
    with (tmp_path / "0.jsonl").open("wb") as file:
        for _ in range(18):
            file.write(b"x" * MIB)
        file.write(b"\n" + encode(step(0, 7, 1.0)) + b"\n")
    reader = JournalReader(tmp_path / "0.jsonl")
    found: list[object] = []
    assert peak(lambda: found.extend(reader.read())) < 60 * MIB
    assert [event.iteration for event in found if isinstance(event, StepDone)] == [7]
    assert reader.unreadable == 1


def test_one_look_takes_a_part_and_the_last_one_all(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    write_journal(run.journal(0), 36_000)
    recorder = Recorder(run, 1, "ring")
    recorder.poll()
    assert 1000 < recorder.status().samples < 72_000
    assert recorder.close().samples == 72_000
    assert sum(1 for _ in read_lines(run.metrics)) == 36_000


def test_the_last_values_of_names_without_end_are_bounded(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    with run.journal(0).open("wb") as file:
        for iteration in range(MOST_NAMES + 100):
            file.write(encode(logged(0, iteration, 1.0, **{f"step {iteration}": 1.0})) + b"\n")
    recorder = Recorder(run, 1, "ring")
    summary = recorder.close()
    assert len(summary.last) == MOST_NAMES
    said = [event["message"] for event in summary.events if event["event"] == "warned"]
    assert said == [
        f"more than {MOST_NAMES} names were logged: the summary has the first ones' last values; "
        f"{run.metrics} has all"
    ]
    assert not [
        event for event in recorder.poll() if isinstance(event, Warned) and "missing" in event.message
    ]
