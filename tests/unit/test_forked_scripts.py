"""A process that a script forks is not its worker: however it ends, the run hears nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import atoll
from atoll.core.config import Config, Run
from atoll.core.events import Ended, Failed, Finished
from atoll.launch.processes import PARENT_VARIABLE
from atoll.observe.journal import JournalReader
from atoll.observe.lastwords import LAST_WORDS_VARIABLE, LastWords
from atoll.observe.rundir import DIRECTORY_VARIABLE, RunDirectory
from atoll.train.api.place import Place

SCRIPT = """
import os, sys
ways = {"raise": lambda: 1 / 0, "exit": lambda: sys.exit(3), "interrupt": lambda: os.kill(os.getpid(), 2)}
for way in (*ways, "end"):
    child = os.fork()
    if child == 0:
        ways.get(way, int)()
        break
    os.waitpid(child, 0)
else:
    sys.exit(5)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the pipe of last words is Linux's")
def test_children_of_a_script_leave_no_word(tmp_path: Path) -> None:
    run, words = RunDirectory(tmp_path / "run"), LastWords()
    run.create()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "RANK": "0",
        DIRECTORY_VARIABLE: str(run.path),
        PARENT_VARIABLE: str(os.getpid()),
        LAST_WORDS_VARIABLE: words.where,
    }
    command = [sys.executable, "-m", "atoll.launch.worker", str(script)]
    assert subprocess.run(command, env=environment, timeout=60, check=False).returncode == 5
    said = [word for word in words.take() if isinstance(word, (Ended, Failed))]
    words.close()
    kept = [event for event in JournalReader(run.journal(0)).read() if isinstance(event, (Ended, Failed))]
    for ends in (said, kept):
        assert [(type(end), getattr(end, "status", None)) for end in ends] == [(Ended, 5)]
    assert "ZeroDivisionError" in run.log(0).read_text()


@pytest.mark.parametrize("fails", [False, True])
def test_a_session_is_left_by_its_own_process_alone(fails: bool, tmp_path: Path) -> None:
    session = atoll.join(Config(run=Run(directory=str(tmp_path / "run"))), place=Place())
    run = RunDirectory(tmp_path / "run")
    before = run.journal(0).read_bytes()
    child = os.fork()
    if child == 0:
        try:
            session.__exit__(ValueError if fails else None, None, None)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run.journal(0).read_bytes() == before
    session.close()
    kept = [event for event in JournalReader(run.journal(0)).read() if isinstance(event, Finished)]
    assert len(kept) == 1
