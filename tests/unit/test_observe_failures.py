"""What the command says of failures: tracebacks, echoes, and which worker failed first."""

from __future__ import annotations

import os
import queue
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import DeadlineError, MismatchError, PeerLostError
from atoll.core.events import (
    AnyEvent,
    Ended,
    Failed,
    Gone,
    Joining,
    Logged,
    Started,
    Warned,
    decode,
    encode,
)
from atoll.core.texts import one_line, shortened, writable
from atoll.launch.causes import Causes
from atoll.launch.ends import EndWatch
from atoll.launch.launcher import WorkerEnd, read_ends, write_ends
from atoll.launch.program import Program
from atoll.launch.tail import Tail, last_lines, last_word, shown
from atoll.launch.verdict import Judge, Verdict
from atoll.launch.worker import END_OF_OUTPUT, describe
from atoll.observe.failing import is_echo
from atoll.observe.lastwords import LAST_WORDS_VARIABLE, LastWords, say
from atoll.observe.rundir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.launcher_log.touch()
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


def test_an_error_of_the_script_s_own_code_is_no_echo(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise OSError('example.org: connection reset by peer')\n")
    assert not is_echo(failure_of(script))


def raised_while(first: Exception, second: Exception) -> Exception:
    second.__context__ = first
    return second


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (PeerLostError("worker 1 is gone"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("boom"), False),
        (ValueError("Connection closed by peer"), False),
        (DeadlineError("worker 0 waited for worker 1"), False),
        (raised_while(PeerLostError("worker 1 is gone"), ValueError("my handler")), True),
        (raised_while(KeyError("key"), ValueError("mine")), False),
        (
            raised_while(RuntimeError("Connection closed by peer"), MismatchError("worker 1 is at the end")),
            False,
        ),
    ],
)
def test_an_echo_is_what_another_workers_end_has_caused(error: Exception, echo: bool) -> None:
    assert is_echo(error) == echo


def judged(
    run: RunDirectory, *events: AnyEvent, status: int = 1, survived: int | None = None, stalled: bool = False
) -> Verdict:
    causes = Causes()
    for event in events:
        causes.take(event)
    if survived is not None:
        causes.survive(survived, 1e9)
    return Judge(causes, run, began=0.0).judge(status, stalled)


def gone(worker: int, time: float, code: int) -> Gone:
    return Gone(time=time, worker=worker, exit_code=code)


def started(worker: int, time: float = 0.5) -> Started:
    return Started(time=time, worker=worker, workers=2, strategy="ring", device="cpu", pid=1)


def ending(status: int, call: str, message: str = "", line: str = "") -> Ended:
    return Ended(time=2.0, worker=1, status=status, call=call, message=message, line=line)


