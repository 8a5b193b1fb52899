"""The C library is told to keep freed memory, unless the user has said something else."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from atoll.core.heap import keep_freed_memory

KEPT = """
import sys
from pathlib import Path
import torch
from atoll.core.heap import keep_freed_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
if sys.argv[1] == "keep":
    assert keep_freed_memory(environment={})
elif sys.argv[1] == "budget":  # a tensor of 1 MB is more than a 64th of it
    assert keep_freed_memory(budget=2**25, environment={})
before = resident()
held = [torch.ones(250_000) for _ in range(64)]  # 64 MB in all
del held
print(resident() - before)
"""


def bytes_kept(mode: str) -> int:
    # Not as whoever runs the tests has set it; and one thread, for others' stacks would count too.
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", KEPT, mode],
        capture_output=True,
        text=True,
        check=True,
        env={**clean, "OMP_NUM_THREADS": "1"},
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc: nothing is set")
def test_freed_memory_stays_for_the_next_allocation() -> None:
    assert bytes_kept("keep") > 50_000_000
    assert bytes_kept("default") < 10_000_000
    assert bytes_kept("budget") < 10_000_000


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_user_has_set_is_left_alone(name: str) -> None:
    assert not keep_freed_memory(environment={name: "1"})
