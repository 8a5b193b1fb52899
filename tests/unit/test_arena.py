"""Arenas: exact accounting over any order of takes and gives, runs, generations, poison, and clear errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import RunError, UserError
from atoll.memory.arena import POISON_VARIABLE, Arena, Block

MIB = 2**20


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_the_accounts_are_exact_and_no_block_is_given_out_twice(
    blocks: int, calls: list[tuple[bool, int]]
) -> None:
    arena = Arena(blocks * 64 + 63, 64, poison=False)
    held: list[tuple[Block, int]] = []
    owners = [0] * blocks  # 0: nobody
    peak = 0
    for number, (takes, value) in enumerate(calls, 1):
        if takes:
            count = value + 1
            room = max(
                (len(run) for run in re.findall("0+", "".join("01"[o > 0] for o in owners))), default=0
            )
            if count > room:
                with pytest.raises(UserError, match=r"memory\.host: .* in a row"):
                    arena.take(count)
                continue
            block = arena.take(count)
            own = range(block.first, block.first + count)
            assert not any(owners[each] for each in own)
            for each in own:
                owners[each] = number
            block.memory.fill_(number % 251)
            held.append((block, number))
        elif held:
            block, number = held.pop(value % len(held))
            assert bool((block.memory == number % 251).all())  # nobody else wrote there
            assert arena.is_current(block)
            arena.give(block)
            owners = [0 if owner == number else owner for owner in owners]
        used = sum(owner > 0 for owner in owners) * 64
        peak = max(peak, used)
        assert (arena.used, arena.peak) == (used, peak)
        assert all(arena.is_current(each) for each, _ in held)
        text = "".join("01"[owner > 0] for owner in owners)
        assert arena._free == [(run.start(), len(run[0])) for run in re.finditer("0+", text)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 10), st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True), st.integers(1, 6)
)
def test_the_least_budget_that_an_error_names_is_enough_and_the_least_that_is(
    blocks: int, taken: list[int], count: int
) -> None:
    def filled(nbytes: int) -> Arena:
        arena = Arena(nbytes, 64)
        for block in taken:
            if block < blocks:
                arena.take(at=block)
        return arena

    try:
        filled(blocks * 64).take(count)
    except UserError as error:
        least = int(re.search(r"at least (\d+) bytes", str(error))[1])  # type: ignore[index]
        filled(least).take(count)
        if least > blocks * 64 + 64:
            with pytest.raises(UserError):
                filled(least - 64).take(count)


def test_a_run_is_contiguous_in_the_smallest_gap_that_has_it() -> None:
    arena = Arena(10 * 128, 128)
    parts = [arena.take(count) for count in (2, 1, 3, 1, 3)]
    assert arena.used == arena.nbytes == 1280
    arena.give(parts[2])
    arena.give(parts[0])
    assert arena._free == [(0, 2), (3, 3)]
    with pytest.raises(
        UserError, match=r"512 B in a row: 640 B of 1\.2 KiB are free, 384 B of them in a row"
    ):
        arena.take(4)
    run = arena.take(2)
    assert (run.first, run.memory.numel()) == (0, 256)
    assert run.memory.data_ptr() + 256 == parts[1].memory.data_ptr()


def test_a_block_where_the_caller_wants_it() -> None:
    arena = Arena(8 * 64, 64)
    block = arena.take(2, at=3)
    assert (block.first, arena._free) == (3, [(0, 3), (5, 3)])
    with pytest.raises(ValueError, match="host tier: blocks 2 to 3 are not all free"):
        arena.take(2, at=2)
    with pytest.raises(ValueError, match="blocks 7 to 8"):
        arena.take(2, at=7)


def test_generations_tell_an_old_block_from_a_new_one_in_its_place() -> None:
    arena = Arena(4 * 64, 64, what="device")
    old = arena.take(2)
    arena.give(old)
    assert not arena.is_current(old)
    with pytest.raises(ValueError, match="device tier: block 0 was given back before"):
        arena.give(old)
    new = arena.take(2)
    assert (new.first, new.count) == (old.first, old.count)
    assert new.generation > old.generation
    assert arena.is_current(new)
    assert not arena.is_current(old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_under_poison_what_was_given_back_is_nan(dtype: torch.dtype) -> None:
    arena = Arena(4 * 64, 64, poison=True)
    block = arena.take(2)
    kept = block.view(8, dtype)
    assert bool(kept.isnan().all())  # before its first use too
    kept.fill_(1.0)
    arena.give(block)
    assert bool(kept.isnan().all())


def test_under_poison_a_write_through_a_kept_view_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POISON_VARIABLE, "1")
    arena = Arena(4 * 64, 64, what="device")
    block = arena.take(3)
    kept = block.view(48, torch.float32)
    arena.give(block)
    kept[20] = 1.0
    with pytest.raises(RunError, match=r"device tier: block 1 was written to .* \(at its byte 16\)"):
        arena.take(2)


def test_without_poison_nothing_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POISON_VARIABLE, raising=False)
    arena = Arena(64, 64)
    block = arena.take()
    block.memory.fill_(3)
    arena.give(block)
    assert bool((arena.take().memory == 3).all())


def test_blocks_begin_on_the_alignment_and_a_budget_is_never_passed() -> None:
    arena = Arena(10_000, 100, alignment=4096)
    assert (arena.block_bytes, arena.blocks, arena.nbytes) == (4096, 2, 8192)
    assert [arena.take().memory.data_ptr() % 4096 for _ in range(2)] == [0, 0]


def test_a_budget_below_one_block_says_the_least() -> None:
    with pytest.raises(UserError, match=r"memory\.device: 1000 .* at least 4194304 bytes \(4\.0 MiB\)"):
        Arena(1000, 4 * MIB, what="device")


def test_memory_that_the_system_does_not_have() -> None:
    with pytest.raises(
        UserError, match=r"memory\.host: 1048576\.0 GiB cannot be had on cpu: Cannot allocate"
    ):
        Arena(2**50, MIB)


def test_on_this_machine_pages_are_locked_or_it_says_why_not() -> None:
    arena = Arena(MIB, 2**16)
    locked, why = arena.lock_pages()
    assert locked == arena.take().memory.is_pinned() == torch.cuda.is_available()
    assert why == (
        "it was registered with the accelerator's runtime"
        if locked
        else "there is no accelerator whose runtime registers memory"
    )


def test_a_view_outlives_its_arena() -> None:
    view = Arena(MIB, MIB).take().view(4, torch.float32)
    view.fill_(2.0)
    assert view.sum() == 8.0


_CHILD_MAPS_THE_SAME_PLACE = """
import ctypes, gc, os
from atoll.memory.arena import Arena

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
READ_AND_WRITE, PRIVATE_AND_ANONYMOUS = 3, 0x22
arenas = [Arena(2**20, 4096, poison=False) for _ in range(2)]
for arena in arenas:
    arena.keep_from_children()
