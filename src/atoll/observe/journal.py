"""A worker's journal: one JSON line for each of its events, in a file of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from atoll.core.appending import Appender
from atoll.core.events import (
    AnyEvent,
    Decided,
    Ended,
    Expected,
    Failed,
    Finished,
    Gone,
    Joining,
    Lost,
    Regrouped,
    SamplesCounted,
    Saved,
    SharesChosen,
    Skipped,
    Started,
    StepDone,
    Warned,
    decode,
    encode,
)
from atoll.core.sharing import open_like_folder
from atoll.observe.lastwords import say
from atoll.observe.notices import print_warning

T = TypeVar("T")

FLUSH_SECONDS = 0.5
_PIECE = 2**18  # bytes of a journal in one read
_LONGEST_LINE = 2**24  # bytes of one event
_AT_ONCE = frozenset(
    (
        *(Joining, Started, Expected, Decided, Regrouped, Skipped, Saved, Warned, Lost, Failed, Finished),
        *(SharesChosen, Ended, Gone),
    )
)
# These events reach the launcher on a full disk; the beginning and end of a process are reported anyway.
TOLD = (Decided, Regrouped, Skipped, Saved, Warned, Lost, SamplesCounted)


class Journal:
    """Subscriber that appends events to `path`; any thread may call it.

    Steps and logged values are buffered for at most `FLUSH_SECONDS` while events come, so that a fast
    loop does not pay a system call for each step; if events may stop coming, the owner calls `flush`. Every
    other event is written at once. A line is written whole by one append, so two writers of one file do not
    mix their lines.

    On a full disk events are lost, and the run goes on. A warning says so at the first loss and at the end,
    and the journal notes the gap once there is room again. Under `atoll run` warnings and decisions still
    reach the launcher (`observe.lastwords`), as do the sums of the lost steps.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._lines = Appender(self._open)
        self._is_closed = False
        self._clock = clock
        self._flushed = clock()
        self._lock = threading.RLock()
        self._waiting: list[AnyEvent] = []  # encoded all together, which costs a loop far less
        self.lost = 0  # events that could not be written
        self._gap: Lost | None = None  # sums of the events lost since the latest that was written

    def __call__(self, event: AnyEvent) -> None:
        """Write `event`, or keep it for the next flush."""
        with self._lock:
            self._waiting.append(event)
            if type(event) in _AT_ONCE or self._clock() - self._flushed >= FLUSH_SECONDS:
                self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system."""
        with self._lock:
            self._flushed = self._clock()
            if self._is_closed:
                return
            waiting, self._waiting = self._waiting, []
            head: list[AnyEvent] = []
            if self._gap is not None and waiting:
                note = (
                    f"{self._path}: {self._gap.events} events before this one are missing: the disk was full"
                )
                head = [self._gap, Warned(time=waiting[0].time, worker=waiting[0].worker, message=note)]
            written, trouble = self._lines.write([encode(event) + b"\n" for event in (*head, *waiting)])
            if head and written:  # the gap's event is the first
                self._gap = None
            for event in waiting[max(0, written - len(head)) :]:
                self._lose(event, trouble)

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return open_like_folder(self._path, os.O_WRONLY | os.O_APPEND)

    def _lose(self, event: AnyEvent, trouble: str) -> None:
        """Send an event that the disk did not take to the launcher, or count it as lost."""
        if isinstance(event, TOLD) and say(event):
            return
        gap = self._gap or Lost(time=event.time, worker=event.worker)
        step = event if isinstance(event, StepDone) else None
        self._gap = msgspec.structs.replace(
            gap,
            time=event.time,
            events=gap.events + 1,
            steps=gap.steps + (step is not None),
            samples=gap.samples + (step.samples if step else 0.0),
            seconds=gap.seconds + (step.seconds if step else 0.0),
            waiting=gap.waiting + (step.waiting if step else 0.0),
            bytes_sent=gap.bytes_sent + (step.bytes_sent if step else 0),
            exchange=gap.exchange + (step.exchange if step else 0.0),
        )
        self.lost += 1
        if self.lost == 1:
            warning = f"{self._path}: {trouble}; the run goes on, and events are missing in its records"
            print_warning(warning)
            say(Warned(time=event.time, worker=event.worker, message=warning))

    def close(self) -> None:
        """Flush, and close the file. Later events are lost; closing twice does no harm."""
        with self._lock:
            self.flush()
            if self._is_closed:
                return
            self._is_closed = True
            if self._gap is not None and not self._lines.write([encode(self._gap) + b"\n"])[0]:
                say(self._gap)
            self._lines.close()
            if self.lost:
                print_warning(f"{self._path}: {self.lost} events were lost")

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LineReader(Generic[T]):
    """Reads the new lines of a file that may still grow, or not exist yet.

    No more than a piece of the file and one line are in memory. A line for which `decode` raises DecodeError
    is skipped and counted.
    """

    def __init__(self, path: Path, decode: Callable[[bytes], T]) -> None:
        self.path, self._decode = path, decode
        self.unreadable = 0  # whole lines that could not be decoded
        self.read_bytes = 0  # position in the file
        self._rest = b""
        self._is_passing_over = False  # inside a line that is too long

    def read(self, most: int | None = None) -> Iterator[T]:
        """Yield the lines written since the last call, from at most `most` bytes.

        A last line without its end waits for the next call.
        """
        try:
            file = self.path.open("rb")
        except OSError:  # not there yet, or cannot be opened now; the next call tries again
            return
        with file:
            file.seek(self.read_bytes)
            until = None if most is None else self.read_bytes + most
            while data := file.read(_PIECE if until is None else min(_PIECE, until - self.read_bytes)):
                self.read_bytes += len(data)
                yield from self._events(data)

    def _events(self, data: bytes) -> Iterator[T]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            is_end, self._is_passing_over = self._is_passing_over, False
            if is_end:
                continue
            yield from self._decoded(line)
        if len(self._rest) > _LONGEST_LINE:
            self.unreadable += not self._is_passing_over
            self._is_passing_over, self._rest = True, b""

    def _decoded(self, line: bytes) -> Iterator[T]:
        try:
            event = self._decode(line)
        except msgspec.DecodeError:
            self.unreadable += 1
        else:
            yield event


class JournalReader(LineReader[AnyEvent]):
    """Reads the events in a worker's journal."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, decode)
