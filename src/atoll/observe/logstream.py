"""Standard output and error of a process that writes to a log: a full disk costs lines, not the process.

In plain Python a print to a full disk raises OSError, at a line of the script that is not at fault.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable

# Errors of a disk that takes no bytes.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})


class _Log(io.RawIOBase):
    """Writes to `descriptor`; bytes that the disk does not take are counted and reported to `lost`."""

    name = "<log>"

    def __init__(self, descriptor: int, lost: Callable[[int, OSError], None]) -> None:
        self._descriptor, self._tell_lost = descriptor, lost
        self._gap = 0  # bytes lost since the latest write that succeeded

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return False

    def write(self, data: bytes) -> int:  # type: ignore[override]
        view, done = memoryview(data).cast("B"), 0
        try:
            if self._gap and len(view):
                note = f"\n[{self._gap} bytes are missing here: the disk was full]\n".encode()
                if os.write(self._descriptor, note) == len(note):
                    self._gap = 0
            while done < len(view):
                done += os.write(self._descriptor, view[done:])
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._gap += len(view) - done
            self._tell_lost(len(view) - done, error)
        return len(view)


class LogStreams:
    """Makes sys.stdout and sys.stderr survive a full disk; `lost` counts the bytes that were not written.

    `tell` is called with the system's error text at the first loss. It may print.
    """

    def __init__(self, tell: Callable[[str], None] = lambda _why: None) -> None:
        self.lost = 0
        self._tell = tell

    def install(self) -> None:
        """Replace the two streams by ones that write to descriptors 1 and 2."""
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            before = getattr(sys, name)
            if isinstance(before, io.TextIOWrapper):
                with contextlib.suppress(OSError):
                    before.flush()
                stream = io.TextIOWrapper(
                    _Log(descriptor, self._count),  # raw, without a buffer, as under `python -u`
                    encoding=before.encoding,
                    errors=before.errors,
                    line_buffering=before.line_buffering,
                    write_through=True,
                )
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)

    def _count(self, lost: int, error: OSError) -> None:
        first, self.lost = not self.lost, self.lost + lost
        if first and lost:
            self._tell(error.strerror or str(error))
