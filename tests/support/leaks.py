"""What a process has open: for tests that all which was opened is closed again.

    before = still_open()
    ...
    assert not still_open() - before

Names are compared, not counted: see `still_open`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def still_open() -> set[str]:
    """This process's files and sockets, where the system shows them (Linux), and its threads, one name each:
    "file 7: socket:[4711]", "thread atoll-disk, 815".

    Compare names, not numbers of them: what a test before left to the garbage collector, or to a thread
    that is about to end, may close meanwhile.
    """
    found = {f"thread {each.name}, {each.native_id}" for each in threading.enumerate()}
    if not _DESCRIPTORS.exists():
        return found
    for number in os.listdir(_DESCRIPTORS):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the listing's own, or closed meanwhile
            found.add(f"file {number}: {(_DESCRIPTORS / number).readlink()}")
    return found
