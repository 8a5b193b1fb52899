"""What the records of a run say about its groups: who, when, why, how stale, and where the time went."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.events import AnyEvent, Decided, Finished, Logged, Regrouped, Started, StepDone
from atoll.launch.run import closing_lines
from atoll.observe.groups import GroupRecords, _staleness, group_lines
from atoll.observe.journal import Journal
from atoll.observe.metrics import read_lines
from atoll.observe.recorder import Recorder
from atoll.observe.report import draw
from atoll.observe.rundir import RunDirectory
from atoll.observe.summary import GroupTotals, Summary, read_summary

PHASES = {"ring": 0.125, "exchange": 0.0625}  # of each step's waiting of a quarter of a second


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def step(worker: int, iteration: int, time: float, phases: dict[str, float] = PHASES) -> StepDone:
    return StepDone(
        time=time, worker=worker, iteration=iteration, samples=4, seconds=1.0, waiting=0.25, bytes_sent=9,
        phases=phases,
    )  # fmt: skip


def stale(worker: int, iteration: int, time: float, value: float | None) -> Logged:
    return Logged(time=time, worker=worker, iteration=iteration, weight=1.0, values={"staleness": value})


def moved(
    worker: int, time: float, iteration: int, grouping: int, group: int, workers: list[int], reason: str = ""
) -> Regrouped:
    return Regrouped(
        time=time, worker=worker, iteration=iteration, grouping=grouping, group=group, workers=workers,
        reason=reason,
    )  # fmt: skip


def started(worker: int, time: float = 0.0) -> Started:
    return Started(time=time, worker=worker, workers=3, strategy="ps-hra", device="cpu", pid=1)


def uneven_run() -> list[AnyEvent]:
    """Three workers: alone for two steps, then 0 and 2 together, and from 20 s on 1 and 2.

    As sessions do it, a move is told before the step at whose end it happens, and a staleness long after.
    """
    events: list[AnyEvent] = [started(worker) for worker in range(3)]
    for worker in range(3):
        events += [step(worker, 1, 1.0), step(worker, 2, 2.0)]
    events += [moved(worker, 1.75, 2, 1, 3, [2, 0]) for worker in (0, 2)]
    for worker in range(3):
        events += [stale(worker, 1, 2.5, 1.0), stale(worker, 2, 2.5, 2.0)]
        events += [step(worker, iteration, float(iteration)) for iteration in range(3, 21)]
    events += [moved(worker, 19.75, 20, 2, 4, [1, 2], "worker 2 is slower") for worker in (1, 2)]
    for worker in range(3):
        events += [stale(worker, iteration, 21.5, 0.5) for iteration in range(3, 21)]
        events += [step(worker, iteration, float(iteration)) for iteration in range(21, 31)]
        events.append(Finished(time=30.5, worker=worker, iteration=30))
    return events


def recorded(
    run: RunDirectory, events: list[AnyEvent], workers: int = 3, decided: Sequence[AnyEvent] = ()
) -> Summary:
    for worker in {event.worker for event in events}:
        with Journal(run.journal(worker)) as journal:
            for event in events:
                if event.worker == worker:
                    journal(event)
    recorder = Recorder(run, workers, "ps-hra")
    for event in decided:
        recorder.note(event)
    return recorder.close()


def totals_of(summary: Summary, *workers: int) -> GroupTotals:
    (found,) = [group for group in summary.each_group if group.workers == list(workers)]
    return found


def decision(time: float, choice: str, reason: str) -> Decided:
    return Decided(time=time, worker=-1, what="groups", choice=choice, reason=reason)


def test_who_was_with_whom_when_and_why(run: RunDirectory) -> None:
    decided = [
        decision(1.25, "none yet", "nobody has reported"),
        decision(1.5, "workers 0 2", "the two fastest"),
        decision(1.75, "without worker 7", "it gave no report"),
        decision(25.0, "workers 0 1 2", "too late for both"),
    ]
    summary = recorded(run, uneven_run(), decided=decided)
    shown = [(each.grouping, each.since, each.groups) for each in summary.groupings]
    assert shown == [
        (0, 0.0, [[0], [1], [2]]),
        (1, 1.75, [[0, 2], [1]]),
        (2, 19.75, [[0], [1, 2]]),
    ]
    assert [each.reason for each in summary.groupings[1:]] == ["the two fastest", "worker 2 is slower"]
    assert [event["what"] for event in summary.events if event["event"] == "decided"] == ["groups"] * 4
    assert read_summary(run.summary) == summary


def test_steps_and_their_staleness_belong_to_the_group_that_made_them(run: RunDirectory) -> None:
    summary = recorded(run, uneven_run())
    assert sum(group.samples for group in summary.each_group) == summary.samples
    together = totals_of(summary, 0, 2)
    assert (together.group, together.steps, together.since, together.until) == (3, 28, 2.0, 30.0)
    assert together.seconds == 28 + 18  # 0 stays in it to the end, 2 moves on after iteration 20
    assert (together.ring, together.exchange, together.other) == (5.75, 2.875, 2.875)
    assert together.computing == 0.75 * 46
    assert together.staleness is not None
    assert (together.staleness.median, together.staleness.most) == (0.5, 0.5)
    alone = totals_of(summary, 2)
    assert (alone.steps, alone.staleness and alone.staleness.most) == (2, 2.0)
    assert (alone.ring, alone.exchange, alone.other) == (0.0, 0.125, 0.375)  # it has no ring
    assert totals_of(summary, 1, 2).staleness is None


def test_the_metrics_have_the_phases(run: RunDirectory) -> None:
    recorded(run, uneven_run())
    assert {tuple(line.phases.items()) for line in read_lines(run.metrics)} == {tuple(PHASES.items())}


def test_a_worker_that_was_gone_is_in_no_group() -> None:
    records = GroupRecords()
    for event in uneven_run():
        if event.worker != 0 or event.time < 15:  # it was killed
            records.take(event)
    groupings, _ = records.shown(0.0)
    assert [each.groups for each in groupings] == [[[0], [1], [2]], [[0, 2], [1]], [[1, 2]]]


def test_iterations_made_again_after_a_checkpoint_belong_to_where_they_are_made() -> None:
    records = GroupRecords()
    events = [moved(0, 1.0, 10, 1, 3, [0, 1]), step(0, 11, 2.0), moved(0, 3.0, 5, 2, 4, [0, 2])]
    for event in [*events, step(0, 11, 4.0), step(0, 6, 5.0)]:
        records.take(event)
    _, totals = records.shown(0.0)
    assert [(group.group, group.steps) for group in totals] == [(3, 1), (4, 2)]


def test_a_worker_that_starts_again_is_alone() -> None:
    records = GroupRecords()
    for event in [moved(0, 1.0, 10, 1, 3, [0, 1]), step(0, 11, 2.0), started(0, 3.0), step(0, 12, 4.0)]:
        records.take(event)
    _, totals = records.shown(0.0)
    assert [(group.workers, group.steps) for group in totals] == [([0, 1], 1), ([0], 1)]


def test_closing_lines(run: RunDirectory) -> None:
    summary = recorded(run, uneven_run())
    assert closing_lines(summary, run, drawn=True)[2:-1] == [
        "atoll: groups: 0 | 1 2 since 19.8 s, the last of 2 changes: worker 2 is slower",
        "atoll: group 0 2, 2.0 s to 30.0 s: 28 steps of 184 samples · "
        "staleness 0.5, 95% at most 0.5, most 0.5 · computing 75%, ring 12%, exchange 6%, other 6%",
        "atoll: group 1 2, 20.0 s to 30.0 s: 10 steps of 80 samples · "
        "computing 75%, ring 12%, exchange 6%, other 6%",
        "atoll: groups: 3 more, in 27% of the time: see summary.json",
    ]


def test_many_groups_get_few_lines(run: RunDirectory) -> None:
    events: list[AnyEvent] = [moved(0, 0.0, 0, 1, 9, [0, 9])]
    for worker in range(1, 9):
        events += [step(worker, iteration, float(iteration)) for iteration in range(1, worker + 1)]
    lines = closing_lines(recorded(run, events, workers=9), run, drawn=True)
    assert [line.split(",")[0] for line in lines[-6:-1]] == [
        *(f"atoll: {worker} alone" for worker in range(5, 9)),
        "atoll: groups: 4 more",
    ]


def test_the_picture_has_the_groups(run: RunDirectory) -> None:
    recorded(run, uneven_run())
    with_groups = draw(run).stat().st_size
    summary = json.loads(run.summary.read_text())
    run.summary.write_text(json.dumps({**summary, "groupings": [], "each_group": []}))
    assert draw(run).stat().st_size < with_groups


def test_a_run_without_groups_says_nothing_of_them(run: RunDirectory) -> None:
    events = [event for event in uneven_run() if not isinstance(event, Regrouped)]
    plain = [step(e.worker, e.iteration, e.time, {}) if isinstance(e, StepDone) else e for e in events]
    lines = closing_lines(recorded(run, plain), run, drawn=True)
    assert len(lines) == 3
    assert {"groupings", "each_group"}.isdisjoint(json.loads(run.summary.read_text()))
    assert "phases" not in run.metrics.read_text()


@given(st.lists(st.integers(0, 50), min_size=1))
def test_the_quantiles_are_those_of_all_values(values: list[int]) -> None:
    found = _staleness(Counter(float(value) for value in values))
    assert found is not None
    ordered = sorted(values)
    assert found.median == ordered[-(-len(values) // 2) - 1]
    assert found.p95 == ordered[-(-95 * len(values) // 100) - 1]
    assert (found.most, found.contributions) == (ordered[-1], len(values))


def test_each_decision_that_made_a_group_that_is_left_gives_its_reason(run: RunDirectory) -> None:
    made = [([0, 1], "fast"), ([2, 3], "slow"), ([4, 5], "slowest"), ([2, 3, 4], "drift")]
    events: list[AnyEvent] = [step(worker, 1, 1.0) for worker in range(6)]
    for number, (workers, reason) in enumerate(made, 1):
        for worker in workers:
            events.append(moved(worker, float(number), number, number, 5 + number, workers, reason))
            events.append(step(worker, number + 1, number + 0.5))
    events += [step(worker, 9, 9.0) for worker in range(6)]
    (line, *_) = group_lines(recorded(run, events, workers=6))
    assert line == "groups: 0 1 | 2 3 4 | 5 since 3.0 s, the last of 4 changes: fast; drift"
