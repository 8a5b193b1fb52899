"""The supervisor of the soak test: it starts again, wakes, notes what ends, and finds what leaks."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from atoll.core.errors import DeadlineError
from support import supervisor
from support.supervisor import Supervisor, Usage, leaks

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


GIVES_UP_ONCE = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    print(os.getpid(), file=file)
if len(open(sys.argv[1]).readlines()) == 1:
    sys.exit(75)
time.sleep(600)
"""


def test_who_has_just_ended_by_itself_is_killed_in_its_next_life(tmp_path: Path) -> None:
    """Each kill is one restart, whatever the part has done meanwhile."""
    file = tmp_path / "a"
    with Supervisor(tmp_path / "logs", again=frozenset({75})) as parts:
        parts.add("worker 0", [sys.executable, "-c", GIVES_UP_ONCE, str(file)])
        ended = psutil.Process(parts.pid("worker 0"))
        until = time.monotonic() + DEADLINE
        while ended.status() != psutil.STATUS_ZOMBIE:  # without a tick
            assert time.monotonic() < until
            time.sleep(0.01)
        parts.kill("worker 0")
        parts.wait_for(lambda: parts.running("worker 0") and parts.restarts, "its third life", DEADLINE)
        assert parts.restarts == len(parts.strikes) == 1


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
        leaking = parts.pid("worker 0")
        parts.add("hub", counting(tmp_path / "a"))
        parts.wait_for(lambda: len(leaks(parts.usage)) >= 2, "the leak to show", DEADLINE)
    assert [line.split(" grew")[0] for line in leaks(parts.usage)] == [
        f"worker 0 (pid {leaking}): descriptors",
        "worker: resident",
    ]


SLOW = """
import os, sys, threading, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
threads = [threading.Thread(target=time.sleep, args=(600.0,), daemon=True) for _ in range(11)]
for thread in threads:
    thread.start()
print("it has begun", flush=True)
while True:
    if sys.argv[2] == "leaking":
        threads.append(threading.Thread(target=time.sleep, args=(600.0,), daemon=True))
        threads[-1].start()
    time.sleep(0.02)
"""


