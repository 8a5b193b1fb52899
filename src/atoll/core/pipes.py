"""Reading and writing of a pipe or a device that the user has named in place of a file.

The system's open of a named pipe waits without a deadline until somebody opens the other end. These functions
have one.
"""

from __future__ import annotations

import errno
import os
import select
import time
from pathlib import Path

PIPE_SECONDS = 10.0  # for the other end of a pipe to open, and to read or write


def read_start(path: str | os.PathLike[str], most: int, seconds: float = PIPE_SECONDS) -> bytes:
    """Return the first `most` bytes of a file or a pipe; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        until = time.monotonic() + seconds
        data = b""
        while len(data) < most:
            if not _is_ready(descriptor, select.POLLIN, until):
                raise OSError(errno.ETIMEDOUT, f"nobody has written to this pipe for {seconds:g} s", path)
            piece = os.read(descriptor, most - len(data))
            if not piece:
                break
            data += piece
        return data
    finally:
        os.close(descriptor)


def write_through(path: Path, data: bytes, seconds: float = PIPE_SECONDS) -> None:
    """Write `data` to a pipe or a device that exists. Raises OSError."""
    until = time.monotonic() + seconds
    too_late = OSError(errno.ETIMEDOUT, f"nobody has read from this pipe for {seconds:g} s", path)
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            break
        except OSError as error:
            if error.errno != errno.ENXIO or not path.is_fifo():
                raise
            if time.monotonic() > until:  # nobody has opened its other end
                raise too_late from None
            time.sleep(0.01)
    try:
        while data:
            if not _is_ready(descriptor, select.POLLOUT, until):
                raise too_late
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def _is_ready(descriptor: int, event: int, until: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1000))
