"""Settings of glibc's heap, for workers that train on a CPU, for shards and for CPU sides.

Each step allocates and frees activations and gradients, and a shard allocates and frees received chunks. By
default glibc returns freed memory at the top of its heap to the system, and the next layer faults it in
again: up to 7,000 page faults, a tenth of the time, in a step of a small GPT (docs/notes/gradients.md).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # mallopt's parameters, from malloc.h
_KEPT = 2**30  # bytes that may lie free at the top of the heap
_LARGEST_ON_HEAP = 2**22  # bytes; larger tensors come from the system and go back to it, leaving no holes
_LARGEST_MESSAGE = 2**25  # bytes: the highest bound that glibc accepts
_PARTS = 64  # a tensor of more than this part of the budget comes from the system, too
# Bytes: glibc's own bound, below which a system call costs more than a copy.
_LEAST_FROM_SYSTEM = 2**17

_FIRST_STEPS = 2  # steps in which lasting memory (an optimizer's state) is still allocated
_GROWTH = 32  # a process that grows by more than this part of the budget gives free memory back
_STATM = Path("/proc/self/statm")


def keep_freed_memory(
    *, messages: bool = False, budget: int | None = None, environment: Mapping[str, str] | None = None
) -> bool:
    """Let glibc keep up to 1 GiB of freed memory for later allocations; returns True if glibc accepts.

    Does nothing with another C library, or if the user has set glibc's own variables.

    Args:
        messages: chunks come as messages, which a thread of ZeroMQ allocates. All threads then share one
            heap, since glibc keeps at most 64 MB of a thread's own heap. Call before any other thread
            starts, so before torch is imported: a thread keeps the heap that it has.
        budget: bytes that the process should hardly exceed. A heap loses a few times the size of its largest
            tensors in holes, so tensors over a 64th of the budget come from the system one by one, at the
            price of page faults.
        environment: the environment variables, if not this process's.
    """
    environment = os.environ if environment is None else environment
    chosen = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if platform.libc_ver()[0] != "glibc" or any(name in environment for name in chosen):
        return False
    largest = _LARGEST_MESSAGE if messages else _LARGEST_ON_HEAP
    if budget is not None:
        largest = min(largest, max(budget // _PARTS, _LEAST_FROM_SYSTEM))
    # Setting one threshold ends glibc's own fitting of the other, so both are set.
    settings = {
        _MMAP_THRESHOLD: largest,
        _TRIM_THRESHOLD: _KEPT,
        **({_ARENA_MAX: 1} if messages else {}),
    }
    mallopt = ctypes.CDLL(None).mallopt
    return [mallopt(name, value) for name, value in settings.items()] == [1] * len(settings)


def give_back_freed_memory() -> None:
    """Give the free memory of glibc's heap back to the system, with holes; nothing for another C library.

    glibc up to 2.37 cannot use the memory of a freed aligned tensor for another one of equal size, since it
    looks for a larger piece. torch asks for aligned memory, so a process that allocates and frees large
    tensors of one size would grow without end (docs/notes/memory.md).
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


class FreedMemory:
    """Decides when a process that trains under a budget gives free memory of its heap back.

    A step that begins without free memory leaves the memory of one step free, and the next step uses that. To
    give it back costs the page faults of a whole step, a tenth of the step's time for a small model. So
    memory is given back only once the process has grown beyond such a step by more than a 32nd of `budget`
    bytes, through holes or through work between steps.
    """

    def __init__(self, budget: int) -> None:
        self._allowed = budget // _GROWTH
        self._steps = 0
        self._usual: int | None = None  # bytes after a step that began without free memory

    def handle_step_ended(self, resident: int) -> bool:
        """Return True if memory should be given back; `resident` is the process's bytes in memory now."""
        self._steps += 1
        if self._steps <= _FIRST_STEPS:
            return True
        if self._usual is None:
            self._usual = resident
        elif resident > self._usual + self._allowed:
            self._usual = None
            return True
        return False

    def step_ended(self) -> None:
        """Give free memory back if that is due, or always if the process's size is unknown."""
        resident = process_bytes()
        if resident is None or self.handle_step_ended(resident):
            give_back_freed_memory()


def process_bytes() -> int | None:
    """Return this process's bytes in memory, or None if the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
