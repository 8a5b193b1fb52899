"""The supervisor of the soak test: it starts again, wakes, notes what ends, and finds what leaks."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from atoll.core.errors import DeadlineError
from atoll.testing import supervisor
from atoll.testing.supervisor import Supervisor, Usage, leaks

DEADLINE = 60.0
COUNTING = """
import os, sys, time
while True:
    with open(sys.argv[1], "a") as file:
        print(os.getpid(), file=file)
    time.sleep(0.01)
"""


def counting(path: Path) -> list[str]:
    return [sys.executable, "-c", COUNTING, str(path)]


def lives(path: Path) -> list[int]:
    """The process ids that have counted, each once, in order."""
    return list(dict.fromkeys(map(int, path.read_text().split()))) if path.exists() else []


def test_who_was_killed_is_started_again_and_who_was_stopped_goes_on(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    with Supervisor(tmp_path / "logs") as parts:
        for number, file in enumerate(files):
            parts.add(f"worker {number}", counting(file))
        parts.wait_for(lambda: all(map(lives, files)), "both to begin", DEADLINE)
        first = parts.pid("worker 0")
        parts.kill("worker 0")
        parts.wait_for(lambda: len(lives(files[0])) == 2, "its second life", DEADLINE)
        assert lives(files[0]) == [first, parts.pid("worker 0")]
        parts.stop("worker 1", 0.5)
        stopped = psutil.Process(parts.pid("worker 1"))
        # Without a tick nobody wakes it.
        until = time.monotonic() + DEADLINE
        while stopped.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert not parts.running("worker 1")
        lines = files[1].read_text()
        parts.wait_for(lambda: files[1].read_text() != lines, "it to go on", DEADLINE)
        assert parts.running("worker 1")
        assert len(lives(files[1])) == 1
        pids = [parts.pid("worker 0"), parts.pid("worker 1")]
    assert not any(map(psutil.pid_exists, pids))
    assert [(strike.part, strike.seconds) for strike in parts.strikes] == [
        ("worker 0", 0.0),
        ("worker 1", 0.5),
    ]
    assert (parts.restarts, parts.failures, parts.finished) == (1, [], set())


def test_a_stopped_part_may_be_killed(tmp_path: Path) -> None:
    file = tmp_path / "a"
    with Supervisor(tmp_path / "logs") as parts:
        parts.add("hub", counting(file))
        parts.wait_for(lambda: lives(file), "it to begin", DEADLINE)
        parts.stop("hub", 1000.0)
        parts.kill("hub")
        parts.wait_for(lambda: len(lives(file)) == 2, "its second life", DEADLINE)
        assert parts.running("hub")


def test_who_ends_by_itself_is_noted_and_not_started_again(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "logs") as parts:
        parts.add("worker 0", [sys.executable, "-c", "import sys; print('so it is'); sys.exit(3)"])
        parts.add("worker 1", [sys.executable, "-c", ""])
        parts.wait_for(lambda: len(parts.finished) == 2, "both ends", DEADLINE)
    (failure,) = parts.failures
    assert (failure.part, failure.status, failure.said) == ("worker 0", 3, "so it is")
    assert parts.restarts == 0


def test_what_a_part_leaves_behind_is_found_and_ended(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with Supervisor(tmp_path / "logs") as parts:
        parts.add("worker 0", [sys.executable, "-c", child])
        parts.wait_for(lambda: parts.finished, "its end", DEADLINE)
        (left,) = parts.left()
        assert psutil.pid_exists(left)
    until = time.monotonic() + DEADLINE
    while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_wait_has_a_deadline(tmp_path: Path) -> None:
    with (
        Supervisor(tmp_path / "logs") as parts,
        pytest.raises(DeadlineError, match=r"waited 0\.1 s for what does not come; see "),
    ):
        parts.wait_for(lambda: False, "what does not come", 0.1)


LEAKING = """
import os, time
kept = []
while True:
    kept.append((os.open("/dev/null", os.O_RDONLY), bytearray(2**22)))
    time.sleep(0.05)
"""


def test_a_leak_is_found_and_a_steady_part_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "USAGE_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "WARM_SECONDS", 0.3)
    with Supervisor(tmp_path / "logs") as parts:
        parts.add("worker 0", [sys.executable, "-c", LEAKING])
        parts.add("hub", counting(tmp_path / "a"))
        parts.wait_for(lambda: len(leaks(parts.usage)) >= 2, "the leak to show", DEADLINE)
    assert [line.split(" grew")[0] for line in leaks(parts.usage)] == [
        "worker: descriptors",
        "worker: resident",
    ]


def test_one_short_life_and_one_long_one_are_no_leak() -> None:
    def life(pid: int, start: float, seconds: int) -> list[Usage]:
        return [
            Usage("worker 0", pid, start + age, age, 10 + min(age, 3), 4, 100 * 2**20)
            for age in range(seconds)
        ]

    assert not leaks(life(1, 0, 30) + life(2, 30, 100))
    assert not leaks([])