class TestVerdict:
    def test_all_went_well(self, run: RunDirectory) -> None:
        assert judged(run, started(0), gone(0, 2.0, 0), status=0) == Verdict(0)

    def test_the_first_own_failure_counts(self, run: RunDirectory) -> None:
        events: list[AnyEvent] = [
            failed(0, 1.0, echo=True),
            failed(2, 3.0),
            failed(1, 2.0, status=2),
            gone(3, 4.0, -9),
        ]
        verdict = judged(run, started(0), *events, gone(0, 1.1, 1))
        assert verdict.status == 2
        assert verdict.line == "worker 1, after 2.0 s: message 1"
        assert (
            verdict.followed
            == "then worker 0 lost touch with it; worker 2 ended with ValueError; worker 3 was stopped"
        )

    def test_what_all_say_is_said_once_and_of_nobody(self, run: RunDirectory) -> None:
        said = [msgspec.structs.replace(failed(each, 1.0 + each, status=2), message="no") for each in (0, 1)]
        assert judged(run, started(0), *said) == Verdict(2, "no")

    def test_a_traceback_is_shown_whole(self, run: RunDirectory) -> None:
        run.log(1).touch()
        failure = failed(1, 1.0, traceback="Traceback\n  x\nValueError: m")
        verdict = judged(run, msgspec.structs.replace(failure, line="train.py:7"))
        assert verdict.detail == "worker 1:\nTraceback\n  x\nValueError: m"
        assert verdict.line == (
            f"worker 1 ended with ValueError at train.py:7, after 1.0 s: message 1; its log is {run.log(1)}"
        )

    def test_a_killed_worker_comes_before_the_echo_of_its_end(self, run: RunDirectory) -> None:
        ends: list[AnyEvent] = [gone(0, 1.1, 1), gone(1, 1.2, -signal.SIGSEGV), gone(2, 1.3, -signal.SIGTERM)]
        run.log(1).write_text("Fatal Python error: Segmentation fault\n")
        verdict = judged(run, started(1), failed(0, 1.0, echo=True), *ends)
        assert verdict.line == f"worker 1 was killed by SIGSEGV, after 1.2 s; its log is {run.log(1)}"
        assert verdict.detail == "Fatal Python error: Segmentation fault"
        assert verdict.followed == "then worker 0 lost touch with it; worker 2 was stopped"

    def test_a_worker_that_the_launcher_stopped_is_not_the_cause(self, run: RunDirectory) -> None:
        verdict = judged(run, failed(0, 1.0, echo=True), gone(0, 1.1, 1), gone(1, 1.2, -signal.SIGTERM))
        assert (verdict.status, verdict.line) == (1, "message 0")

    def test_a_worker_that_somebody_terminated_is_named(self, run: RunDirectory) -> None:
        verdict = judged(run, started(0), gone(1, 1.0, -signal.SIGTERM), gone(0, 1.1, -signal.SIGTERM))
        assert verdict.line.startswith("worker 1 was killed by SIGTERM")
        assert verdict.status == 143

    def test_a_worker_that_was_stopped_on_its_way_out_is_not_the_cause(self, run: RunDirectory) -> None:
        """Its script had ended well, and before the other one's process ended with a status of its own."""
        good = [msgspec.structs.replace(ending(0, ""), worker=each, time=1.0 + each / 2) for each in (0, 1)]
        ends = gone(1, 2.0, 3), gone(0, 2.1, -signal.SIGTERM)
        verdict = judged(run, started(0), started(1), *good, *ends)
        assert verdict.line.startswith("worker 1 ended with status 3, after 2.0 s")
        assert (verdict.status, verdict.followed) == (3, "then worker 0 was stopped")

    def test_a_worker_that_has_said_how_it_ends_ends_so(self, run: RunDirectory) -> None:
        """Another one has lost touch with it, and torchrun stops it on its way out."""
        echo, end = failed(0, 2.1, echo=True), ending(1, "sys.exit", "no data")
        verdict = judged(run, started(0), started(1), echo, end, gone(1, 2.2, -signal.SIGTERM))
        assert verdict.line.startswith("worker 1 ended with status 1 (sys.exit), after 2.0 s: no data")
        assert verdict.status == 1

    @pytest.mark.parametrize(
        ("end", "said", "status"),
        [
            (ending(3, "sys.exit", line="t.py:3"), "ended with status 3 (sys.exit at t.py:3), after", 3),
            (ending(1, "sys.exit", "no data"), "ended with status 1 (sys.exit), after 2.0 s: no data;", 1),
            (
                ending(0, "sys.exit", line="t.py:3"),
                "ended with status 0 (sys.exit at t.py:3), after 2.0 s, before its session was over;",
                1,
            ),
            (ending(130, "KeyboardInterrupt"), "was interrupted (KeyboardInterrupt), after 2.0 s;", 130),
        ],
    )  # fmt: skip
    def test_an_exit_is_named_with_its_line_and_text(
        self, run: RunDirectory, end: Ended, said: str, status: int
    ) -> None:
        echo = failed(0, 1.5, echo=True)
        verdict = judged(run, started(0), started(1), echo, end, gone(1, 2.1, end.status))
        assert verdict.line.startswith(f"worker 1 {said}")
        assert (verdict.status, verdict.followed) == (status, "then worker 0 lost touch with it")

    @pytest.mark.parametrize(
        ("code", "after", "is_counted"),
        [
            (-signal.SIGTERM, 0.3, True),
            (-signal.SIGKILL, 5.0, True),
            (0, 0.3, False),
            (-signal.SIGTERM, 60.0, False),
        ],
    )
    def test_an_error_with_which_a_session_is_left_counts_where_that_is_cut_off(
        self, run: RunDirectory, code: int, after: float, is_counted: bool
    ) -> None:
        """Another worker loses touch meanwhile, and torchrun stops both."""
        own = msgspec.structs.replace(failed(1, 1.0, traceback="Traceback ..."), leaving=True)
        echo = failed(0, 1.1, echo=True)
        verdict = judged(run, started(0), started(1), own, echo, gone(0, 1.2, 1), gone(1, 1.0 + after, code))
        assert verdict.line.startswith("worker 1 ended with ValueError") == is_counted, verdict.line
        if is_counted:
            assert verdict.followed == "then worker 0 lost touch with it"
        last = msgspec.structs.replace(failed(1, 1.2, traceback="Traceback ..."), message="at last")
        verdict = judged(run, started(0), own, last, gone(1, 1.3, 1))
        assert "at last" in verdict.line

    def test_an_end_without_a_word_is_named(self, run: RunDirectory) -> None:
        """`os._exit(0)`: nobody but the parent knows of it."""
        verdict = judged(run, started(0), started(1), gone(1, 1.0, 0), failed(0, 0.9, echo=True))
        assert verdict.line.startswith(
            "worker 1 ended with status 0, after 1.0 s, before its session was over;"
        )

    def test_a_script_that_never_leaves_its_session_is_not_the_cause_of_an_error(
        self, run: RunDirectory
    ) -> None:
        own = failed(0, 2.0, traceback="Traceback ...")
        verdict = judged(run, started(0), started(1), gone(1, 1.0, 0), own, gone(0, 2.1, 1))
        assert verdict.line.startswith("worker 0 ended with ValueError")

    def test_who_never_joins_is_named(self, run: RunDirectory) -> None:
        events: list[AnyEvent] = [
            Joining(time=0.5, worker=0),
            Ended(time=1.0, worker=1, status=0),
            gone(1, 1.1, 0),
        ]
        causes = Causes()
        for event in events:
            assert causes.absent() is None
            causes.take(event)
        absent = causes.absent()
        assert absent is not None
        assert absent.worker == 1
        verdict = judged(run, *events, gone(0, 2.0, -15), status=0, stalled=True)
        assert verdict.line.startswith(
            "worker 1 ended with status 0, after 1.0 s, without calling atoll.join;"
        )
        assert (verdict.status, verdict.followed) == (1, "then worker 0 was stopped")
        causes.take(started(0))
        assert causes.absent() is None

    def test_who_has_not_ended_or_was_killed(self) -> None:
        causes = Causes()
        events = [started(0), started(1), started(2), started(3), gone(1, 1.0, -9), gone(2, 1.0, 0)]
        for event in (*events, failed(3, 1.0)):
            causes.take(event)
        assert causes.unfinished() == ["worker 0", "worker 1"]

    def test_an_end_that_the_run_survived_is_not_the_cause_of_a_later_error(self, run: RunDirectory) -> None:
        events: list[AnyEvent] = [started(0), started(1), gone(1, 1.0, -9), failed(0, 2.0), gone(0, 2.1, 1)]
        assert judged(run, *events).line.startswith("worker 1 was killed by SIGKILL")
        assert judged(run, *events, survived=1).line == "worker 0, after 2.0 s: message 0"

    def test_where_all_are_lost_the_first_is_named(self, run: RunDirectory) -> None:
        events: list[AnyEvent] = [started(0), started(1), gone(1, 1.0, -9), gone(0, 2.0, -9)]
        assert judged(run, *events, survived=1).line.startswith("worker 0 was killed")
        verdict = judged(run, started(0), started(1), gone(1, 1.0, -9), failed(0, 2.0, echo=True), survived=1)
        assert verdict.line.startswith("worker 1 was killed")

    def test_the_launchers_word_is_nobodys(self, run: RunDirectory) -> None:
        lost = msgspec.structs.replace(failed(0, 1.0), message="shard 0: no space left", by_launcher=True)
        verdict = judged(run, started(0), lost, failed(0, 1.5, echo=True), gone(1, 1.6, -15))
        assert verdict.line == "shard 0: no space left"
        assert verdict.followed == "then worker 0 lost touch with it; worker 1 was stopped"

    def test_a_text_of_any_kind_is_one_line(self, run: RunDirectory) -> None:
        text = "caught \x1b[31m\x00\nTraceback\n  x\nKeyError: 'key'" + "z" * 10_000_000
        failure = msgspec.structs.replace(failed(1, 1.0, traceback="Traceback"), message=text)
        verdict = judged(run, failure)
        assert verdict.line.isprintable()
        assert len(verdict.line) < 1000
        assert "caught" in verdict.line

    def test_the_launcher_itself(self, run: RunDirectory) -> None:
        run.launcher_log.write_text("OSError: no port\n")
        log = run.launcher_log
        assert judged(run) == Verdict(
            1, f"torchrun's launcher failed: OSError: no port; its log is {log}", "OSError: no port"
        )

    def test_a_log_that_is_gone_is_not_named(self, run: RunDirectory) -> None:
        shutil.rmtree(run.path)
        assert judged(run).line == "torchrun's launcher failed"
        assert judged(run, started(1), gone(1, 1.0, 3)).line == "worker 1 ended with status 3, after 1.0 s"
        failure = failed(1, 1.0, traceback="Traceback")
        assert judged(run, failure).line == "worker 1 ended with ValueError, after 1.0 s: message 1"

    def test_a_run_in_which_nobody_joins_says_so(self, run: RunDirectory) -> None:
        def line(*events: AnyEvent, words: tuple[str, ...] = (), workers: int = 2) -> str:
            causes = Causes()
            for event in (*events, gone(0, 2.0, 0), gone(1, 2.0, 0)):
                causes.take(event)
            program = Program("a/train.py", words)
            verdict = Judge(causes, run, began=0.0, program=program, workers=workers).judge(0)
            assert verdict.status == 0
            return verdict.line

        said = "no worker called atoll.join: "
        assert line() == f"{said}2 workers ran train.py, and Atoll synchronised nothing between them"
        assert line(ending(0, "sys.exit")) == line()
        assert line(workers=1) == f"{said}train.py ran once, without Atoll"
        assert line(Joining(time=0.5, worker=0)) == line(started(1)) == ""
        assert line(words=("--help",)) == line(words=("run", "-h")) == line(words=("--version",)) == ""

    def test_stopped_from_outside(self, run: RunDirectory) -> None:
        judge = Judge(Causes(), run, began=0.0)
        assert judge.stopped(signal.SIGINT, 1.0, []) == Verdict(130, "stopped by Ctrl-C")
        assert judge.stopped(signal.SIGTERM, 1.0, []) == Verdict(143, "stopped by SIGTERM")

    def test_what_a_script_ended_with_after_sigterm_is_told_beside_it(self, run: RunDirectory) -> None:
        causes = Causes()
        for event in (failed(0, 2.0, echo=True), failed(1, 3.0)):
            causes.take(event)
        judge = Judge(causes, run, began=0.0)
        assert judge.stopped(signal.SIGTERM, 1.0, []) == Verdict(
            143, "stopped by SIGTERM; worker 1, after 3.0 s: message 1"
        )
        assert judge.stopped(signal.SIGINT, 1.0, []) == Verdict(130, "stopped by Ctrl-C")
        assert (
            judge.stopped(signal.SIGINT, 9.0, []).line == "worker 1, after 3.0 s: message 1"
        )  # it had failed before

    def test_who_was_killed_after_the_grace_is_named(self, run: RunDirectory) -> None:
        verdict = Judge(Causes(), run, 0.0).stopped(signal.SIGTERM, 1.0, ["worker 0", "worker 1"])
        assert verdict.line == (
            "stopped by SIGTERM; worker 0 and worker 1 were killed, for not ending within run.grace"
        )


