"""`atoll run` at odd moments: a signal before anything runs or after all has ended, a directory that is gone.

The workers are launches of their own and import no torch: what is tested is the command.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from own_events import ALONE, PREAMBLE
from run_command import DEADLINE, Command, wait_for

ENTRY = "from atoll.cli.entry import main; main()"
STEPS = "step(1)\nstep(2)\nsay(Finished, iteration=2)\n"


def catches(pid: int, signum: signal.Signals) -> bool:
    """True where a process has a handler for the signal."""
    caught = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)


@pytest.mark.parametrize("options", [[], ALONE], ids=["torchrun", "launches"])
def test_sigterm_at_any_moment_is_told(tmp_path: Path, options: list[str]) -> None:
    """From the first on: the command's own modules are imported then, and later the hub is waited for."""
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    for moment in (0.0, 0.1, 0.4, 1.0):
        begun = subprocess.Popen(
            [sys.executable, "-c", ENTRY, "run", "--workers", "2", *options, "train.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(lambda: catches(begun.pid, signal.SIGTERM), "the command's first moment")  # noqa: B023
        time.sleep(moment)
        begun.send_signal(signal.SIGTERM)
        out, err = begun.communicate(timeout=DEADLINE)
        assert (begun.returncode, out) == (143, ""), err
        assert err.splitlines()[-1] == "atoll: stopped by SIGTERM"
        assert "Traceback" not in err


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_the_picture_is_drawn_loses_nothing_else(
    command: Command, signum: signal.Signals, status: int
) -> None:
    stub = command.directory / "stubs" / "matplotlib"
    stub.mkdir(parents=True)
    stops = "import pathlib, time\npathlib.Path('draws').touch()\ntime.sleep(600)\n"
    (stub / "__init__.py").write_text(stops)
    environment = {"PYTHONPATH": f"{stub.parent}:{os.environ.get('PYTHONPATH', '')}"}
    process = command.start(PREAMBLE + STEPS, options=ALONE, environment=environment)
    wait_for((command.directory / "draws").exists, "the picture's process")
    process.send_signal(signum)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == status, err
    assert "atoll: run/report.png was not drawn: it was stopped\n" in err
    assert err.splitlines()[-1] == "atoll: see run: summary.json, metrics.jsonl, logs"
    assert command.summary()["steps"] == 2
    assert not command.alive()


@pytest.mark.parametrize("ending", ["end", "killed", "raise"])
def test_no_line_names_a_file_that_was_removed_in_mid_run(command: Command, ending: str) -> None:
    script = PREAMBLE + "step(1)\nPath('going').touch()\nwait_for('gone')\n"
    script += {"killed": "os.kill(os.getpid(), 9)", "raise": "raise ValueError('the cause')"}.get(ending, "")
    process = command.start(script, options=ALONE)
    wait_for((command.directory / "going").exists, "the first step")
    while (command.directory / "run").exists():  # a worker may be writing there
        shutil.rmtree(command.directory / "run", ignore_errors=True)
    (command.directory / "gone").touch()
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == (0 if ending == "end" else 1), err
    assert "atoll: warning: run: was removed or moved while the run was at work;" in err
    if ending == "raise":
        assert "ValueError at train.py:" in err.splitlines()[-2 if "atoll: then " in err else -1]
    assert "report.png" not in err
    named = re.findall(r"log is (\S+)", err)
    for line in re.findall("atoll: see run: (.*)", err):
        named += [f"run/{name}" for name in line.split(", ")]
    assert all((command.directory / name).exists() for name in named), err  # the summary is written anew


@pytest.mark.parametrize("strategy", ["ring", "server"])
@pytest.mark.parametrize("files", [10, 20])
def test_too_few_files_are_the_last_line(tmp_path: Path, strategy: str, files: int) -> None:
    """The hub's reason is in its log, which nobody looks at first."""
    (tmp_path / "train.py").write_text("")
    run = [sys.executable, "-c", ENTRY, "run", "--workers", "1", "--strategy", strategy, *ALONE, "train.py"]
    limited = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *run]
    ended = subprocess.run(
        limited, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert ended.returncode == 1, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert re.fullmatch(r"atoll: the hub.*: [Tt]oo many open files.* \(ulimit -n\)", last), ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_script_that_joins_nobody_is_told_of(tmp_path: Path) -> None:
    """As one that was written for plain PyTorch; who asks for help is left in peace."""
    (tmp_path / "train.py").write_text("import sys\nprint('trained')\nsys.exit()\n")

    def last_of(*words: str, workers: int = 2) -> str:
        ended = subprocess.run(
            [sys.executable, "-c", ENTRY, "run", "--workers", str(workers), *ALONE, "train.py", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
        return ended.stderr

    said = "atoll: no worker called atoll.join: "
    assert last_of() == f"{said}2 workers ran train.py, and Atoll synchronised nothing between them\n"
    assert last_of(workers=1) == f"{said}train.py ran once, without Atoll\n"
    assert last_of("--help") == ""
