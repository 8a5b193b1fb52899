"""What the command says of failures: tracebacks, echoes, and which worker failed first."""

from __future__ import annotations

import runpy
import signal
from pathlib import Path

import pytest

from atoll.core.errors import DeadlineError, PeerLostError
from atoll.core.events import Failed
from atoll.launch.launcher import WorkerEnd, read_ends, write_ends
from atoll.launch.tail import Tail, last_lines, shown
from atoll.launch.verdict import Verdict, judge, stopped
from atoll.launch.worker import END_OF_OUTPUT, describe, is_echo
from atoll.observe.rundir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def failed(worker: int, time: float, echo: bool = False, traceback: str = "", status: int = 1) -> Failed:
    return Failed(
        time=time, worker=worker, error="ValueError", message=f"message {worker}", traceback=traceback,
        exit_status=status, echo=echo,
    )  # fmt: skip


def failure_of(script: Path) -> Exception:
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        return error
    raise AssertionError("the script did not fail")


def test_a_traceback_begins_in_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import json\ndef load():\n    json.loads('{')\nload()\n")
    lines = describe(failure_of(script), str(script)).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{script}", line 4, in <module>'
    assert lines[-1].startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert not any("runpy" in line for line in lines)


def test_a_syntax_error_points_at_the_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = = 1\n")
    said = describe(failure_of(script), str(script))
    assert f'File "{script}", line 1\n    x = = 1\n' in said
    assert said.endswith("SyntaxError: invalid syntax")
    assert "runpy" not in said


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (PeerLostError("worker 1 is gone"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("boom"), False),
        (ValueError("Connection closed by peer"), False),
        (DeadlineError("worker 0 waited for worker 1"), False),
    ],
)
def test_an_echo_is_what_another_workers_end_has_caused(error: Exception, echo: bool) -> None:
    assert is_echo(error) == echo


class TestVerdict:
    def test_all_went_well(self, run: RunDirectory) -> None:
        assert judge([], [], 0, run) == Verdict(0)

    def test_the_first_own_failure_counts(self, run: RunDirectory) -> None:
        failures = [failed(0, 1.0, echo=True), failed(2, 3.0), failed(1, 2.0, status=2)]
        ends = [WorkerEnd(0, 10, 1), WorkerEnd(3, 13, -9)]
        assert judge(failures, ends, 1, run) == Verdict(2, "message 1")

    def test_a_traceback_is_shown_whole(self, run: RunDirectory) -> None:
        verdict = judge([failed(1, 1.0, traceback="Traceback\n  x\nValueError: m")], [], 1, run)
        assert verdict.detail == "worker 1:\nTraceback\n  x\nValueError: m"
        assert verdict.line.startswith("worker 1 ended with ValueError")

    def test_a_killed_worker_comes_before_the_echo_of_its_end(self, run: RunDirectory) -> None:
        ends = [WorkerEnd(0, 10, 1), WorkerEnd(1, 11, -signal.SIGSEGV), WorkerEnd(2, 12, -signal.SIGTERM)]
        run.log(1).write_text("Fatal Python error: Segmentation fault\n")
        verdict = judge([failed(0, 1.0, echo=True)], ends, 1, run)
        assert verdict.line.startswith("worker 1 was killed by SIGSEGV; its log is")
        assert verdict.detail == "Fatal Python error: Segmentation fault"

    def test_a_worker_that_the_launcher_stopped_is_not_the_cause(self, run: RunDirectory) -> None:
        ends = [WorkerEnd(0, 10, 1), WorkerEnd(1, 11, -signal.SIGTERM)]
        assert judge([failed(0, 1.0, echo=True)], ends, 1, run) == Verdict(1, "message 0")

    def test_a_worker_that_somebody_terminated_is_named(self, run: RunDirectory) -> None:
        verdict = judge([], [WorkerEnd(1, 11, -signal.SIGTERM), WorkerEnd(0, 10, -signal.SIGTERM)], 1, run)
        assert verdict.line.startswith("worker 1 was killed by SIGTERM")

    def test_the_launcher_itself(self, run: RunDirectory) -> None:
        run.launcher_log.write_text("OSError: no port\n")
        verdict = judge([], [], 1, run)
        assert verdict == Verdict(
            1, f"torchrun's launcher failed; its log is {run.launcher_log}", "OSError: no port"
        )

    def test_stopped_from_outside(self, run: RunDirectory) -> None:
        assert stopped(signal.SIGINT, [], [], run) == Verdict(130, "stopped by Ctrl-C")
        assert stopped(signal.SIGTERM, [], [], run) == Verdict(143, "stopped by SIGTERM")

    def test_what_a_script_ended_with_after_sigterm_is_told_beside_it(self, run: RunDirectory) -> None:
        failures = [failed(0, 2.0, echo=True), failed(1, 3.0)]
        assert stopped(signal.SIGTERM, failures, [], run) == Verdict(143, "stopped by SIGTERM; message 1")
        assert stopped(signal.SIGINT, failures, [], run) == Verdict(130, "stopped by Ctrl-C")

    def test_who_was_killed_after_the_grace_is_named(self, run: RunDirectory) -> None:
        verdict = stopped(signal.SIGTERM, [], ["worker 0", "worker 1"], run)
        assert verdict.line == (
            "stopped by SIGTERM; worker 0 and worker 1 were killed, for not ending within run.grace"
        )


def test_ends_come_back(run: RunDirectory) -> None:
    assert read_ends(run.ends) == []
    ends = [WorkerEnd(1, 2, -9)]
    write_ends(ends, run.ends)
    assert read_ends(run.ends) == ends
    run.ends.write_bytes(run.ends.read_bytes()[:-3])
    assert read_ends(run.ends) == []


class TestTail:
    def test_follows_whole_lines_and_the_last_one_at_the_end(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        tail = Tail(path)
        assert tail.read() == []
        path.write_bytes(b"one\ntw")
        assert tail.read() == ["one"]
        path.write_bytes(b"one\ntwo\nthr")
        assert tail.read() == ["two"]
        assert tail.read(last=True) == ["thr"]

    def test_stops_where_the_worker_ends_with_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_text(f"one\n{END_OF_OUTPUT}\nTraceback\n")
        tail = Tail(path)
        assert tail.read() == ["one"]
        path.write_text(f"one\n{END_OF_OUTPUT}\nTraceback\nmore\n")
        assert tail.read(last=True) == []
        tail.go_on()  # it was started again
        with path.open("a") as log:
            log.write("again\n")
        assert tail.read() == ["again"]

    def test_from_the_end_on(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        nothing_yet = Tail(path, from_end=True)
        path.write_bytes(b"one\ntw")
        tail = Tail(path, from_end=True)
        path.write_bytes(b"one\ntwo\nthree\n")
        assert tail.read() == ["two", "three"]
        assert nothing_yet.read() == ["one", "two", "three"]

    def test_a_line_as_a_terminal_would_leave_it(self) -> None:
        assert shown(b"10%\r50%\r100%\r") == "100%"
        assert shown("\x1b[31mred\x1b[0m \x1b[2K\x1b[1Aü".encode()) == "\x1b[31mred\x1b[0m ü"
        assert shown(b"\xff bytes") == "� bytes"

    def test_last_lines(self, tmp_path: Path) -> None:
        assert last_lines(tmp_path / "log", 2) == []
        (tmp_path / "log").write_text("a\n\nb\nc\n\n")
        assert last_lines(tmp_path / "log", 2) == ["b", "c"]