addresses = [arena.take(1).memory.data_ptr() for arena in arenas]
garbage = [arenas[0]]
garbage.append(garbage)  # collected in the child alone
gc.disable()
del arena, garbage
arenas[:1] = []
child = os.fork()
if not child:
    own = [libc.mmap(at, 2**20, READ_AND_WRITE, PRIVATE_AND_ANONYMOUS, -1, 0) for at in addresses]
    arenas.clear()
    gc.collect()
    for at in own:
        ctypes.memset(at, 1, 2**20)
    os._exit(0 if own == addresses else 9)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.check
@pytest.mark.skipif(sys.platform != "linux", reason="needs MADV_DONTFORK")
def test_a_forked_process_unmaps_no_memory_of_its_own_with_an_arena_that_it_did_not_get() -> None:
    """A DataLoader's process maps shared memory where the parent has an arena, and then collects garbage."""
    run = subprocess.run(
        [sys.executable, "-c", _CHILD_MAPS_THE_SAME_PLACE], capture_output=True, text=True, timeout=120
    )
    assert run.stdout.strip() == "0", run.stderr


_ONE_ALLOCATION = """
import resource
from pathlib import Path
import torch
from atoll.memory.arena import Arena

torch.set_num_threads(1)  # threads have stacks

def data():  # what RLIMIT_DATA counts, in KiB
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmData:")[1].split()[0])

before = data()
arena = Arena(96 * 2**20 + 5, 2**20, alignment=4096)
arena.keep_from_children()
print(data() - before, arena.nbytes)
arena.take(96).memory.fill_(1)
print(data() - before)
resource.setrlimit(resource.RLIMIT_DATA, (data() * 1024 + 2**20,) * 2)
try:
    Arena(96 * 2**20, 2**20)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.check
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_an_arena_is_one_allocation_of_exactly_its_bytes_and_counts_under_a_limit() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _ONE_ALLOCATION], capture_output=True, text=True, timeout=120, env=os.environ
    )
    said = run.stdout.splitlines()
    assert said[0].split() == [str(96 * 1024), str(96 * MIB)], run.stderr
    assert int(said[1]) <= 96 * 1024 + 512
    assert said[2].startswith("UserError memory.host: 96.0 MiB cannot be had on cpu: Cannot allocate memory")
