"""What `make check` does with tests that fail: tests/check.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "check.py"
ONCE = """
import pathlib, pytest
pytestmark = pytest.mark.check

def test_that_passes():
    pass

def test_that_fails_once():
    here = pathlib.Path("was_here")
    if not here.exists():
        here.touch()
        raise AssertionError
"""
TWICE = """

def test_that_fails():
    raise AssertionError
"""


def checked(folder: Path, tests: str) -> tuple[int, str]:
    (folder / "test_some.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = check\n    soak\n")
    command = [sys.executable, CHECK, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("tests", "status", "last"),
    [
        (ONCE, 0, ["test_some.py::test_that_fails_once: passed only in a second run, alone"]),
        (
            ONCE + TWICE,
            1,
            [
                "test_some.py::test_that_fails_once: passed only in a second run, alone",
                "test_some.py::test_that_fails: failed twice",
            ],
        ),
    ],
    ids=["once", "twice"],
)
def test_who_fails_runs_again_alone_and_is_named_last(
    tmp_path: Path, tests: str, status: int, last: list[str]
) -> None:
    ended, output = checked(tmp_path, tests)
    assert ended == status, output
    assert output.splitlines()[-len(last) :] == last
