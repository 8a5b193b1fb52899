"""How much memory a worker may still take of its machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atoll.core.available import available_bytes

GIB = 2**30


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_what_the_kernel_calls_available(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:  2048 kB\n")
    assert available_bytes(tmp_path) == 2 * 2**20


def test_the_tightest_limit_of_a_control_group_counts_without_its_cache(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", f"MemAvailable: {8 * 2**20} kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    for path, most, taken in (("a/b", "max", GIB), ("a", str(4 * GIB), 3 * GIB), ("", "max", 6 * GIB)):
        write(tmp_path, f"sys/fs/cgroup/{path}/memory.max", f"{most}\n")
        write(tmp_path, f"sys/fs/cgroup/{path}/memory.current", f"{taken}\n")
    assert available_bytes(tmp_path) == GIB
    write(tmp_path, "sys/fs/cgroup/a/memory.stat", f"anon 7\ninactive_file {GIB}\n")
    assert available_bytes(tmp_path) == 2 * GIB


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", f"MemAvailable: {8 * 2**20} kB\n")
    write(tmp_path, "proc/self/cgroup", "5:cpu:/x\n4:memory,hugetlb:/job\n")
    write(tmp_path, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", f"{3 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory/job/memory.usage_in_bytes", f"{2 * GIB}\n")
    assert available_bytes(tmp_path) == GIB


@pytest.mark.parametrize(("workers", "share"), [("4", 4), ("1", 1), ("0", 1), ("many", 1)])
def test_the_workers_of_a_launch_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str, share: int
) -> None:
    write(tmp_path, "proc/meminfo", "MemAvailable: 4096 kB\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", workers)
    assert available_bytes(tmp_path) == 4 * 2**20 // share


def test_a_group_that_is_over_its_limit_has_nothing(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "5\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "7\n")
    assert available_bytes(tmp_path) == 0


def test_a_system_that_does_not_say_has_no_bound(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemAvailable: a lot\n")
    write(tmp_path, "proc/self/cgroup", "nonsense\n")
    assert available_bytes(tmp_path) == sys.maxsize
    assert 0 < available_bytes() < sys.maxsize