@pytest.mark.parametrize(
    ("log", "word"),
    [
        ("atoll: shard 0: no disk\n", "shard 0: no disk"),
        ("Traceback ...\n  File\nzmq.error.ZMQError: Too many\n", "zmq.error.ZMQError: Too many"),
        ("atoll: of an earlier life\nTraceback\nOSError: [Errno 24] files\n", "OSError: [Errno 24] files"),
        ("ValueError: and in one line\natoll: in words\n\n", "in words"),
        ("atoll: warning: the disk is slow\n12:00:00 hub: listens at tcp://a:1 (Error: no)\n", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_the_last_word_of_a_log(tmp_path: Path, log: str, word: str) -> None:
    (tmp_path / "log").write_text(log)
    assert last_word(tmp_path / "log") == word
    assert last_word(tmp_path / "none") == ""


# -- texts and the pipe ------------------------------------------------------------------------------------


class Word(str):
    """As torch's KeyErrorMessage: a str of another class."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def surrogate() -> Word:
    return Word("\udc80")


TEXTS = st.text(st.characters(codec=None), max_size=20)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        TEXTS, TEXTS.map(Word), st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=3),
        st.builds(surrogate), st.integers(2**63, 2**2000),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.integers(), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(ANYTHING, TEXTS, st.dictionaries(TEXTS.map(Word), ANYTHING, max_size=3))
def test_an_event_can_be_written_whatever_a_script_has_put_into_it(
    text: Any, key: str, values: dict[str, Any]
) -> None:
    for event in (
        Warned(time=1.0, worker=0, message=text),
        Logged(time=1.0, worker=0, iteration=1, weight=1.0, values={key: 1.0, **values}),
    ):
        line = encode(event)
        assert b"\n" not in line
        line.decode("utf-8")
    if isinstance(text, str):
        read = decode(encode(Warned(time=1.0, worker=0, message=text)))
        assert isinstance(read, Warned)
        assert read.message == writable(text)


def test_an_object_whose_text_cannot_be_had_hides_no_event() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    event: Any = Warned(time=1.0, worker=0, message=Mute())  # type: ignore[arg-type]
    assert b"Mute" in encode(event)


def test_what_is_written_of_a_lone_surrogate_says_what_it_was() -> None:
    assert writable("a\udc80b") == "a\\udc80b"
    assert type(writable(Word("a"))) is str
    assert writable("ä 😀") == "ä 😀"


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    said = shortened("a" * 50_000_000 + "the end", 2000, "the log has all")
    assert said.startswith("aaa")
    assert said.endswith("the end")
    assert "49,998,007 characters left out; the log has all" in said
    assert len(said) < 2100
    assert one_line("first\n\nsecond\nthird\n", 100) == "first ... third"


def test_a_word_comes_through_the_pipe_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    words = LastWords()
    try:
        monkeypatch.setenv(LAST_WORDS_VARIABLE, words.where)
        long = failed(1, 1.0, traceback="\x00" * 30_000)
        for event in (gone(1, 2.0, -9), long):
            say(event)
        first, second = words.take()
        assert first == gone(1, 2.0, -9)
        assert isinstance(second, Failed)
        assert (second.worker, second.message) == (1, "message 1")
        assert "characters left out" in second.traceback
        assert words.take() == []
        for _ in range(30):  # more than the pipe has room for, with a reader
            say(long)
            assert len(words.take()) == 1
    finally:
        words.close()


def test_words_go_nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The number of a process that is gone may be another one's, and its descriptor any file."""
    with (tmp_path / "file").open("w") as file:
        for where in (
            "",
            "x",
            "1:2",
            f"{os.getpid()}:{file.fileno()}:{os.fstat(file.fileno()).st_ino}",
            "999999999:3:4",
        ):
            monkeypatch.setenv(LAST_WORDS_VARIABLE, where)
            say(gone(1, 2.0, -9))
    assert (tmp_path / "file").read_bytes() == b""


def test_an_end_is_noticed_to_the_moment() -> None:
    seen: queue.Queue[tuple[int, int | None, float]] = queue.Queue()
    watch = EndWatch(lambda *each: seen.put(each))
    for code in ("import os; os._exit(3)", "import os; os.kill(os.getpid(), 9)"):
        with subprocess.Popen([sys.executable, "-c", code]) as process:
            watch.watch(process.pid)
            watch.join(60.0)
            pid, status, _ = seen.get(timeout=60.0)
        assert pid == process.pid
        assert status in (process.returncode, None)  # None: Popen was faster


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
