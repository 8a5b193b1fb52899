"""The hub's decisions and their reasons: a file of them, events, and lines for people."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from atoll.core.appending import Appender
from atoll.core.decoding import json_decoder
from atoll.core.errors import UserError
from atoll.core.events import Decided, EventBus
from atoll.core.runclock import record_time
from atoll.observe.journal import LineReader

FILE = "decisions.jsonl"  # in the run's directory
WAITED_FOR = "waited for"  # last words of a decision to wait for a silent process that is alive
HUB = -1  # the hub's number in events that name a worker


class Decision(msgspec.Struct, frozen=True):
    """A line of the file. `time` is in seconds since the epoch."""

    time: float
    what: str
    choice: str
    reason: str


class Decisions:
    """Emits decisions to `bus`, and appends each at once to a file in `folder`, if given. `clock` returns
    seconds since the epoch. A full disk loses lines of the file only. While `muted` nothing is emitted: old
    decisions are being replayed."""

    def __init__(
        self,
        folder: Path | None = None,
        bus: EventBus | None = None,
        clock: Callable[[], float] = record_time,
    ) -> None:
        self._bus = bus or EventBus()
        self._clock = clock
        self.muted = False
        self._lines = None if folder is None else _appender(folder)

    def add(self, what: str, choice: str, reason: str) -> None:
        """Record a decision."""
        if self.muted:
            return
        now = self._clock()
        if self._lines is not None:
            self._lines.write([msgspec.json.encode(Decision(now, what, choice, reason)) + b"\n"])
        self._bus.emit(Decided(time=now, worker=HUB, what=what, choice=choice, reason=reason))

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def decision_reader(folder: Path) -> LineReader[Decision]:
    """Return a reader of new decisions of a run, which may still be in progress or have no file yet.
    Incomplete lines, left by a kill or a full disk, are skipped."""
    return LineReader(folder / FILE, json_decoder(Decision).decode)


def read_decisions(folder: Path) -> list[Decision]:
    """Return all decisions in a run's directory; empty without a file."""
    return list(decision_reader(folder).read())


def _is_whole(path: Path) -> bool:
    """True if the file ends with a complete line."""
    if not path.exists():
        return True
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"


def _appender(folder: Path) -> Appender:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        where = error.filename or folder
        raise UserError(f"{where}: cannot write the hub's decisions: {error.strerror}") from None
    appender = Appender(lambda: file, torn=not _is_whole(folder / FILE))
    appender.write([])  # opens the file
    return appender