@pytest.mark.parametrize("then", ["steady", "leaking"])
def test_what_a_process_takes_to_begin_its_work_is_no_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """However long that is, as on a machine whose cores are busy; what it leaks from then on is found."""
    monkeypatch.setattr(supervisor, "USAGE_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "WARM_SECONDS", 0.1)
    go = tmp_path / "go"
    with Supervisor(tmp_path / "logs") as parts:
        parts.add("worker 0", [sys.executable, "-c", SLOW, str(go), then], begins="it has begun")
        parts.add("hub", counting(tmp_path / "a"))

        def looks(name: str) -> int:
            return sum(look.part == name for look in parts.usage)

        parts.wait_for(lambda: looks("hub") >= 20, "looks at one that has not begun", DEADLINE)
        assert not looks("worker 0")
        go.touch()
        if then == "leaking":
            parts.wait_for(lambda: leaks(parts.usage), "the leak to show", DEADLINE)
        parts.wait_for(lambda: looks("worker 0") >= 20, "looks at one that has begun", DEADLINE)
        leaking = [f"worker 0 (pid {parts.pid('worker 0')}): threads"] if then == "leaking" else []
    assert [line.split(" grew")[0] for line in leaks(parts.usage)] == leaking


def test_each_life_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its forerunner said is not its own word."""
    monkeypatch.setattr(supervisor, "USAGE_SECONDS", 0.05)
    go = tmp_path / "go"
    go.touch()
    with Supervisor(tmp_path / "logs") as parts:
        parts.add("worker 0", [sys.executable, "-c", SLOW, str(go), "steady"], begins="it has begun")
        parts.wait_for(lambda: parts.usage, "its beginning", DEADLINE)
        assert parts.state("worker 0") == "worker 0 has begun, and said last: 'it has begun'"
        go.unlink()
        first = parts.pid("worker 0")
        parts.kill("worker 0")
        parts.add("hub", counting(tmp_path / "a"))
        parts.wait_for(
            lambda: sum(look.part == "hub" for look in parts.usage) >= 20, "looks beside it", DEADLINE
        )
        assert parts.pid("worker 0") != first
        assert {look.pid for look in parts.usage if look.part == "worker 0"} == {first}
        assert re.match(r"worker 0 has not begun, \d+ s old, and said last: ", parts.state("worker 0"))
        go.touch()
        parts.wait_for(
            lambda: parts.pid("worker 0") in {look.pid for look in parts.usage}, "its beginning", DEADLINE
        )
        assert min(look.age for look in parts.usage if look.pid == parts.pid("worker 0")) == 0.0


def life(
    part: str, pid: int, start: int, descriptors: Callable[[int], int], seconds: int = 120
) -> list[Usage]:
    """A look each two seconds, with so many descriptors at an age, and a thread for each ten of them."""
    return [
        Usage(part, pid, float(start + age), age, descriptors(age), 4 + descriptors(age) // 10, 100 * 2**20)
        for age in range(0, seconds, 2)
    ]


def test_one_short_life_and_one_long_one_are_no_leak() -> None:
    short = life("worker 0", 1, 0, lambda age: 10 + min(age, 3), 30)
    assert not leaks(short + life("worker 0", 2, 30, lambda age: 10 + min(age, 3), 100))
    assert not leaks([])


def test_lives_with_different_tasks_are_judged_each_by_itself() -> None:
    """A shard's two processes: a standby all its life, and then one that is the primary all its life."""
    looks = life("shard-0", 1, 0, lambda _: 26) + life("shard-0 second", 2, 120, lambda _: 41)
    assert not leaks(looks)


def test_what_a_promotion_adds_is_spared_where_the_caller_says_so() -> None:
    looks = life("shard-0 second", 7, 0, lambda age: 26 if age < 60 else 34 if age < 70 else 41)
    assert leaks(looks) == ["shard-0 second (pid 7): descriptors grew from 26 to 41 over 55 looks"]
    assert not leaks(looks, spared={"shard-0": 15})
    assert leaks(looks, spared={"shard-1": 15})


@pytest.mark.parametrize("spared", [{}, {"shard-0": 15}])
def test_a_steady_leak_in_a_life_is_found_beside_steady_ones(spared: dict[str, int]) -> None:
    steady = [life("shard-0", pid, 200 * pid, lambda _: 34) for pid in range(1, 10)]
    looks = [each for looks in steady for each in looks]
    leaking = life("shard-0 second", 77, 200, lambda age: 34 + age // 2)
    found = leaks(sorted(looks + leaking, key=lambda look: look.time), spared=spared)
    assert found == ["shard-0 second (pid 77): descriptors grew from 45 to 87 over 55 looks"]


def test_lives_that_each_begin_anew_hide_no_leak() -> None:
    looks = [each for pid in range(5) for each in life("hub", pid, 60 * pid, lambda age: 20 + age // 2, 60)]
    assert leaks(looks) == [
        f"hub (pid {pid}): descriptors grew from 28 to 46 over 25 looks" for pid in range(5)
    ]


def test_a_life_that_comes_to_what_all_others_have_is_no_leak() -> None:
    """It began while others were down, or waited long before it trained."""
    usual = [each for pid in range(1, 4) for each in life("worker 1", pid, 120 * pid, lambda _: 31)]
    late = life("worker 2", 9, 50, lambda age: 3 if age < 20 else 20 if age < 40 else 32)
    assert not leaks(usual + late)
    leaking = life("worker 2", 9, 50, lambda age: 3 if age < 20 else 32 + age // 4)
    found = leaks(usual + leaking)
    assert [line.split(" grew")[0] for line in found] == ["worker 2 (pid 9): descriptors"]


def test_too_few_looks_are_not_judged() -> None:
    assert not leaks(life("hub", 1, 0, lambda age: 20 if age < 28 else 60, 32))


def test_memory_that_each_life_takes_over_from_the_one_before_is_found() -> None:
    looks = []
    for pid in range(8):
        for look in life("hub", pid, 60 * pid, lambda _: 20, 60):
            looks.append(replace(look, resident=look.resident + pid * 20 * 2**20))
    (found,) = leaks(looks)
    assert found.startswith("hub: resident grew from ")
