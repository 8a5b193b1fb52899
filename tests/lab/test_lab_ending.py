"""How a lab ends: by itself, by a signal, by whatever is killed. Nothing is left by the time the next has
started."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from lab_command import TWO, Labs, wait_for

# Two workers that have children, and say that they are there.
BUSY = """
import os, pathlib, signal, subprocess, sys, time
folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
worker = os.environ["ATOLL_LAB_WORKER"]
if how == "stubborn":
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], start_new_session=how == "stubborn")
(folder / f"up-{worker}").touch()
try:
    child.wait()
except KeyboardInterrupt:
    (folder / f"interrupted-{worker}").touch()
    sys.exit(1)
"""
PARTS = ("runner", "unshare", "inside", "emulator")


def up(labs: Labs, how: str = "polite") -> tuple[Path, list[str]]:
    """A folder in which busy workers say that they are there, and their command."""
    folder = labs.directory / f"said-{len(labs.started)}"
    folder.mkdir()
    return folder, labs.python(BUSY, str(folder), how)


def wait_until_busy(labs: Labs, folder: Path) -> None:
    wait_for(lambda: len(list(folder.glob("up-*"))) == 2, "both workers")
    assert len(labs.find("sleep 1000")) == 2
    assert len(labs.namespaces) >= 8, (
        "pid, mount, and of three network and three hostname namespaces two each"
    )


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything_in_good_order(labs: Labs, signum: int, status: int) -> None:
    folder, command = up(labs)
    process = labs.start(command)
    wait_until_busy(labs, folder)
    process.send_signal(signum)
    code, out, err = labs.end(process)
    assert code == status, out + err
    assert err.splitlines()[-1] == f"atoll: stopped by {'Ctrl-C' if status == 130 else 'SIGTERM'}"
    assert "the lab ran for" in out, "a report, all the same"
    assert len(list(folder.glob("interrupted-*"))) == (2 if status == 130 else 0)
    assert labs.record()["status"] == status
    assert labs.left() == []


@pytest.mark.soak
def test_workers_that_do_not_end_are_killed_and_a_second_signal_kills_at_once(labs: Labs) -> None:
    took = []
    for signals in (1, 2):
        folder, command = up(labs, "stubborn")
        process = labs.start(command)
        wait_until_busy(labs, folder)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        if signals == 2:
            process.send_signal(signal.SIGTERM)
        assert labs.end(process)[0] == 130
        took.append(time.monotonic() - start)
        assert labs.left() == []
    assert took[1] < took[0]
    assert took[0] >= 5


@pytest.mark.parametrize("part", PARTS)
def test_whatever_is_killed_nothing_is_left_when_the_next_has_started(labs: Labs, part: str) -> None:
    folder, command = up(labs)
    process = labs.start(command)
    wait_until_busy(labs, folder)
    found = labs.part(part)
    assert found is not None
    found.send_signal(signal.SIGKILL)
    status, _, err = labs.end(process)
    assert status == (-9 if part == "runner" else 1), err
    if part != "runner":
        assert len(err.splitlines()) == 1, "one line"
        assert "killed" in err
        assert labs.left() == [], "what was not killed has cleaned up"
    before, labs.namespaces = labs.namespaces, {}
    seen = labs.directory / "seen"
    script = f"ls -A {labs.folders} > {seen}-$ATOLL_LAB_WORKER"
    status, out, err = labs.run(["sh", "-c", script])
    assert status == 0, out + err
    assert len(Path(f"{seen}-0").read_text().split()) == 1, "the second lab's own folder alone"
    labs.namespaces |= before
    assert labs.left() == []


def kill_at_random(labs: Labs, chance: random.Random) -> str:
    """Start a lab and kill a part of it, at a random moment of its first second."""
    _, command = up(labs)
    process = labs.start(command)
    moment = chance.random()
    part = chance.choice(PARTS)
    until = time.monotonic() + moment
    while time.monotonic() < until or labs.part(part) is None:
        if process.poll() is not None:
            break
        labs.alive()
    found = labs.part(part)
    if found is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.send_signal(signal.SIGKILL)
    status, out, err = labs.end(process)
    assert status in (1, -9), (part, moment, out, err)
    return part


def clean_run(labs: Labs) -> None:
    status, out, err = labs.run(["true"])
    assert status == 0, out + err
    assert labs.left() == []


def test_kills_at_random_moments(labs: Labs) -> None:
    chance = random.Random(5)
    for _ in range(3):
        kill_at_random(labs, chance)
    clean_run(labs)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_fifty_runs_of_which_ten_are_killed(labs: Labs) -> None:
    chance = random.Random(11)
    killed = set(chance.sample(range(49), 10))
    for run in range(50):
        if run in killed:
            kill_at_random(labs, chance)
        else:
            clean_run(labs)


def test_the_first_failing_worker_gives_the_status_and_ends_the_others(labs: Labs) -> None:
    status, out, err = labs.run(["sh", "-c", "[ {worker} = 0 ] && exec sleep 1000; exit 7"])
    assert status == 7, out + err
    assert err.splitlines() == ["atoll: worker berlin 1 ended with status 7"]
    assert labs.left() == []


def test_a_killed_worker_is_left_out(labs: Labs, tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"until [ -e {go} ]; do sleep 0.02; done; echo went on"
    process = labs.start(["sh", "-c", f"if [ {{worker}} = 0 ]; then {wait}; else kill -9 $$; fi"])
    assert process.stderr is not None
    assert process.stderr.readline() == "atoll: worker berlin 1 was killed by signal 9; the others go on\n"
    go.touch()
    status, out, err = labs.end(process)
    assert "[paris 0] went on" in out
    assert status == 137, out + err
    assert err.splitlines() == ["atoll: worker berlin 1 was killed by signal 9"]


def test_orphans_of_workers_end_with_the_lab(labs: Labs) -> None:
    status, out, err = labs.run(["sh", "-c", "setsid sleep 1000 & exit 0"])
    assert status == 0, out + err
    assert labs.left() == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ["no-such-command"],
            "no-such-command: no such command; it is looked for in the directories of PATH",
        ),
        (["./nothing.sh"], "./nothing.sh: no such file"),
        (["/"], "/: is a directory; give a command"),
        (["lab.toml"], "lab.toml: no such command; it is looked for in the directories of PATH"),
        (["./lab.toml"], "./lab.toml: may not be executed (chmod +x)"),
        (["./{site}"], "./paris: no such file"),
    ],
)
def test_a_command_that_is_none_is_one_line_before_anything_is_made(
    labs: Labs, command: list[str], said: str
) -> None:
    status, out, err = labs.run(command)
    assert (status, out, err) == (2, "", f"atoll: {said}\n")
    assert not (labs.directory / "records-lab-0").exists()
    assert labs.left() == []


def test_a_command_that_cannot_be_started_is_one_line(labs: Labs) -> None:
    script = labs.directory / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    status, _, err = labs.run(["./script"])
    assert (status, err) == (2, "atoll: ./script: cannot be started: No such file or directory\n")
    assert labs.left() == []


def test_records_are_not_written_over(labs: Labs) -> None:
    (labs.directory / "records-lab-0").mkdir()
    (labs.directory / "records-lab-0" / "lab.json").write_text("{}")
    status, _, err = labs.run(["true"])
    assert status == 2
    assert err == "atoll: records-lab-0: holds a lab's records already; remove it, or give another folder\n"


def test_forbidden_namespaces_are_one_line_that_says_what_to_do(labs: Labs) -> None:
    """As where the kernel refuses: `unshare` says so."""
    tools = labs.directory / "tools"
    tools.mkdir()
    fake = tools / "unshare"
    fake.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    fake.chmod(0o755)
    status, out, err = labs.run(["true"], TWO, PATH=f"{tools}:/usr/bin:/bin:{Path(sys.executable).parent}")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "run it as root" in err
    assert "sysctl" in err
    assert "unshare failed: Operation not permitted" in err
    assert labs.left() == []


def test_a_first_process_that_is_not_bound_to_unshare_ends_too(labs: Labs) -> None:
    """As where `unshare` is killed between its fork and its prctl, or is an older one."""
    real = f"exec {shutil.which('unshare')}"
    tools = labs.directory / "tools"
    tools.mkdir()
    fake = tools / "unshare"
    fake.write_text(f'#!/bin/bash\n{real} "${{@/#--kill-child=KILL/--fork}}"\n')
    fake.chmod(0o755)
    folder, command = up(labs)
    process = labs.start(command, PATH=f"{tools}:{os.environ['PATH']}")
    wait_until_busy(labs, folder)
    found = labs.part("unshare")
    assert found is not None
    found.send_signal(signal.SIGKILL)
    status, _, err = labs.end(process)
    assert status == 1
    assert "killed" in err
    assert labs.left() == []
