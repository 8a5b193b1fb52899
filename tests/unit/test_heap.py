"""The C library is told to keep freed memory, unless the user has said something else."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from atoll.train.heap import keep_freed_memory

FAULTS = """
import resource, sys, torch
from atoll.train.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory({})
def churn(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        held = [torch.ones(250_000) for _ in range(32)]  # 32 times 1 MB, freed together
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
churn(2)
print(churn(5))
"""


def faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc: nothing is set")
def test_freed_memory_is_not_faulted_in_again() -> None:
    assert faults("keep") < 0.1 * faults("default")


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_user_has_set_is_left_alone(name: str) -> None:
    assert not keep_freed_memory({name: "1"})
