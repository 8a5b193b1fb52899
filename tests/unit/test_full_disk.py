"""Records on a disk that takes no more: nothing raises, and what is missing is counted.

The limit on a file's size stands for a full disk here (EFBIG); tests/processes fills a real one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from atoll.core.errors import UserError
from atoll.core.events import Failed, Lost, StepDone, Warned
from atoll.observe.journal import TOLD, Journal, JournalReader
from atoll.observe.lastwords import LAST_WORDS_VARIABLE, LastWords
from atoll.observe.recorder import Recorder
from atoll.observe.rundir import RunDirectory
from atoll.observe.summary import Summary, read_summary, reserve_summary, write_summary

ROOM = 2**16  # bytes


@contextlib.contextmanager
def full_at(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Iterator[LastWords]:
    """The launcher's pipe."""
    pipe = LastWords()
    monkeypatch.setenv(LAST_WORDS_VARIABLE, pipe.where)
    yield pipe
    pipe.close()


def step(iteration: int) -> StepDone:
    return StepDone(
        time=float(iteration),
        worker=0,
        iteration=iteration,
        samples=2,
        seconds=0.5,
        waiting=0.25,
        bytes_sent=10,
    )


def failure(text: str) -> Failed:
    return Failed(time=1e4, worker=0, error="ValueError", message=text, traceback=f"x\n{text}", exit_status=1)


def fill(journal: Journal, steps: int, begin: int = 0) -> None:
    for iteration in range(begin, begin + steps):
        journal(step(iteration))
        if iteration % 50 == 0:
            journal.flush()


