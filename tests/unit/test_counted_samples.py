"""The samples in a run's summary: those of iterations that count, each once, also of a worker that was killed
before it had reported its last steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.events import AnyEvent, Finished, Gone, SamplesCounted, Started, StepDone, encode
from atoll.launch.run import closing_lines
from atoll.observe.recorder import Recorder
from atoll.observe.rundir import RunDirectory
from atoll.observe.summary import Summary

KILLED = -9


class Journals:
    """The journals of a run, as a test writes them."""

    def __init__(self, path: Path, workers: int) -> None:
        self.run = RunDirectory(path / "run")
        self.run.create()
        self._workers = workers
        for worker in range(workers):
            self.begin(worker)

    def write(self, event: AnyEvent) -> None:
        with self.run.journal(event.worker).open("ab") as file:
            file.write(encode(event) + b"\n")

    def begin(self, worker: int, at: float = 0.0) -> None:
        self.write(
            Started(time=at, worker=worker, workers=self._workers, strategy="server", device="cpu", pid=1)
        )

    def step(self, worker: int, iteration: int, samples: float = 8.0) -> None:
        self.write(
            StepDone(
                time=float(iteration),
                worker=worker,
                iteration=iteration,
                samples=samples,
                seconds=1.0,
                waiting=0.0,
                bytes_sent=0,
            )
        )

    def count(
        self,
        worker: int,
        at: float,
        begin: float,
        end: float,
        *,
        loaded: float = 0.0,
        whole_at: float = 0.0,
        partial: bool = False,
        ends: bool = False,
    ) -> None:
        self.write(
            SamplesCounted(
                time=at,
                worker=worker,
                loaded=loaded,
                begin=begin,
                end=end,
                whole_at=whole_at,
                partial=partial,
                ends=ends,
            )
        )

    def finish(self, worker: int, at: float, begin: float, end: float, loaded: float = 0.0) -> None:
        self.write(Finished(time=at, worker=worker, iteration=int(at)))
        self.count(worker, at, begin, end, loaded=loaded, whole_at=at)
        self.count(worker, at, end, end, loaded=loaded, ends=True)

    def kill(self, worker: int, at: float) -> None:
        self.write(Gone(time=at, worker=worker, exit_code=KILLED))

    def summary(self) -> Summary:
        return Recorder(self.run, self._workers, "server").close()


@pytest.fixture
def three(tmp_path: Path) -> Journals:
    """The journals of a run of three workers."""
    return Journals(tmp_path, 3)


def line_of(three: Journals, summary: Summary) -> str:
    return closing_lines(summary, three.run, drawn=False)[0]


def test_the_last_steps_of_a_killed_worker_count(three: Journals) -> None:
    """Worker 1 made steps 3 and 4 after its last report."""
    for iteration in range(1, 7):
        for worker in (0, 1, 2):
            if worker != 1 or iteration <= 2:
                three.step(worker, iteration)
    three.kill(1, at=4.5)
    for worker in (0, 2):
        three.count(worker, 3.0, 0.0, 72.0)
        three.finish(worker, 7.0, 72.0, 4 * 24.0 + 2 * 16.0)
    summary = three.summary()
    assert (summary.steps, summary.samples, summary.samples_exact) == (6, 128.0, True)
    assert [each.samples for each in summary.each_worker] == [48.0, 16.0, 48.0]
    assert " 6 steps of 128 samples in " in line_of(three, summary)


def test_a_killed_worker_s_steps_that_do_not_count_are_left_out(three: Journals) -> None:
    """With an exchange in flight a step may be reported, and its contribution may be lost."""
    for worker in (0, 1, 2):
        three.step(worker, 1)
        three.step(worker, 2)
    three.kill(1, at=2.5)
    for worker in (0, 2):
        three.finish(worker, 3.0, 0.0, 40.0)
    assert (three.summary().samples, three.summary().samples_exact) == (40.0, True)


def test_a_count_that_came_before_the_worker_was_killed_is_a_lower_bound(three: Journals) -> None:
    """Nobody knows how much worker 1 made when the others had finished."""
    for worker in (0, 2):
        three.step(worker, 1)
        three.finish(worker, 2.0, 0.0, 24.0)
    three.step(1, 1)
    three.step(1, 2)
    three.count(1, 2.5, 0.0, 32.0)
    three.kill(1, at=3.0)
    summary = three.summary()
    assert (summary.samples, summary.samples_exact) == (32.0, False)
    assert " 2 steps of at least 32 samples in " in line_of(three, summary)


def test_without_a_count_a_killed_worker_s_samples_are_a_lower_bound(three: Journals) -> None:
    for worker in (0, 1, 2):
        three.step(worker, 1)
    three.kill(1, at=1.5)
    for worker in (0, 2):
        three.write(Finished(time=2.0, worker=worker, iteration=1))
        three.count(worker, 2.0, 0.0, 0.0, ends=True)
    summary = three.summary()
    assert (summary.samples, summary.samples_exact) == (24.0, False)


def test_reports_are_exact_where_all_workers_have_ended_by_themselves(three: Journals) -> None:
    """Also after an error, when the journals are written to their end."""
    for worker in (0, 1, 2):
        three.step(worker, 1)
        three.count(worker, 2.0, 0.0, 24.0, ends=True)
    three.write(Gone(time=2.5, worker=1, exit_code=1))
    summary = three.summary()
    assert (summary.samples, summary.samples_exact) == (24.0, True)


def test_a_worker_that_never_ended_leaves_a_lower_bound(three: Journals) -> None:
    """`atoll report` on the journals of a run that was killed as a whole."""
    for worker in (0, 1, 2):
        three.step(worker, 1)
    three.count(0, 1.5, 0.0, 24.0)
    three.count(0, 2.0, 24.0, 40.0)
    summary = three.summary()
    assert (summary.samples, summary.samples_exact) == (40.0, False)


def test_a_worker_that_enters_reports_from_where_it_entered(three: Journals) -> None:
    """It was killed and started again, and all who trained before are gone at the end."""
    three.kill(1, at=2.0)
    three.count(0, 3.0, 0.0, 48.0)
    three.begin(1, at=4.0)
    three.count(1, 5.0, 40.0, 60.0)
    three.kill(0, at=6.0)
    three.kill(2, at=6.0)
    three.finish(1, 8.0, 60.0, 80.0)
    summary = three.summary()
    assert (summary.samples, summary.samples_exact) == (80.0, True)


def test_iterations_made_again_after_a_load_count_again(three: Journals) -> None:
    for worker in (0, 1, 2):
        three.count(worker, 4.0, 0.0, 96.0, whole_at=4.0)
        three.count(worker, 5.0, 24.0, 48.0, loaded=4.5)
    three.kill(1, at=5.5)
    for worker in (0, 2):
        three.finish(worker, 7.0, 48.0, 72.0, loaded=4.5)
    summary = three.summary()
    assert (summary.samples, summary.samples_exact) == (96.0 + 48.0, True)


def test_nothing_is_lost_with_a_worker_that_is_killed_before_the_first_step(three: Journals) -> None:
    """All begin with a checkpoint, and worker 1 is killed before that."""
    three.kill(1, at=1.0)
    for worker in (0, 2):
        three.count(worker, 2.0, 0.0, 0.0, whole_at=2.0)
        three.finish(worker, 7.0, 48.0, 72.0, loaded=2.5)
    assert (three.summary().samples, three.summary().samples_exact) == (24.0, True)


def test_what_was_lost_before_a_load_makes_a_lower_bound(three: Journals) -> None:
    """All workers were killed, and a later life has loaded a checkpoint of before."""
    three.count(0, 3.0, 0.0, 48.0)
    for worker in (0, 1, 2):
        three.kill(worker, at=3.5)
    for worker in (0, 1, 2):
        three.begin(worker, at=4.0)
        three.count(worker, 5.0, 24.0, 48.0, loaded=4.5)
        three.finish(worker, 6.0, 48.0, 72.0, loaded=4.5)
    summary = three.summary()
    assert (summary.samples, summary.samples_exact) == (48.0 + 48.0, False)


def test_a_worker_that_is_killed_while_another_one_asks_for_the_count_leaves_a_lower_bound(
    three: Journals,
) -> None:
    for worker in (0, 2):
        three.count(worker, 6.0, 0.0, 72.0, whole_at=5.0, ends=True)
    three.kill(1, at=5.5)
    summary = three.summary()
    assert (summary.samples, summary.samples_exact) == (72.0, False)


def test_a_run_that_all_workers_begin_again_has_a_lower_bound(three: Journals) -> None:
    """Nothing tells how much of the former life counts: a ring begins at 0, and shards may have gone on."""
    three.count(0, 3.0, 0.0, 48.0)
    for worker in (0, 1, 2):
        three.kill(worker, at=3.5)
    for worker in (0, 1, 2):
        three.begin(worker, at=4.0)
        three.finish(worker, 6.0, 0.0, 72.0)
    summary = three.summary()
    assert (summary.samples, summary.samples_exact) == (72.0, False)


def test_a_worker_that_comes_back_when_the_others_have_ended_leaves_the_count_exact(three: Journals) -> None:
    three.kill(1, at=3.0)
    for worker in (0, 2):
        three.finish(worker, 4.0, 0.0, 48.0)
        three.write(Gone(time=4.5, worker=worker, exit_code=0))
    three.begin(1, at=5.0)
    three.finish(1, 6.0, 48.0, 64.0)
    summary = three.summary()
    assert (summary.samples, summary.samples_exact) == (64.0, True)


def test_where_a_worker_cannot_know_the_count_the_reported_steps_are_a_lower_bound(three: Journals) -> None:
    """A second model came after the second step: shards count the samples of both."""
    for worker in (0, 1, 2):
        three.count(worker, 2.0, 0.0, 48.0)
        for iteration in range(1, 9):
            three.step(worker, iteration)
        three.count(worker, 3.0, 48.0, 48.0, partial=True)
    three.kill(1, at=8.5)
    for worker in (0, 2):
        three.count(worker, 9.0, 48.0, 48.0, partial=True, ends=True)
    summary = three.summary()
    assert (summary.samples, summary.samples_exact) == (8 * 24.0, False)


@pytest.mark.parametrize("field", ["loaded", "begin", "end", "whole_at"])
@pytest.mark.parametrize("value", ["-1.0", "1e999", '"8"', "null"])
def test_a_count_that_is_none_is_passed_over_in_a_line(three: Journals, field: str, value: str) -> None:
    three.finish(0, 2.0, 0.0, 24.0)
    with three.run.journal(0).open("ab") as file:
        file.write(f'{{"event":"samplescounted","time":2.0,"worker":0,"{field}":{value}}}\n'.encode())
    summary = three.summary()
    lines = [each["message"] for each in summary.events if each["event"] == "warned"]
    assert lines == [f"{three.run.journal(0)}: 1 lines hold no event and were passed over"]
