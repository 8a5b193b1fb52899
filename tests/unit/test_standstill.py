"""Processes that a signal has stopped, and for how long: `launch/processes.py`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from atoll.launch.processes import Standstill, is_stopped

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def stop(process: subprocess.Popen[bytes], signum: signal.Signals, stopped: bool) -> None:
    process.send_signal(signum)
    until = time.monotonic() + 30.0
    while is_stopped(process.pid) != stopped:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_who_is_stopped(sleeper: subprocess.Popen[bytes]) -> None:
    assert not is_stopped(sleeper.pid)
    stop(sleeper, signal.SIGSTOP, True)
    stop(sleeper, signal.SIGCONT, False)
    sleeper.kill()
    sleeper.wait()
    assert not is_stopped(sleeper.pid)


def test_only_who_stands_still_without_a_break_is_told_of(sleeper: subprocess.Popen[bytes]) -> None:
    now = [100.0]
    seen = Standstill(2.0, most=1.0, clock=lambda: now[0])

    def look(after: float) -> dict[int, float]:
        now[0] += after
        return seen.look([sleeper.pid])

    stop(sleeper, signal.SIGSTOP, True)
    assert look(0.5) == {}  # since when it stands still is not known: from now on
    assert look(1.0) == look(0.75) == {}
    stop(sleeper, signal.SIGCONT, False)
    assert look(0.5) == {}
    stop(sleeper, signal.SIGSTOP, True)
    assert look(0.5) == look(1.0) == look(1.0) == {}
    assert look(0.5) == {sleeper.pid: 2.5}


def test_while_the_one_who_looks_stood_still_nobody_did(sleeper: subprocess.Popen[bytes]) -> None:
    now = [100.0]
    seen = Standstill(2.0, most=1.0, clock=lambda: now[0])
    stop(sleeper, signal.SIGSTOP, True)
    assert seen.look([sleeper.pid]) == {}
    now[0] += 3600.0
    assert seen.look([sleeper.pid]) == {}
    now[0] += 3600.0
    assert seen.look([sleeper.pid]) == {}
    now[0] += 0.5
    assert seen.look([sleeper.pid]) == {sleeper.pid: 2.5}
