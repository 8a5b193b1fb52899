"""Workers that get no CPU are silent, and alive: nobody gives them up (`core/liveness.py`).

The starvation is certain: all threads of a worker are of SCHED_IDLE, bound to one core beside busy loops, so
that they get less than a thousandth of it, and one of them wants a tenth of a second before another may run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from killed_runs import STEADY, hub_decisions, start
from run_command import DEADLINE, Command, cause_of, wait_for

LOOPS = 8
# In worker STARVED, and in its CPU side: while the file is there, calls that take CPU hold Python's lock.
WANTS_CPU = """
import os
import threading
import time


def want():
    while True:
        if os.path.exists("starve"):
            sum(range(4_000_000))
        time.sleep(0.05)


if int(os.environ.get("RANK", "-9")) + int(os.environ.get("ATOLL_FIRST_WORKER", "0")) == STARVED:
    threading.Thread(target=want, daemon=True).start()
"""
BEYOND = 3.0  # seconds of such a silence, beyond the moment at which it is seen

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has SCHED_IDLE")


def schedule(pids: list[int], cores: set[int], policy: int) -> None:
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; who is not root
                os.sched_setaffinity(int(thread.name), cores)
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))


@contextlib.contextmanager
def starved(folder: Path, pids: list[int]) -> Iterator[None]:
    """These processes, and what they start, get hardly any CPU."""
    core = {max(os.sched_getaffinity(0))}
    schedule(pids, core, os.SCHED_IDLE)
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(LOOPS):
            loops.append(subprocess.Popen(["sh", "-c", "while :; do :; done"]))
            os.sched_setaffinity(loops[-1].pid, core)
        (folder / "starve").touch()
        yield
    finally:
        (folder / "starve").unlink(missing_ok=True)
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()
        schedule(pids, os.sched_getaffinity(0), os.SCHED_OTHER)


def wanting_cpu(command: Command, worker: int = 1) -> dict[str, str]:
    return with_site(command, WANTS_CPU.replace("STARVED", str(worker)))


def with_site(command: Command, code: str) -> dict[str, str]:
    """The environment in which each process of Python runs this first."""
    (command.directory / "sitecustomize.py").write_text(code)
    return {
        "PYTHONPATH": os.pathsep.join([str(command.directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    }


def told_of_node(command: Command) -> list[str]:
    """What nodes have said of one that is silent and lives."""
    events = [
        json.loads(line)
        for path in (command.directory / "run").glob("workers/*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return [each["reason"] for each in events if each.get("choice", "").endswith("is waited for")]


def told_of_worker(command: Command) -> list[str]:
    """What the hub has said of one that is silent and lives."""
    return [each["reason"] for each in hub_decisions(command) if each["what"] == "worker waited for"]


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ("elastic = true", told_of_worker),
        ("strategy = 'server'", told_of_worker),
        ("strategy = 'peers'", told_of_node),
    ],
    ids=["ring", "server", "peers"],
)
def test_a_worker_that_gets_no_cpu_is_waited_for(command: Command, run: str, told) -> None:
    steady = STEADY.replace("STEPS", "60")
    process = start(command, steady, run=run, workers=3, environment=wanting_cpu(command))
    wait_for(lambda: command.steps() > 3, "a few steps")
    pid = command.worker_pid(1)
    children = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    with starved(command.directory, [pid, *children]):
        wait_for(lambda: told(command) or process.poll() is not None, "its silence")
        assert process.poll() is None, process.communicate()
        time.sleep(BEYOND)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    assert all("s of CPU in the last" in each for each in told(command)), told(command)
    assert all(each.endswith("the machine is overloaded") for each in told(command)), told(command)
    gone = [each for each in hub_decisions(command) if each["what"].endswith(" died")]
    assert gone == [] or run == "strategy = 'peers'", gone
    assert command.summary()["steps"] == 60
    assert "lost" not in err, err
    assert "left out" not in err, err


@pytest.mark.parametrize(
    ("workers", "nodes", "starving"),
    [(3, "", 1), (4, "count = 2", 2), (4, "count = 2", 3)],
    ids=["one device", "the leader", "a device that does not lead"],
)
def test_a_node_that_is_heard_and_whose_worker_gets_no_cpu_is_waited_for(
    command: Command, workers: int, nodes: str, starving: int
) -> None:
    """Its CPU side answers, and the others wait for its iterations: for 6 s, a tenth of sync.timeout."""
    options = ("[sync]", "stale_max = 0", "timeout = '60s'", "[groups]", nodes)
    steady = STEADY.replace("STEPS", "40")
    environment = wanting_cpu(command, starving)
    process = start(
        command, steady, *options, run="strategy = 'peers'", workers=workers, environment=environment
    )
    wait_for(lambda: command.steps() > 3, "a few steps")
    with starved(command.directory, [command.worker_pid(starving)]):
        wait_for(lambda: told_of_node(command) or process.poll() is not None, "its delay")
        assert process.poll() is None, process.communicate()
        time.sleep(BEYOND)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    told = told_of_node(command)
    assert all(re.match(r"no iteration for \S+ s; .*: the machine is overloaded", each) for each in told), (
        told
    )
    assert command.summary()["steps"] == 40
    assert "left out" not in err, err


SLOW_SHARD = """
import sys
import time


class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            time.sleep(600)


if "server-0" in sys.orig_argv:
    sys.meta_path.insert(0, Slow())
"""


def test_a_deadline_says_that_a_shard_is_still_starting(command: Command) -> None:
    """It imports torch, say, on a machine that is busy."""
    options = ("[sync]", "timeout = '3s'")
    process = start(
        command, STEADY.replace("STEPS", "5"), *options, environment=with_site(command, SLOW_SHARD)
    )
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1, err
    last = cause_of(err)
    said = r"atoll: worker \d waited 3\.0 s for the shards to come to the hub at \S+ "
    said += r"\(deadline sync\.timeout, 3 s\)"
    doing = r"its process runs \(it got \d+\.\d s of CPU\) and is still starting, for \d+\.?\d* s"
    assert re.match(f"{said}: shard 0 has not come yet: {doing}", last), err