def test_on_a_disk_that_stays_full_the_steps_are_counted_and_warnings_come(
    run: RunDirectory, words: LastWords, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_at(ROOM), Journal(run.journal(0)) as journal:
        fill(journal, 2000)
        journal(Warned(time=5e3, worker=0, message="seen"))
        journal(failure("the cause"))
    assert capsys.readouterr().err.count("File too large; the run goes on") == 1
    recorder = Recorder(run, 1, "ring")
    for word in words.take():
        assert isinstance(word, TOLD)
        recorder.hear(word)
    for _ in range(2):  # it says so itself, too (launch/worker.py)
        recorder.hear(failure("the cause"))
        recorder.poll(last=True)
    summary = recorder.close()
    assert (summary.steps, summary.samples, summary.bytes_sent) == (2000, 4000.0, 20_000)
    assert summary.each_worker[0].seconds == 1000.0
    assert summary.each_worker[0].waiting == 500.0
    assert [event["message"] for event in summary.events] == [
        f"{run.journal(0)}: File too large; the run goes on, and events are missing in its records",
        "seen",
        "the cause",
    ]
    assert [each.message for each in recorder.failures] == ["the cause"]
    lost = 2001 - sum(isinstance(event, StepDone) for event in JournalReader(run.journal(0)).read())
    assert recorder.missing() == (
        f"missing in {run.path}, because it could not be written: {lost} events of worker 0"
    )


def test_once_there_is_room_each_lost_step_is_counted_once(run: RunDirectory) -> None:
    with Journal(run.journal(0)) as journal:
        for begin in (0, 3000):
            with full_at(ROOM if not begin else 3 * ROOM):
                fill(journal, 2000, begin)
            fill(journal, 1000, begin + 2000)
    events = list(JournalReader(run.journal(0)).read())
    whole = [event.iteration for event in events if isinstance(event, StepDone)]
    assert whole == sorted(set(whole))
    lost = [event for event in events if isinstance(event, Lost)]
    assert len(lost) == 2
    assert len(whole) + sum(each.steps for each in lost) == 6000
    recorder = Recorder(run, 1, "ring")
    assert recorder.close().steps == 6000


def test_without_a_launcher_nothing_raises(run: RunDirectory) -> None:
    with full_at(100), Journal(run.journal(0)) as journal:
        fill(journal, 100)
        journal(failure("lost"))
    assert Recorder(run, 1, "ring").close().steps == 0


def test_a_journal_that_cannot_be_opened_is_opened_later(tmp_path: Path) -> None:
    (tmp_path / "workers").write_text("in its way")
    with Journal(tmp_path / "workers" / "0.jsonl") as journal:
        journal(Warned(time=1.0, worker=0, message="lost"))
        (tmp_path / "workers").unlink()
        journal(Warned(time=2.0, worker=0, message="kept"))
    events = list(JournalReader(tmp_path / "workers" / "0.jsonl").read())
    assert [type(event) for event in events] == [Lost, Warned, Warned]
    assert isinstance(events[2], Warned)
    assert events[2].message == "kept"


# -- the command's own files -------------------------------------------------------------------------------


def test_a_summary_is_written_into_the_room_that_was_taken_for_it(
    run: RunDirectory,
) -> None:
    reserve_summary(run.summary)
    room = run.path / ".summary.json.new"
    before, blocks = room.stat().st_ino, room.stat().st_blocks
    assert blocks > 0
    assert not run.summary.exists()
    with Journal(run.journal(0)) as journal:
        journal(step(1))
    Recorder(run, 1, "ring").close()
    assert run.summary.stat().st_ino == before
    assert read_summary(run.summary).steps == 1
    assert run.summary.read_bytes().endswith(b"}\n")
    assert not room.exists()


def test_a_summary_replaces_an_older_one_whole_or_not_at_all(run: RunDirectory) -> None:
    with Journal(run.journal(0)) as journal:
        fill(journal, 10)
    old = Recorder(run, 1, "ring").close()
    with (
        full_at(10),
        pytest.raises(UserError, match="cannot write the summary: File too large"),
    ):
        write_summary(old, run.summary)
    assert read_summary(run.summary) == old
    assert sorted(path.name for path in run.path.glob(".*")) == []
    os.mkfifo(run.path / "pipe")  # as /dev/stdout may be one
    reader = os.open(run.path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_summary(old, run.path / "pipe")
    assert msgspec.json.decode(os.read(reader, 2**16), type=Summary) == old
    os.close(reader)


def test_a_summary_that_cannot_be_written_is_missing_and_the_run_is_judged(run: RunDirectory) -> None:
    with Journal(run.journal(0)) as journal:
        fill(journal, 10)
    recorder = Recorder(run, 1, "ring")
    with full_at(10):
        summary = recorder.close()
    assert summary.steps == 10
    assert not run.summary.exists()
    assert recorder.missing() == (
        f"missing in {run.path}, because it could not be written: summary.json, 10 lines of metrics.jsonl"
    )
    assert sorted(path.name for path in run.path.iterdir()) == ["logs", "metrics.jsonl", "workers"]


def test_metrics_that_cannot_be_opened_are_lost_and_counted(run: RunDirectory) -> None:
    run.metrics.mkdir()
    with Journal(run.journal(0)) as journal:
        fill(journal, 10)
    recorder = Recorder(run, 1, "ring")
    told = [event.message for event in recorder.poll() if isinstance(event, Warned)]
    assert told == [f"{run.metrics}: Is a directory; the run goes on, and lines are missing there"]
    assert recorder.close().steps == 10
    assert "10 lines of metrics.jsonl" in recorder.missing()


# -- what a script prints ----------------------------------------------------------------------------------

PRINTS = """
import os, resource, sys
from atoll.observe.logstream import LogStreams
said = []
streams = LogStreams(said.append)
streams.install()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
print("first")
resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(1).st_size + 3, hard))
print("second")
print("x" * 1000, end="")
sys.stdout.buffer.write(b"bytes")
sys.stderr.write("errors")
sys.stdout.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print("third", "ü")
assert said == ["File too large"], said
assert streams.lost == 4 + 1000 + 5 + 6, streams.lost
assert sys.stdout.fileno() == 1 and not sys.stdout.isatty()
"""


@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_what_is_printed_to_a_full_disk_is_counted(tmp_path: Path, options: list[str]) -> None:
    with (tmp_path / "log").open("ab") as log:
        done = subprocess.run(
            [sys.executable, *options, "-c", PRINTS],
            stdout=log,
            stderr=log,
            timeout=60,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            check=False,
        )
    text = (tmp_path / "log").read_text()
    assert done.returncode == 0, text
    assert text == "first\nsec\n[1009 bytes are missing here: the disk was full]\nthird ü\n"
