"""`atoll run` with real processes: how it ends, what it leaves, and that no process outlives it.

The workers here write a session's events themselves, so that nothing has to import torch but torchrun.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time

import psutil
import pytest
from own_events import ALONE
from run_command import DEADLINE, Command, wait_for

from atoll.launch.run import STOP_SECONDS

PREAMBLE = """
import os, signal, subprocess, sys, time
from atoll.core.events import Expected, Finished, Logged, Started, StepDone
from atoll.observe.journal import Journal
from atoll.observe.rundir import RunDirectory
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
journal = Journal(RunDirectory.from_environment().journal(RANK))
def say(kind, **fields):
    journal(kind(time=time.time(), worker=RANK, **fields))
    journal.flush()
def step(i):
    say(StepDone, iteration=i, samples=4, seconds=0.01, waiting=0.001, bytes_sent=100)
    say(Logged, iteration=i, weight=4.0, values={"loss": RANK + 1 / i})
say(Started, workers=WORLD, strategy="ring", device="cpu", pid=os.getpid())
"""
FOREVER = """
i = 0
while True:
    i += 1
    step(i)
    time.sleep(0.05)
"""


SERVED_RUN = {
    "ATOLL_HUB": "tcp://127.0.0.1:1",
    "ATOLL_KEY_FILE": "no.key",
    "ATOLL_RUN": "r",
    "ATOLL_RANK": "7",
}


@pytest.mark.quick
def test_a_whole_run(command: Command) -> None:
    """A served run that the shell takes part in is no business of a ring; with ATOLL_HUB alone a worker would
    join that run (docs/several-machines.md)."""
    (command.directory / "beside.py").write_text("WORD = 'found'\n")
    code, out, err = command.run(
        PREAMBLE + "import beside\n"
        "say(Expected, steps=5)\n"
        "print(RANK, __name__, sys.argv, beside.WORD, os.environ['OMP_NUM_THREADS'])\n"
        "for i in range(1, 6): step(i)\n"
        "say(Finished, iteration=5)\n"
        f"assert not [name for name in {list(SERVED_RUN)} if name in os.environ]\n"
        "print('no end of line', end='')\n",
        "--workers",
        "7",
        "--help",
        environment=SERVED_RUN,
        options=["--set", "sync.slack=4", "--group-by", "site"],
    )
    assert code == 0, err
    unused = "has no effect under strategy 'ring': only"
    assert (
        f"atoll: warning: sync.slack (given by --set sync.slack=4) {unused} 'server' and 'ps-hra' use" in err
    )
    assert f"atoll: warning: groups.by (given by --group-by site) {unused} 'ps-hra' uses it; leave it" in err
    assert out == "0 __main__ ['train.py', '--workers', '7', '--help'] found 1\nno end of line\n"
    assert "5 steps of 40 samples" in err
    run = command.directory / "run"
    assert (run / "logs" / "worker-1.log").read_text().startswith("1 __main__")
    assert "workers = 2" in (run / "config.toml").read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["values"]["loss"] for line in lines] == [pytest.approx(0.5 + 1 / i) for i in range(1, 6)]
    summary = command.summary()
    known = {"strategy": "ring", "workers": 2, "groups": 1, "steps": 5, "samples": 40.0, "bytes_sent": 1000}
    assert {key: summary[key] for key in known} == known
    assert summary["last"] == {"loss": pytest.approx(0.7)}
    assert [event["message"].split()[0] for event in summary["events"] if event["event"] == "warned"] == [
        "sync.slack",
        "groups.by",
    ]
    assert (run / "report.png").stat().st_size > 0
    assert len(list((run / "tensorboard").iterdir())) == 1


def test_the_first_traceback_whole_and_once(command: Command) -> None:
    code, out, err = command.run(
        PREAMBLE
        + "step(1)\n"
        + "if RANK == 0:\n"
        + "    print('last words', flush=True)\n"
        + "    def inner(): raise ValueError('boom')\n"
        + "    try:\n"
        + "        inner()\n"
        + "    except ValueError as error:\n"
        + "        raise KeyError('outer') from error\n"
        # As a worker that another one's end makes fail: it comes to that when the other's word is there.
        + "first = RunDirectory.from_environment().journal(0)\n"
        + "while not first.exists() or 'failed' not in first.read_text(): time.sleep(0.02)\n"
        + "raise RuntimeError('Connection closed by peer')\n"
    )
    assert code == 1
    shown = out + err
    assert shown.count("ValueError: boom") == 1
    assert shown.count("Traceback (most recent call last)") == 2  # the error, and the one that caused it
    assert "runpy" not in shown
    assert "inner()" in shown
    assert "Connection closed" not in shown
    assert "atoll: worker 0 ended with KeyError at train.py:" in err
    assert "last words" in out
    assert "last words" in (command.directory / "run" / "logs" / "worker-0.log").read_text()
    failed = [event for event in command.summary()["events"] if event["event"] == "failed"]
    assert failed[0]["worker"] == 0


def test_a_users_mistake_in_the_workers_is_one_line(command: Command) -> None:
    code, out, err = command.run(
        PREAMBLE + "from atoll.core.errors import PrepareError\nraise PrepareError('weight: shapes differ')\n"
    )
    assert (code, out) == (2, "")
    first, *then = err.splitlines()
    if not then:  # both had made it when the command looked
        assert first == "atoll: weight: shapes differ"
        return
    assert re.fullmatch(r"atoll: worker [01], after \d+\.\d s: weight: shapes differ", first)
    assert then in (["atoll: then worker 0 was stopped"], ["atoll: then worker 1 was stopped"])


def test_the_scripts_own_exit_status_passes(command: Command) -> None:
    code, _, err = command.run(PREAMBLE + "print('why', RANK)\nif RANK == 1: sys.exit(3)\n" + FOREVER)
    assert code == 3
    assert "why 1\natoll: worker 1 ended with status 3 (sys.exit at train.py:" in err
    assert "; its log is run/logs/worker-1.log\natoll: then worker 0 was stopped\n" in err


def test_a_killed_worker_is_named(command: Command) -> None:
    process = command.start(PREAMBLE + FOREVER)
    wait_for(lambda: command.steps() > 3, "a few steps")
    os.kill(command.worker_pid(1), signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "atoll: worker 1 was killed by SIGKILL" in err
    assert command.summary()["steps"] > 3


def test_what_will_not_stop_is_killed(command: Command) -> None:
    """Workers that ignore every polite signal, and a child of theirs in a session of its own."""
    process = command.start(
        PREAMBLE + "for signum in (signal.SIGINT, signal.SIGTERM): signal.signal(signum, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        + FOREVER,
        options=["--set", "run.grace=2s"],
    )
    wait_for(lambda: command.steps() > 3 and len(command.alive()) == 6, "workers and their children")
    process.terminate()
    # Not by torchrun, which would wait for 30 s; afterwards the command draws its picture.
    wait_for(lambda: len(command.alive()) <= 1, "the end of all but the command itself", 25)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + signal.SIGTERM
    names = "worker 0 and worker 1|worker 1 and worker 0"
    line = rf"atoll: stopped by SIGTERM; ({names}) were killed, for not ending within run\.grace"
    assert re.fullmatch(line, err.splitlines()[-1]), err
    assert command.alive() == []


HEARS = """
import os, signal, time
from pathlib import Path
def touch(name): Path(f"{name}-{os.environ['RANK']}").touch()
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, lambda *_: touch("heard"))
while True:
    touch("alive")
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("signals", "status", "said", "options"),
    [
        pytest.param((signal.SIGINT, signal.SIGINT), 130, "Ctrl-C", [], id="Ctrl-C twice"),
        pytest.param((signal.SIGHUP, signal.SIGINT), 129, "SIGHUP", ALONE, id="SIGHUP and Ctrl-C"),
        pytest.param((signal.SIGHUP,), 129, "SIGHUP", [], id="SIGHUP"),
    ],
)
def test_workers_that_take_no_notice_have_five_seconds_or_until_the_second_signal(
    command: Command, signals: tuple[signal.Signals, ...], status: int, said: str, options: list[str]
) -> None:
    process = command.start(HEARS, options=options)

    def times(name: str) -> list[float]:
        return [path.stat().st_mtime for path in command.directory.glob(f"{name}-*")]

    wait_for(lambda: len(times("alive")) == 2, "both workers")
    begun = time.time()
    process.send_signal(signals[0])
    wait_for(lambda: len(times("heard")) == 2, "both to hear of it")
    for second in signals[1:]:
        process.send_signal(second)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == status
    assert err.splitlines()[-1] == f"atoll: stopped by {said}", err
    assert "Traceback" not in err
    assert command.alive() == []
    assert (max(times("alive")) - begun < STOP_SECONDS) == (len(signals) > 1)


def test_ctrl_c_while_the_launcher_starts(command: Command) -> None:
    process = command.start(PREAMBLE + FOREVER)
    wait_for(lambda: len(command.alive()) >= 2, "the launcher")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert command.alive() == []


def test_nothing_outlives_a_command_that_is_killed(command: Command) -> None:
    process = command.start(
        PREAMBLE + "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n" + FOREVER
    )
    wait_for(lambda: command.steps() > 3 and len(command.alive()) == 6, "workers and their children")
    process.kill()
    process.communicate(timeout=DEADLINE)
    wait_for(lambda: not command.alive(), "every process to end")


def test_nothing_outlives_a_launcher_that_is_killed(command: Command) -> None:
    process = command.start(PREAMBLE + FOREVER)
    wait_for(lambda: command.steps() > 3, "a few steps")
    (launcher,) = psutil.Process(process.pid).children()
    launcher.kill()
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "torchrun's launcher was killed by SIGKILL" in err
    assert command.alive() == []
