"""The examples, as a newcomer starts them, at sizes that take seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMAND = "from atoll.cli.app import main; main()"
ATOLL_RUN = [sys.executable, "-c", COMMAND, "run", "--workers", "2"]
TINY = [*("--layers", "1"), *("--heads", "2"), *("--width", "16"), *("--context", "32"), *("--batch", "4")]
TINY += ["--eval-every", "3", "--bytes", "40000"]


def start(launcher: list[str], folder: Path, script: str, *arguments: str) -> str:
    """What the script prints; fails the test, with all of it, unless it ends well."""
    done = subprocess.run(
        [*launcher, str(EXAMPLES / script), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def number_before(words: str, text: str) -> float:
    found = re.search(r"([0-9.]+)  " + re.escape(words), text)
    assert found, text
    return float(found[1])


@pytest.mark.parametrize(
    "launcher", [PYTHON, pytest.param(TORCHRUN, marks=pytest.mark.soak)], ids=["alone", "torchrun"]
)
def test_digits_learns(tmp_path: Path, launcher: list[str]) -> None:
    said = start(launcher, tmp_path, "digits.py", "--epochs", "6")
    found = re.search(r"test accuracy ([0-9.]+)%", said)
    assert found, said
    assert float(found[1]) > 85


def test_gpt_goes_on_from_its_checkpoint_at_another_number_of_workers(tmp_path: Path) -> None:
    """Under torchrun, which is no launcher of Atoll's, it keeps the same records."""
    first = start(PYTHON, tmp_path, "gpt.py", *TINY, "--steps", "3", "--save", "kept")
    assert "checkpoint is in kept" in first
    (tmp_path / "atoll.toml").write_text('[run]\ndirectory = "run"\n')
    said = start(TORCHRUN, tmp_path, "gpt.py", *TINY, "--steps", "5", "--resume", "kept")
    assert 0 < number_before("this model", said) < 8.5  # a byte has 8 bits
    assert number_before("xz (preset 9e) going on", said) < number_before("xz (preset 9e) on", said)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["workers"], summary["samples"]) == (2, 2, 16.0)


@pytest.mark.soak
def test_gpt_under_atoll_run_ends_when_its_minutes_are_over(tmp_path: Path) -> None:
    said = start(ATOLL_RUN, tmp_path, "gpt.py", *TINY, "--minutes", "0.05")
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] % 10 == 0  # the clocks are compared every ten steps
    assert summary["last"]["held_out"] == pytest.approx(number_before("this model", said), abs=1e-3)


@pytest.mark.soak
def test_gpt_in_a_group_ends_with_its_windows_and_says_who_was_in_it(tmp_path: Path) -> None:
    launcher = [
        *ATOLL_RUN,
        "--strategy",
        "ps-hra",
        "--set",
        "sync.consistency=asp",
        "--set",
        "groups.count=1",
    ]
    launcher += ["--set", "run.directory=run"]
    said = start(launcher, tmp_path, "gpt.py", *TINY, "--windows", "400")
    assert 0 < number_before("this model", said) < 8.5
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["samples"] == 400
    assert [grouping["groups"] for grouping in summary["groupings"]] == [[[0], [1]], [[0, 1]]]
    assert "by their probe" in summary["groupings"][-1]["reason"]
    (together,) = [group for group in summary["each_group"] if group["workers"] == [0, 1]]
    assert together["ring"] > 0
    assert together["exchange"] > 0
    assert together["staleness"]["contributions"] == 2 * together["steps"]
