"""How the C library gives freed memory back, on workers that train on a CPU and on shards.

A step allocates and frees its activations and gradients again and again, and a shard the chunks that come.
By default glibc returns freed memory at the top of its heap to the system, and the next layer faults it in:
measured as up to 7,000 page faults, a tenth of the time, in a step of a small GPT (docs/notes/gradients.md).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # mallopt's names for them, in malloc.h
_KEPT = 2**30  # bytes that may lie free at the top of the heap
_LARGEST_ON_HEAP = 2**22  # bytes; larger tensors come from the system and go back to it, leaving no holes
_LARGEST_MESSAGE = 2**25  # bytes: glibc takes no higher bound
_PARTS = 64  # of a budget: a tensor larger than one comes from the system, too
_LEAST_FROM_SYSTEM = (
    2**17
)  # bytes; glibc's own bound, below which a call of the system costs more than a copy

_FIRST_STEPS = 2  # after which what is made once (an optimizer's state) has been made
_GROWTH = 32  # of a budget: what a process may grow by before it gives back what is free
_STATM = Path("/proc/self/statm")


def keep_freed_memory(
    *, messages: bool = False, budget: int | None = None, environment: Mapping[str, str] | None = None
) -> bool:
    """Let glibc keep up to 1 GiB of freed memory for the next allocation; returns whether it was told so.

    `messages`: chunks come as messages, which a thread of ZeroMQ allocates. That thread then shares the one
    heap: of its own, glibc keeps no more than 64 MB, whatever it is told. So call it before the first socket.
    `budget`: bytes that the process is to take little more than. A heap loses some times the size of its
    largest tensors in holes that others of their size do not fill; so tensors over a 64th of the budget come
    from the system one by one, at the price of page faults.
    Does nothing with another C library, and nothing where the user has set glibc's own variables.
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
    """Give what is free on the heap back to the system, holes included; where it is not glibc's, nothing.

    glibc up to 2.37 cannot use what an aligned tensor has freed for another of the same size: torch asks for
    aligned memory, for which it looks for a larger piece. So what allocates and frees large tensors of one
    size grows without end (docs/notes/memory.md).
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


class FreedMemory:
    """When to give back what is free on the heap of a process that trains under a budget.

    A step that begins with nothing free leaves behind what steps take, and the next uses that again. To give
    it back costs the page faults of a whole step, a tenth of its time where the model is small; so it is only
    done where the process has grown by more than a 32nd of `budget` beyond such a step: by holes, or by what
    was done between two steps.
    """

    def __init__(self, budget: int) -> None:
        self._allowed = budget // _GROWTH
        self._steps = 0
        self._usual: int | None = None  # bytes at the end of a step that began with nothing free; not known

    def handle_step_ended(self, resident: int) -> bool:
        """`resident`: the process's bytes in memory now. Whether to give back."""
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
        """Give back what is free, where that is due; in each step where the system does not tell what the
        process has in memory."""
        resident = process_bytes()
        if resident is None or self.handle_step_ended(resident):
            give_back_freed_memory()


def process_bytes() -> int | None:
    """This process's bytes in memory; None where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
