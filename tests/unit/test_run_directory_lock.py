"""One run at a time in a run directory, and one clock for all of its records."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import UserError
from atoll.core.events import StepDone, encode
from atoll.core.runclock import CLOCK_VARIABLE, clock_setting, record_time
from atoll.observe.report import redraw
from atoll.observe.rundir import RunDirectory, UsedError

HOLD = """
import sys
from pathlib import Path
from atoll.observe.rundir import RunDirectory
claim = RunDirectory(Path(sys.argv[1])).claim()
print("held", flush=True)
sys.stdin.read()
"""


def begin_journal(run: RunDirectory) -> None:
    event = StepDone(time=1.0, worker=0, iteration=1, samples=1, seconds=0.1, waiting=0.0, bytes_sent=0)
    run.journal(0).write_bytes(encode(event) + b"\n")


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "a\x7f", "a\tb/c"])
def test_a_name_that_would_tear_the_lines_about_the_run_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="holds control characters; give another name"):
        RunDirectory(tmp_path / name).claim()
    assert not list(tmp_path.iterdir())
    RunDirectory(tmp_path / os.fsdecode(b"caf\xe9 'a' \"b\"")).claim().release()


def test_a_second_run_is_refused_until_the_first_one_is_killed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        line = f"{run.path}: a run is at work there (process {first.pid}); wait for its end, or give another"
        with pytest.raises(UsedError, match=re.escape(line)):
            run.claim()
        begin_journal(run)  # nobody is told to remove the directory of a run that is under way
        with pytest.raises(UsedError, match=re.escape(line)):
            run.claim()
        with pytest.raises(UsedError, match=re.escape(line)):
            redraw(run)
        first.send_signal(signal.SIGKILL)
        first.wait(10)
    with pytest.raises(UsedError, match="holds a run already"):
        run.claim()
    run.journal(0).unlink()
    run.claim().release()


def test_a_claim_is_released_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    claim = run.claim()
    with pytest.raises(UsedError, match="a run is at work there"):
        run.claim()
    claim.release()
    again = run.claim()
    claim.release()
    with pytest.raises(UsedError, match="a run is at work there"):
        run.claim()
    again.release()


def test_one_that_began_and_ended_meanwhile_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, flock = RunDirectory(tmp_path / "run"), fcntl.flock

    def late(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        begin_journal(run)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UsedError, match="holds a run already"):
        run.claim()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    claim = RunDirectory(tmp_path / "run").claim()
    assert claim.trouble.endswith("; nothing keeps a second run out of the run directory")
    assert os.strerror(code) in claim.trouble
    claim.release()


@pytest.mark.parametrize(
    ("code", "is_refused"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EROFS, True)]
)
def test_a_lock_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_refused: bool
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", fail)
    if is_refused:
        with pytest.raises(UserError, match="run: cannot write there: Read-only file system"):
            RunDirectory(tmp_path / "run").claim()
    else:
        assert os.strerror(code) in RunDirectory(tmp_path / "run").claim().trouble


# -- the clock -----------------------------------------------------------------------------------------------


SHOW = """
import time
ahead = time.time() + 3600
time.time = lambda: ahead
from atoll.core.runclock import record_time
print(record_time())
"""


def shown(setting: str) -> float:
    environment = {**os.environ, CLOCK_VARIABLE: setting}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return float(done.stdout)


def test_a_process_whose_wall_clock_is_an_hour_ahead_counts_as_the_others_do() -> None:
    before = record_time()
    assert before < shown(clock_setting()) < record_time()


@pytest.mark.parametrize(
    "setting", ["", "nan x", "1e999 x", "rubbish", "12345.0 of another machine", "\udcff"], ids=ascii
)
def test_a_clock_of_another_machine_or_none_is_not_taken(setting: str) -> None:
    assert shown(setting) > record_time() + 3000


def test_the_clock_is_the_wall_clocks_time() -> None:
    assert record_time() == pytest.approx(time.time(), abs=60.0)


@pytest.mark.parametrize("odd", ["long", "loop", "file", "dangling", "below a file", "logs is a file"])
def test_a_directory_that_cannot_be_is_refused_in_one_line(odd: str, tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300 if odd == "long" else "run")
    if odd == "loop":
        path.symlink_to(path)
    elif odd == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif odd in ("file", "below a file"):
        path.touch()
    elif odd == "logs is a file":
        path.mkdir()
        (path / "logs").symlink_to(tmp_path / "nowhere")
    path = path / "below" if odd == "below a file" else path
    with pytest.raises(UserError, match="cannot make the run directory: .*; give another") as raised:
        RunDirectory(path).claim()
    assert "\n" not in str(raised.value)
    assert odd != "dangling" or "a link that leads nowhere is there" in str(raised.value)
    assert odd != "file" or "a file is there" in str(raised.value)


@pytest.mark.parametrize("how", ["removed", "moved", "removed and made again"])
def test_a_directory_that_goes_in_mid_run_is_told_of(how: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    claim = run.claim()
    assert claim.removed == ""
    if how == "moved":
        run.path.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(run.path)
    if how == "removed and made again":
        run.claim().release()
    assert f"{run.path}: was removed or moved while the run was at work" in claim.removed
    claim.release()
    assert claim.removed == ""
