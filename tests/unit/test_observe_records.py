"""Journals, their merging into metrics.jsonl, and the summary."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.core.events import (
    AnyEvent,
    Decided,
    Expected,
    Failed,
    Finished,
    Gone,
    Logged,
    Regrouped,
    SharesChosen,
    Skipped,
    Started,
    StepDone,
    Warned,
    encode,
)
from atoll.observe import journal as journal_module
from atoll.observe.journal import FLUSH_SECONDS, Journal, JournalReader
from atoll.observe.metrics import LATE_SECONDS, Line, Merger, read_lines
from atoll.observe.progress import describe_event, plain_line
from atoll.observe.recorder import MOST_EVENTS, Recorder
from atoll.observe.report import draw
from atoll.observe.rundir import RunDirectory
from atoll.observe.summary import read_summary


def step(worker: int, iteration: int, time: float, seconds: float = 1.0) -> StepDone:
    return StepDone(
        time=time,
        worker=worker,
        iteration=iteration,
        samples=8,
        seconds=seconds,
        waiting=0.25,
        bytes_sent=100,
    )


def logged(worker: int, iteration: int, time: float, weight: float = 1.0, **values: float | None) -> Logged:
    return Logged(time=time, worker=worker, iteration=iteration, weight=weight, values=values)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def write(run: RunDirectory, *events: AnyEvent) -> None:
    """Append events to the journals of their workers, as the workers would."""
    for event in events:
        with Journal(run.journal(event.worker)) as journal:
            journal(event)


class TestJournal:
    def test_steps_wait_for_the_flush_and_decisions_do_not(self, tmp_path: Path) -> None:
        now = [0.0]
        path = tmp_path / "deep" / "0.jsonl"
        journal, reader = Journal(path, clock=lambda: now[0]), JournalReader(path)
        journal(step(0, 1, 1.0))
        assert list(reader.read()) == []
        now[0] = FLUSH_SECONDS
        journal(step(0, 2, 2.0))
        assert [event.iteration for event in reader.read() if isinstance(event, StepDone)] == [1, 2]
        journal(Warned(time=3.0, worker=0, message="at once"))
        assert len(list(reader.read())) == 1
        journal(step(0, 3, 4.0))
        journal.close()
        journal.close()
        assert len(list(reader.read())) == 1

    def test_a_torn_last_line_waits_for_its_end(self, tmp_path: Path) -> None:
        path = tmp_path / "0.jsonl"
        with Journal(path) as journal:
            journal(step(0, 1, 1.0))
        whole = path.read_bytes()
        path.write_bytes(whole + whole[:20])
        reader = JournalReader(path)
        assert len(list(reader.read())) == 1
        path.write_bytes(whole + whole)
        assert len(list(reader.read())) == 1
        assert reader.unreadable == 0

    def test_a_line_that_is_no_event_is_counted_and_passed_over(self, tmp_path: Path) -> None:
        path = tmp_path / "0.jsonl"
        with Journal(path) as journal:
            journal(step(0, 1, 1.0))
        path.write_bytes(b"rubbish\n" + path.read_bytes() + b'{"event":"unheard of"}\n')
        reader = JournalReader(path)
        assert len(list(reader.read())) == 1
        assert reader.unreadable == 2

    def test_a_full_disk_loses_events_and_not_the_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "0.jsonl").symlink_to("/dev/full")
        with Journal(tmp_path / "0.jsonl") as journal:
            for iteration in range(3):
                journal(Warned(time=1.0, worker=0, message=f"{iteration}"))
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 2  # once, and at the end
        assert said[0].startswith(f"atoll: {tmp_path / '0.jsonl'}: No space left on device; the run goes on")
        assert said[1] == f"atoll: {tmp_path / '0.jsonl'}: 3 events were lost"

    @pytest.mark.parametrize("missing", ["most", "only the end"])
    def test_a_disk_that_fills_in_the_middle_of_a_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
    ) -> None:
        path, write = tmp_path / "0.jsonl", os.write
        with Journal(path) as journal:
            journal(Warned(time=1.0, worker=0, message="whole"))
            torn = Warned(time=2.0, worker=0, message="torn")
            room = [10 if missing == "most" else len(encode(torn))]

            def full(file: int, data: bytes) -> int:
                if not room[0]:
                    raise OSError(errno.ENOSPC, "No space left on device")
                written = write(file, data[: room[0]])
                room[0] -= written
                return written

            monkeypatch.setattr(os, "write", full)
            journal(torn)
            monkeypatch.setattr(os, "write", write)
            journal(Warned(time=3.0, worker=0, message="room again"))
        reader = JournalReader(path)
        assert [event.message for event in reader.read() if isinstance(event, Warned)] == [
            "whole",
            f"{path}: 1 events before this one are missing: the disk was full",
            "room again",
        ]
        assert (reader.unreadable, journal.lost) == (1, 1)

    def test_no_journal_yet(self, tmp_path: Path) -> None:
        assert list(JournalReader(tmp_path / "0.jsonl").read()) == []

    def test_not_a_number_survives_as_none(self, tmp_path: Path) -> None:
        with Journal(tmp_path / "0.jsonl") as journal:
            journal(logged(0, 1, 1.0, loss=math.nan))
        (event,) = JournalReader(tmp_path / "0.jsonl").read()
        assert isinstance(event, Logged)
        assert event.values == {"loss": None}


class TestMerger:
    def test_one_line_for_an_iteration_of_all_workers(self) -> None:
        merger = Merger(2)
        for worker, weight, loss, seconds in ((0, 1.0, 4.0, 2.0), (1, 3.0, 8.0, 3.0)):
            merger.add(step(worker, 1, 10.0 + worker, seconds))
            merger.add(logged(worker, 1, 10.5, weight, loss=loss))
        assert list(merger.whole()) == []
        (line,) = merger.rest()
        assert line == Line(1, 11.0, 16, 3.0, 0.25, 200, {"loss": 7.0})

    def test_values_that_come_after_later_steps_still_belong_to_their_iteration(self) -> None:
        merger = Merger(1)
        pause = LATE_SECONDS / 5
        lines: list[Line] = []
        for iteration in range(1, 21):
            merger.add(step(0, iteration, iteration * pause))
            if iteration % 5 == 0:  # the session reads what it has logged since the last time
                for late in range(iteration - 4, iteration + 1):
                    merger.add(logged(0, late, iteration * pause, loss=float(late)))
            lines += merger.whole()
        assert 0 < len(lines) < 20
        lines += merger.rest()
        assert [line.iteration for line in lines] == list(range(1, 21))
        assert [line.values for line in lines] == [{"loss": float(line.iteration)} for line in lines]

    def test_a_slow_worker_holds_the_line_and_its_end_lets_it_go(self) -> None:
        merger = Merger(2)
        for iteration in range(1, 6):
            merger.add(step(0, iteration, 10.0 * iteration))
        merger.add(step(1, 1, 11.0))
        assert list(merger.whole()) == []
        merger.end(1, 12.0)
        assert [line.iteration for line in merger.whole()] == [1, 2, 3]

    def test_a_step_read_after_its_workers_end_holds_no_line_and_one_of_its_next_life_does(self) -> None:
        merger = Merger(2)
        merger.end(1, 12.0)
        merger.add(step(1, 1, 11.0))
        for iteration in range(1, 6):
            merger.add(step(0, iteration, 10.0 * iteration))
        assert [line.iteration for line in merger.whole()] == [1, 2, 3]
        merger.add(step(1, 6, 55.0))
        for iteration in range(6, 10):
            merger.add(step(0, iteration, 10.0 * iteration))
        assert list(merger.whole()) == []

    def test_what_is_not_finite_makes_the_mean_none(self) -> None:
        merger = Merger(2)
        merger.add(logged(0, 0, 1.0, loss=None, other=1.0))
        merger.add(logged(1, 0, 1.0, loss=2.0, other=3.0))
        (line,) = merger.rest()
        assert line.values == {"loss": None, "other": 2.0}
        assert line.samples == 0

    def test_an_iteration_made_again_after_a_checkpoint_was_loaded_gets_a_line_of_its_own(self) -> None:
        merger = Merger(1)
        lines = [
            line
            for event in (step(0, 5, 1.0), step(0, 6, 1.1), step(0, 5, 1.2))
            for line in merger.add(event)
        ]
        lines += merger.rest()
        assert [(line.iteration, line.time) for line in lines] == [(5, 1.0), (5, 1.2), (6, 1.1)]


class TestRecorder:
    def test_a_full_disk_loses_lines_and_not_the_run(self, run: RunDirectory) -> None:
        run.metrics.symlink_to("/dev/full")
        recorder = Recorder(run, 1, "ring")
        with Journal(run.journal(0)) as journal:
            for iteration in range(3):
                journal(step(0, iteration + 1, 1.0))
        recorder.poll()
        summary = recorder.close()
        assert summary.steps == 3
        assert f"{run.metrics}: 3 lines were lost" in [event["message"] for event in summary.events]

    def test_lines_do_not_wait_for_a_killed_worker(self, run: RunDirectory) -> None:
        recorder = Recorder(run, 2, "ring")
        write(run, *(step(worker, 1, 1.0) for worker in (0, 1)))
        recorder.poll()
        recorder.hear(Gone(time=1.5, worker=1, exit_code=-9))
        write(run, *(step(0, iteration, float(iteration)) for iteration in range(2, 6)))
        recorder.poll()
        assert [line.iteration for line in read_lines(run.metrics)] == [1, 2, 3]
        recorder.close()

    def test_summary_of_a_whole_run(self, run: RunDirectory) -> None:
        recorder = Recorder(run, 2, "ring")
        for worker in (0, 1):
            write(
                run,
                Started(time=100.0, worker=worker, workers=2, strategy="ring", device="cpu", pid=1),
                Decided(time=100.1, worker=worker, what="chunks", choice="4 MiB", reason="least waste"),
            )
        write(run, Expected(time=100.2, worker=0, steps=3))
        for iteration in (1, 2, 3):
            write(run, *(step(worker, iteration, 100.0 + iteration) for worker in (0, 1)))
            write(
                run,
                *(logged(worker, iteration, 100.0 + iteration, loss=4.0 - iteration) for worker in (0, 1)),
            )
            news = recorder.poll()
            assert len(news) == (1 if iteration == 1 else 0)
        status = recorder.status()
        assert (status.started, status.iteration, status.expected) == (2, 3, 3)
        assert status.last == {"loss": 1.0}
        assert status.samples_per_second == pytest.approx(16.0)
        assert status.waiting_share == pytest.approx(0.25)
        write(run, *(Finished(time=104.0, worker=worker, iteration=3) for worker in (0, 1)))
        recorder.close()
        summary = json.loads(run.summary.read_text())
        known = {
            "strategy": "ring", "workers": 2, "groups": 1, "steps": 3, "samples": 48.0, "seconds": 4.0,
            "bytes_sent": 600, "seconds_waiting": 0.75, "last": {"loss": 1.0},
        }  # fmt: skip
        assert {key: summary[key] for key in known} == known
        assert [event["event"] for event in summary["events"]] == ["decided"]
        assert [line.iteration for line in read_lines(run.metrics)] == [1, 2, 3]
        assert read_summary(run.summary).waiting_share == pytest.approx(0.25)

    def test_shares_are_shown_with_their_speeds_and_reasons(self, run: RunDirectory) -> None:
        recorder = Recorder(run, 2, "ring")
        for number, parts in enumerate(({0: 20, 1: 12}, {0: 24, 1: 8})):
            what = {"what": "shares", "choice": f"{parts[0]}, {parts[1]} of 32 samples", "reason": "speed"}
            speeds = {0: 480.0, 1: 160.0 + number}
            write(run, SharesChosen(time=100.0 + number, worker=0, parts=parts, speeds=speeds, **what))
        news = recorder.poll()
        assert [describe_event(event) for event in news] == [
            "shares: 20, 12 of 32 samples (speed)",
            "shares: 24, 8 of 32 samples (speed)",
        ]
        assert recorder.status().parts == [24, 8]
        recorder.close()
        summary = read_summary(run.summary)
        assert [(each.part, each.speed) for each in summary.each_worker] == [(24, 480.0), (8, 161.0)]
        assert [event["reason"] for event in summary.events] == ["speed", "speed"]
        assert draw(run).stat().st_size > 10_000

    def test_each_group_s_latest_shares_are_shown(self, run: RunDirectory) -> None:
        recorder = Recorder(run, 4, "ps-hra")
        first, second = {2: 9, 3: 7}, {0: 12, 1: 4}
        for number, parts in enumerate((first, second, {2: 3, 3: 13}, {0: 5, 2: 11})):
            what = {"what": "shares", "choice": "", "reason": "speed"}
            speeds = dict.fromkeys(parts, 1.0)
            chosen = SharesChosen(time=100.0 + number, worker=min(parts), parts=parts, speeds=speeds, **what)
            write(run, chosen)
            recorder.poll()
            assert recorder.status().parts == [[9, 7], [12, 4, 9, 7], [12, 4, 3, 13], [5, 11]][number]
        recorder.close()
        assert [each.part for each in read_summary(run.summary).each_worker] == [5, 4, 11, 13]

    def test_shares_of_a_group_that_is_no_more_are_not_shown(self, run: RunDirectory) -> None:
        recorder, what = Recorder(run, 4, "ps-hra"), {"what": "shares", "choice": "", "reason": "speed"}
        for parts in ({0: 12, 1: 4}, {2: 9, 3: 7}):
            write(run, SharesChosen(time=100.0, worker=min(parts), parts=parts, speeds={}, **what))
        again = Regrouped(time=101.0, worker=3, iteration=7, grouping=1, group=5, workers=[2, 3])
        moved = Regrouped(time=102.0, worker=2, iteration=8, grouping=2, group=6, workers=[1, 2])
        for event, shown in ((again, [12, 4, 9, 7]), (moved, [])):
            write(run, event)
            recorder.poll()
            assert recorder.status().parts == shown
        recorder.close()

    def test_an_end_that_was_passed_is_none(self, run: RunDirectory) -> None:
        """Workers that lease expect their share of an epoch, and a faster one is given more than that."""
        recorder = Recorder(run, 2, "server")
        write(run, *(Expected(time=0.0, worker=worker, steps=987) for worker in (0, 1)), step(0, 987, 1.0))
        recorder.poll()
        assert plain_line(recorder.status()).startswith("step 987 of 987 · ")
        write(run, step(0, 988, 2.0))
        recorder.poll()
        assert plain_line(recorder.status()).startswith("step 988 · ")
        write(run, step(1, 950, 3.0))  # whoever is still before it
        recorder.poll()
        assert plain_line(recorder.status()).startswith("step 950 · ")
        write(run, Expected(time=4.0, worker=1, steps=987))  # who is started again
        recorder.poll()
        assert recorder.status().expected is None
        write(run, Expected(time=5.0, worker=0, steps=1100))
        recorder.poll()
        assert recorder.status().expected == 1100
        recorder.close()

    def test_metrics_come_while_the_run_goes_on(self, run: RunDirectory) -> None:
        recorder = Recorder(run, 1, "ring")
        write(run, *(step(0, iteration, float(iteration)) for iteration in range(1, 10)))
        recorder.poll()
        assert len(list(read_lines(run.metrics))) >= 7
        recorder.close()
        assert len(list(read_lines(run.metrics))) == 9

    def test_a_wall_clock_that_is_set_back_leaves_rates_right_and_small(self, run: RunDirectory) -> None:
        recorder = Recorder(run, 1, "ring")
        for jump, begin in ((0.0, 0), (-3600.0, 200)):
            write(run, *(step(0, begin + i, 7200.0 + jump + 0.1 * (begin + i)) for i in range(200)))
            recorder.poll()
        assert recorder.status().steps_per_second == pytest.approx(1.0)
        assert len(recorder._rates[0]._bins) <= 22
        recorder.close()

    def test_events_are_bounded_and_the_failure_is_kept(self, run: RunDirectory) -> None:
        recorder = Recorder(run, 1, "ring")
        for iteration in range(MOST_EVENTS + 20):
            write(run, Skipped(time=1.0, worker=0, iteration=iteration, reason="NaN"))
        write(
            run,
            Failed(time=2.0, worker=0, error="E", message="m", traceback="", exit_status=1),
        )
        assert len(recorder.poll()) == MOST_EVENTS + 1
        summary = recorder.close()
        assert [event["event"] for event in summary.events[-2:]] == ["failed", "warned"]
        assert "20 more events" in summary.events[-1]["message"]
        assert len(recorder.failures) == 1

    def test_a_run_without_a_step_has_a_summary(self, run: RunDirectory) -> None:
        summary = Recorder(run, 2, "ring").close()
        assert (summary.steps, summary.seconds, summary.last) == (0, 0.0, {})
        assert read_summary(run.summary).samples_per_second == 0.0

    def test_an_unreadable_journal_is_said(self, run: RunDirectory) -> None:
        run.journal(0).write_bytes(b"rubbish\n")
        summary = Recorder(run, 1, "ring").close()
        assert "1 lines hold no event" in summary.events[0]["message"]


def test_two_threads_may_tell_one_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's, and the one that hears of the hub: here while the session's is writing."""
    journal = Journal(tmp_path / "0.jsonl")
    other = threading.Thread(target=lambda: journal(Warned(time=0.0, worker=0, message="other")))

    def encode_slowly(event: AnyEvent) -> bytes:
        if other.ident is None:
            other.start()
            other.join(0.2)  # it may be made to wait
        return encode(event)

    monkeypatch.setattr(journal_module, "encode", encode_slowly)
    journal(Warned(time=0.0, worker=0, message="own"))
    other.join()
    journal.close()
    told = [
        event.message for event in JournalReader(tmp_path / "0.jsonl").read() if isinstance(event, Warned)
    ]
    assert told == ["own", "other"]


def test_a_directory_with_a_run_in_it_is_refused(run: RunDirectory) -> None:
    run.claim().release()
    run.claim().release()  # which has left nothing
    write(run, Warned(time=1.0, worker=0, message="m"))
    with pytest.raises(UserError, match="holds a run already; remove it, or give another run.directory"):
        run.claim()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the run directory"):
        RunDirectory(tmp_path / "file" / "run").create()


def test_summary_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the summary"):
        read_summary(tmp_path / "summary.json")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(UserError, match="not the summary of a run"):
        read_summary(tmp_path / "summary.json")
