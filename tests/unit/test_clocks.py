"""No decision goes by the wall clock, which may jump: each place that reads it is listed, with what for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "atoll"
# The wall clock, under whatever name; `time.monotonic` and `time.perf_counter` do not jump.
WALL = {"time.time", "time.time_ns", "time.strftime", "time.localtime", "time.gmtime", "time.ctime"}
ATTRIBUTES = {"st_mtime", "st_ctime", "st_atime", "utcnow", "fromtimestamp"}

_NAMED = "a new name, for people"
READS: dict[str, str] = {
    "core/runclock.py": "the time that records show: read once, then the monotonic clock counts",
    "hub/main.py": "a new name, and the time of a line, for people",
    "lab/inside.py": "the time that a record shows",
    "lab/runner.py": _NAMED,
    "launch/run.py": _NAMED,
    "server/snapshot.py": "which of two whole snapshots is the newer one, for who looks at them from outside",
    "train/api/uncaught.py": "torchrun compares the times of errors on its machine by it",
    "net/udp.py": "the kernel tells by it when a datagram came",
}


def wall_clock_in(source: str) -> Iterator[int]:
    """The lines that read the wall clock."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and (ast.unparse(node) in WALL or node.attr in ATTRIBUTES):
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for alias in node.names if f"time.{alias.name}" in WALL)


@pytest.mark.check
def test_who_reads_the_wall_clock() -> None:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if lines := list(wall_clock_in(path.read_text(encoding="utf-8"))):
            found[path.relative_to(SOURCE).as_posix()] = lines
    assert found.keys() == READS.keys(), {name: found.get(name) for name in found.keys() ^ READS.keys()}


@pytest.mark.parametrize(
    "source",
    [
        "import time\nnow = time.time()",
        "import time\nclock = time.time",
        "from time import time",
        "from pathlib import Path\nPath('x').stat().st_mtime",
        "import datetime\ndatetime.datetime.utcnow()",
    ],
)
def test_the_wall_clock_is_found(source: str) -> None:
    assert list(wall_clock_in(source))


def test_other_clocks_are_not() -> None:
    assert not list(wall_clock_in("import time\ntime.monotonic(), time.perf_counter(), time.sleep(1)"))
