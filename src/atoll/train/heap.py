"""How the C library gives freed memory back, on workers that train on a CPU.

A step allocates and frees its activations and gradients again and again. By default glibc returns freed
memory at the top of its heap to the system, and the next layer faults it in again: measured as up to 7,000
page faults, a tenth of the time, in a step of a small GPT (docs/notes/gradients.md).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's names for them, in malloc.h
_KEPT = 2**30  # bytes that may lie free at the top of the heap
_LARGEST_ON_HEAP = 2**22  # bytes; larger tensors come from the system and go back to it, leaving no holes


def keep_freed_memory(environment: Mapping[str, str] | None = None) -> bool:
    """Let glibc keep up to 1 GiB of freed memory for the next allocation; returns whether it was told so.

    Does nothing with another C library, and nothing where the user has set glibc's own variables.
    """
    environment = os.environ if environment is None else environment
    chosen = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if platform.libc_ver()[0] != "glibc" or any(name in environment for name in chosen):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Setting one ends glibc's own fitting of the other, so both are set.
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))
