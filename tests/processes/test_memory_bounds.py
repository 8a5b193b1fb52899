"""What a process takes that trains under budgets is what the formula in docs/memory.md says."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import memory_bounds
import pytest

MIB = 2**20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the formula is for glibc's heap, on Linux")
@pytest.mark.parametrize(
    "family",
    [
        each if each == "transformer" else pytest.param(each, marks=pytest.mark.soak)
        for each in memory_bounds.FAMILIES
    ],
)
def test_the_process_takes_what_the_formula_says(family: str, tmp_path: Path) -> None:
    """From the building of the model to the last step: the most that it ever took."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    run = subprocess.run(
        [sys.executable, memory_bounds.__file__, family, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=clean,
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert said["need"] > said["device"] + said["host"] + 25 * MIB
    assert said["disk"] > 25 * MIB
    tables = 3 * 2**10 * said["payloads"] + 2 * 2**16
    formula = said["device"] + said["host"] + said["activations"] + said["gradients"] + tables
    assert 0.9 * formula <= said["peak"] <= 1.1 * formula
