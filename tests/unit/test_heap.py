"""The C library is told to keep freed memory, unless the user has said something else."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from atoll.core.heap import FreedMemory, keep_freed_memory, process_bytes

KEPT = """
import sys
from pathlib import Path
from atoll.core.heap import FreedMemory, keep_freed_memory, process_bytes
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
if sys.argv[1] == "keep":
    assert keep_freed_memory(environment={})
elif sys.argv[1] == "budget":  # an array of 1 MB is more than a 64th of it
    assert keep_freed_memory(budget=2**25, environment={})
before = resident()
held = [bytearray(b"x") * 1_000_000 for _ in range(64)]  # from malloc, as a tensor's
del held
print(resident() - before)
"""


def bytes_kept(mode: str) -> int:
    # Not as whoever runs the tests has set it.
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", KEPT, mode],
        capture_output=True,
        text=True,
        check=True,
        env=clean,
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


def given_back(sizes: list[int], budget: int = 3200) -> list[bool]:
    freed = FreedMemory(budget)
    return [freed.handle_step_ended(size) for size in sizes]


def test_steps_that_take_what_the_first_ones_took_give_nothing_back() -> None:
    assert given_back([1000] * 6) == [True, True, False, False, False, False]


def test_what_has_grown_by_a_32nd_of_the_budget_is_given_back() -> None:
    # The third is what steps take; the fifth has grown by more than 100; the sixth is what they take now.
    assert given_back([1000, 1200, 1300, 1400, 1401, 1350, 1450, 1451]) == [
        *(True, True, False, False, True),
        *(False, False, True),
    ]


def test_one_that_shrinks_may_grow_to_what_it_was() -> None:
    assert not any(given_back([1000, 1000, 2000, 500, 2000, 2100])[2:])


def test_a_process_knows_its_bytes() -> None:
    bytes_ = process_bytes()
    assert bytes_ is None or bytes_ > 2**20
