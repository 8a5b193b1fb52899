"""A torch that lacks a part which Atoll needs: a script hears of it in one line, before it trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
del torch._C._storage_Use_Count
import atoll
with atoll.join() as session:
    print("joined")
"""


def test_the_missing_part_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("atoll: torch ")
    assert "has no torch._C._storage_Use_Count, which atoll.tensors.torch_compat.storage_uses needs" in line
    assert (done.returncode, done.stdout) == (2, "")
