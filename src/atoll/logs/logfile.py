"""Files of frames, each appended to by one process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from atoll.core.descriptors import opened
from atoll.core.errors import AtollError
from atoll.logs.frames import Buffer, Frame, Kind, frames, is_damaged, is_other_kind

_PIECES = 512  # buffers in one write; systems take 1024


class DamagedLogError(AtollError):
    """A file that is no log of its kind, or is damaged before its end; the message says where."""


def replay(raw: memoryview, kind: Kind, own: Callable[[int], bool] = lambda _stamp: True) -> Iterator[Frame]:
    """Yield each whole frame of a file, up to an incomplete end. `own` decides which stamps belong to this
    file.

    Raises DamagedLogError for a file of another kind or version, and if frames follow damage.
    """
    if is_other_kind(raw, kind):
        raise DamagedLogError(f"no {kind.name} that this version of Atoll can read, or damaged at byte 0")
    end = 0
    for frame in frames(raw, kind):
        if not own(frame.stamp):
            break
        yield frame
        end = frame.end
    if is_damaged(raw, end, kind, own):
        raise DamagedLogError(f"damaged at byte {end}")


def open_locked(path: Path, mode: int = 0o644) -> int:
    """Open a file with an exclusive lock, which ends with the process. Raises BlockingIOError if another
    process has it."""
    file = opened(lambda: os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, mode))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise
    return file


class LogFile:
    """An open log `file`, whole up to `end`. Appended data overwrite leftovers of an earlier use. Close it
    with `close` or `seal`."""

    def __init__(self, file: int, end: int = 0) -> None:
        self._file, self.end = file, end

    def append(self, pieces: Sequence[Buffer], *, sync: bool = False) -> None:
        """Write these bytes, with `sync` to the disk. On OSError the file ends where it did before."""
        left, end = [memoryview(piece) for piece in pieces], self.end
        try:
            while left:
                wrote = os.pwritev(self._file, left[:_PIECES], end)
                end += wrote
                done = 0
                while done < len(left) and wrote >= left[done].nbytes:
                    wrote -= left[done].nbytes
                    done += 1
                del left[:done]
                if wrote:
                    left[0] = left[0][wrote:]
            if sync:
                self.sync()
        except OSError:
            with contextlib.suppress(OSError):
                self.truncate()
            raise
        self.end = end

    def truncate(self) -> None:
        """Cut off everything behind the end."""
        os.ftruncate(self._file, self.end)

    def sync(self) -> None:
        """Wait until the data are on the disk."""
        os.fdatasync(self._file)

    def seal(self, *, sync: bool) -> None:
        """Truncate and close the file, which is complete."""
        try:
            self.truncate()
            if sync:
                self.sync()
        finally:
            self.close()

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
