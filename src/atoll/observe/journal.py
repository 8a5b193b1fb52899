"""A worker's journal: one JSON line for each of its events, in a file of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from atoll.core.events import (
    AnyEvent,
    Decided,
    Ended,
    Expected,
    Failed,
    Finished,
    Gone,
    Joining,
    Regrouped,
    Saved,
    Skipped,
    Started,
    Warned,
    decode,
    encode,
)
from atoll.core.sharing import open_like_folder

FLUSH_SECONDS = 0.5
_PIECE = 2**18  # bytes of a journal that are read at once
_LONGEST_LINE = 2**24  # bytes of one event
_AT_ONCE = (
    *(Joining, Started, Expected, Decided, Regrouped, Skipped, Saved, Warned, Failed, Finished),
    *(Ended, Gone),
)


class Journal:
    """Subscriber that appends events to `path`.

    Steps and logged values are buffered for at most `FLUSH_SECONDS` while events come, so that a fast
    loop does not pay a system call for each step; every other event is written at once. A line is written
    whole by one append, so two writers of one file do not tear each other's lines. Any thread may tell it.
    On a disk that is full events are lost, which is said on stderr, once and at the end, and in the journal
    itself when there is room again: the run goes on.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_like_folder(self._path, os.O_WRONLY | os.O_APPEND)
        self._clock = clock
        self._flushed = clock()
        self._lock = threading.RLock()
        self._waiting: list[AnyEvent] = []  # written as JSON all together, which costs a loop far less
        self.lost = 0  # events that could not be written
        self._torn = False  # the last line in the file has no end
        self._gap = 0  # events lost since the last that was written

    def __call__(self, event: AnyEvent) -> None:
        """Write `event`, or keep it for the next flush."""
        with self._lock:
            self._waiting.append(event)
            if isinstance(event, _AT_ONCE) or self._clock() - self._flushed >= FLUSH_SECONDS:
                self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system."""
        with self._lock:
            self._flushed = self._clock()
            if self._file < 0:
                return
            waiting, self._waiting = self._waiting, []
            lines = [encode(event) for event in waiting]
            if self._gap and waiting:
                said = f"{self._path}: {self._gap} events before this one are missing: the disk was full"
                gap = Warned(time=waiting[0].time, worker=waiting[0].worker, message=said)
                lines.insert(0, encode(gap))
            try:
                self._write(b"\n" * self._torn + b"".join(line + b"\n" for line in lines))
                self._gap = 0
            except OSError as error:
                if not self.lost:
                    _say(
                        f"{self._path}: {error.strerror}; the run goes on, and events are missing in its "
                        "records"
                    )
                self.lost += len(waiting)
                self._gap += len(waiting)

    def _write(self, lines: bytes) -> None:
        while lines:
            written = os.write(self._file, lines)
            self._torn = lines[written - 1 : written] != b"\n"
            lines = lines[written:]

    def close(self) -> None:
        """Flush, and close the file; events that come later are lost, and closing twice does no harm."""
        with self._lock:
            self.flush()
            if self._file < 0:
                return
            os.close(self._file)
            self._file = -1
            if self.lost:
                _say(f"{self._path}: {self.lost} events were lost")

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # it may go to a file on the same disk
        print(f"atoll: {line}", file=sys.stderr, flush=True)


class JournalReader:
    """Reads what is new in a journal that may still be growing, or not be there yet, piece by piece: however
    long the journal is, no more than a piece and a line of it are in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable = 0  # whole lines that hold no event
        self.read_bytes = 0  # of the file, so far
        self._rest = b""
        self._is_passing_over = False  # a line that is too long, up to its end

    def read(self, most: int | None = None) -> Iterator[AnyEvent]:
        """The events written since the last call, of at most `most` bytes. A last line without its end waits
        for the next call."""
        try:
            file = self.path.open("rb")
        except OSError:  # it is not there yet; or cannot be opened now, and is read later
            return
        with file:
            file.seek(self.read_bytes)
            until = None if most is None else self.read_bytes + most
            while data := file.read(_PIECE if until is None else min(_PIECE, until - self.read_bytes)):
                self.read_bytes += len(data)
                yield from self._events(data)

    def _events(self, data: bytes) -> Iterator[AnyEvent]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            is_end, self._is_passing_over = self._is_passing_over, False
            if is_end:
                continue
            try:
                event = decode(line)
            except msgspec.DecodeError:
                self.unreadable += 1
            else:
                yield event
        if len(self._rest) > _LONGEST_LINE:
            self.unreadable += not self._is_passing_over
            self._is_passing_over, self._rest = True, b""
