"""Output of text to a file such as standard output, whose reader may be slow, stopped or gone.

A thread writes, so the caller never waits, whatever the reader does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO

from atoll.core.characters import encoded

ROOM = 256 << 10  # bytes that may wait for the reader before `room` is 0
STALLED_SECONDS = 5.0  # without a byte taken, after which the reader is reported
_MOST = 4 * ROOM  # bytes that may wait at all; more text is dropped
_PIECE = 16 << 10  # bytes of one write: even a slow terminal shows progress
_LOOK_SECONDS = 0.02  # between two checks of the queue


class Outlet:
    """Writes to `file` from a thread of its own; has the methods of a file that rich needs.

    A file without a descriptor, such as io.StringIO, is written at once and without a thread. If `file` is
    None, since the process was started with this stream closed, text is dropped.

    No method waits, except `drain`, and none raises for an error of the reader.
    """

    def __init__(self, file: IO[str] | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._descriptor = _descriptor_of(file)
        self.encoding = (getattr(file, "encoding", None) or "utf-8") if file is not None else "utf-8"
        self.gone = "it was closed at the start" if file is None else ""  # reason why nothing can be written
        self.dropped = 0  # bytes
        self._waiting: deque[bytes] = deque()
        self._bytes = 0  # waiting bytes, including those that the thread is writing
        self._progress = clock()  # time at which bytes were last written, or the queue was last empty
        self._changed = threading.Condition()
        self._ends = False
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> int:
        """Queue `text`; it is dropped if the reader is gone or too much text waits."""
        if self._descriptor is None:
            self._write_at_once(text)
            return len(text)
        self.write_bytes(encoded(text, self.encoding))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Queue bytes; they are dropped if the reader is gone or too much waits.

        The file must have a descriptor.
        """
        with self._changed:
            if self.gone or self._bytes + len(data) > _MOST:
                self.dropped += len(data)
                return
            if not self._bytes:
                self._progress = self._clock()
            self._waiting.append(data)
            self._bytes += len(data)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="outlet", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Do nothing: the thread writes as fast as the reader reads."""

    def isatty(self) -> bool:
        """True for a terminal."""
        return self._file is not None and self._file.isatty()

    @property
    def room(self) -> int:
        """The bytes that fit into the queue now; 0 if the reader is gone."""
        return 0 if self.gone else max(0, ROOM - self._bytes)

    @property
    def idle(self) -> bool:
        """True when nothing waits to be written."""
        return not self._bytes

    @property
    def stalled(self) -> float:
        """Seconds for which text has waited without a byte being taken."""
        with self._changed:
            return self._clock() - self._progress if self._bytes and not self.gone else 0.0

    def drain(self, patience: float, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all is written, or nothing was taken for `patience` seconds, or `hurried` is true.

        A reader that takes a byte now and then has ten times as long. Returns True if all is written or the
        reader is gone.
        """
        until = self._clock() + 10 * patience
        while not self.idle and not self.gone:
            if self.stalled > patience or self._clock() > until or hurried():
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def close(self) -> None:
        """End the thread once the queue is written. The file stays open."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()

    def _write_at_once(self, text: str) -> None:
        if self._file is None or self.gone:
            self.dropped += len(text)
            return
        try:
            self._file.write(text)
            self._file.flush()
        except (OSError, ValueError) as error:
            self.gone = _reason(error)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ends:
                    self._changed.wait()
                if not self._waiting:
                    return
                data = self._waiting.popleft()
            try:
                for start in range(0, len(data), _PIECE):
                    self._write_piece(data[start : start + _PIECE])
            except OSError as error:
                with self._changed:
                    self.gone = _reason(error)
                    self.dropped += self._bytes
                    self._waiting.clear()
                    self._bytes = 0
                return

    def _write_piece(self, piece: bytes) -> None:
        assert self._descriptor is not None
        while piece:
            try:
                written = os.write(self._descriptor, piece)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
                    raise
                # Another process that shares the file has made it non-blocking.
                select.select([], [self._descriptor], [], 1.0)
                continue
            piece = piece[written:]
            with self._changed:
                self._bytes -= written
                self._progress = self._clock()


class Screen:
    """The streams of a command: `output` for the lines of the script, `errors` for all else.

    If one terminal, pipe or file takes both, they are one Outlet, which keeps the order of lines.
    """

    def __init__(self, output: IO[str] | None, errors: IO[str] | None) -> None:
        self.output, self.errors = Outlet(output), Outlet(errors)
        if same_reader(self.output, self.errors):
            self.output = self.errors
        self._reported: set[Outlet] = set()

    def say(self, *lines: str) -> None:
        """Write the command's own lines."""
        for line in lines:
            self.errors.write(line + "\n")

    def troubles(self) -> list[str]:
        """Return one new line for each reader that is gone, or has taken nothing for a while."""
        found = []
        for outlet in dict.fromkeys((self.output, self.errors)):
            trouble = f"cannot be written ({outlet.gone})" if outlet.gone else ""
            if not trouble and outlet.stalled > STALLED_SECONDS:
                trouble = f"has not been read for {STALLED_SECONDS:g} s"
            if trouble and outlet not in self._reported:
                self._reported.add(outlet)
                found.append(f"{self._name(outlet)} {trouble}")
        return found

    def close(self, patience: float, hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait until all is written, as `Outlet.drain` does, and end the threads."""
        for outlet in dict.fromkeys((self.output, self.errors)):
            outlet.drain(patience, hurried)
            outlet.close()

    def _name(self, outlet: Outlet) -> str:
        if self.output is self.errors:
            return "the terminal" if outlet.isatty() else "the standard output"
        return "the standard output" if outlet is self.output else "the standard error"


def same_reader(one: Outlet, other: Outlet) -> bool:
    """True if both write to one terminal, pipe or file."""
    if one._descriptor is None or other._descriptor is None:
        return one._file is other._file
    try:
        first, second = os.fstat(one._descriptor), os.fstat(other._descriptor)
    except OSError:
        return False
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def _descriptor_of(file: IO[str] | None) -> int | None:
    if file is None:
        return None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # io.UnsupportedOperation is both
        file.flush()  # keep earlier output first
        return file.fileno()
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, BrokenPipeError):
        return "its reader has ended"
    return str(getattr(error, "strerror", None) or error)
