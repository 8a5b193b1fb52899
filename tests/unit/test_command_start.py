"""`atoll --help` starts at once: what it imports, and what it says is what the reference page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from generate import HOW, page_of_commands

ROOT = Path(__file__).parents[2]
SLOW = ("torch", "numpy", "zmq", "cryptography", "matplotlib", "rich", "multiprocessing", "atoll.train")
CODE = f"""
import sys
from atoll.cli import entry
sys.argv = ["atoll", "--help"]
try:
    entry.main()
finally:
    print("slow:", [name for name in {SLOW!r} if name in sys.modules])
"""


def test_the_command_imports_nothing_slow_for_its_help() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "slow: []"


def test_the_page_of_commands_is_current() -> None:
    text = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    assert text == page_of_commands(), f"run `{HOW}`"
