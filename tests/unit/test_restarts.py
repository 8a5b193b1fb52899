"""When what dies again and again is started again."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from atoll.launch.restarts import SHORT_SECONDS, DelayedProcess, Pauses

NO_STEP, STEPS = False, True


def test_lives_of_no_use_are_followed_by_growing_pauses() -> None:
    now = [0.0]
    pauses = Pauses(lambda: now[0])

    def die(was_of_use: bool = NO_STEP, lived: float = 0.1, who: str = "worker 1") -> float:
        now[0] += lived
        pause = pauses.before_restart(who, was_of_use)
        now[0] += pause
        return pause

    assert [die() for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert [die(STEPS), die(), die(), die(lived=SHORT_SECONDS), die(), die()] == [0, 0, 1, 0, 0, 1]
    assert [die(who="worker 2", lived=0.0)] == [0]
    assert max(die() for _ in range(5000)) == 60


def test_a_process_starts_when_its_time_has_come() -> None:
    now, started = [10.0], list[subprocess.Popen[bytes]]()

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]))
        return started[-1]

    process = DelayedProcess(start, 2.0, lambda: now[0])
    assert (process.poll(), process.returncode, process.pid, process.waits) == (None, None, -1, True)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(-1.0)
    now[0] = 12.0
    process.poll()
    assert (process.pid, process.waits) == (started[0].pid, False)
    started[0].wait(60.0)
    assert (process.poll(), process.wait(0.0), process.returncode, len(started)) == (7, 7, 7, 1)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_start_ends_it(signum: signal.Signals) -> None:
    process = DelayedProcess(lambda: pytest.fail("started"), 0.0)
    process.send_signal(signum)
    process.kill()
    assert (process.poll(), process.returncode, process.waits) == (-signum, -signum, False)
