"""`atoll run` in a folder that is not UTF-8, on an ASCII-only terminal, with closed output, of a module.

The workers are launches of their own and import no torch: what is tested is the command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from own_events import ALONE, PREAMBLE
from run_command import DEADLINE

ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
COMMAND = [sys.executable, "-c", "from atoll.cli.entry import main; main()", "run", "--workers", "2", *ALONE]


def test_a_module_in_a_folder_that_is_not_utf8_on_a_terminal_that_is_ascii(tmp_path: Path) -> None:
    """Worker 0 is killed, so that lines about the run name the folder."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    (folder / "jobs").mkdir(parents=True)
    (folder / "jobs" / "train.py").write_text(
        PREAMBLE
        + "import signal\nstep(1)\nprint('loss 1 · ü', sys.argv[1:], __spec__.name, flush=True)\n"
        + "if RANK == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        + "journal_0 = Path(os.environ['ATOLL_RUN_DIRECTORY'], 'workers', '0.jsonl')\n"
        + "while not journal_0.exists() or 'killed' not in journal_0.read_text(): time.sleep(0.05)\n"
        + "step(2)\nsay(Finished, iteration=2)\n",
        encoding="utf-8",
    )
    # As bytes, for Python's own encoding here may be UTF-8.
    ended = subprocess.run(
        [*map(os.fsencode, COMMAND), b"--set", b"run.directory=r\xff", b"-m", b"jobs.train", b"--lr", b"1"],
        cwd=folder,
        env={**os.environ, **ASCII},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE,
        check=False,
    )
    out, err = ended.stdout.decode("ascii"), ended.stderr.decode("ascii")
    assert ended.returncode == 0, err
    assert "loss 1 - \\xfc ['--lr', '1'] jobs.train" in out
    assert "Traceback" not in err
    assert r"what each one printed is in r\xff/logs" in err
    assert r"atoll: see r\xff: summary.json, metrics.jsonl, report.png, logs" in err
    summary = json.loads((folder / os.fsdecode(b"r\xff") / "summary.json").read_text(encoding="utf-8"))
    assert any(r"r\xff/logs" in event.get("reason", "") for event in summary["events"])


def test_output_and_errors_that_are_closed(tmp_path: Path) -> None:
    """As `atoll run ... >&- 2>&-`: no file of the run takes their place."""
    (tmp_path / "train.py").write_text(
        PREAMBLE + "print('word', RANK, flush=True)\nstep(1)\nsay(Finished, iteration=1)\n"
    )
    shell = 'exec "$@" <&- >&- 2>&-'
    command = ["bash", "-c", shell, "-", *COMMAND, "--set", "run.directory=run", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, timeout=DEADLINE, check=False)
    assert ended.returncode == 0
    run = tmp_path / "run"
    assert json.loads((run / "summary.json").read_text())["steps"] == 1
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    said = {path.name: path.read_text() for path in (run / "logs").glob("worker-*.log")}
    assert said == {f"worker-{rank}.log": f"word {rank}\n" for rank in range(2)}


def test_a_command_beside_a_reader_that_has_ended(tmp_path: Path) -> None:
    """As `atoll check atoll.toml | true`: no traceback, neither from the command nor from Python's end."""
    reader, writer = os.pipe()
    os.close(reader)
    (tmp_path / "atoll.toml").write_text("[run]\nworkers = 2\n")
    code = "import time; from atoll.cli.entry import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "check", "atoll.toml"],
        cwd=tmp_path,
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=DEADLINE,
        check=False,
    )
    os.close(writer)
    assert ended.stderr.decode().splitlines() in ([], ["atoll.toml: right"])
    assert ended.returncode in (0, 1)
