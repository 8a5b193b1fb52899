"""What the hub decides, each with its reason: a line in a file, an event, and a line for whoever watches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from atoll.core.errors import UserError
from atoll.core.events import Decided, EventBus

FILE = "decisions.jsonl"  # in the run's directory
HUB = -1  # the hub's number where an event names a worker


class Decision(msgspec.Struct, frozen=True):
    """A line of the file. `time` is in seconds since the epoch."""

    time: float
    what: str
    choice: str
    reason: str


class Decisions:
    """Takes decisions and tells them to `bus`; writes them to a file in `folder` where there is one, each at
    once and by one append. `clock` is in seconds since the epoch."""

    def __init__(
        self,
        folder: Path | None = None,
        bus: EventBus | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus = bus or EventBus()
        self._clock = clock
        self._file = -1 if folder is None else _open(folder)

    def add(self, what: str, choice: str, reason: str) -> None:
        """Something was decided."""
        now = self._clock()
        if self._file >= 0:
            line = msgspec.json.encode(Decision(now, what, choice, reason)) + b"\n"
            while line:
                line = line[os.write(self._file, line) :]
        self._bus.emit(Decided(time=now, worker=HUB, what=what, choice=choice, reason=reason))

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_decisions(folder: Path) -> list[Decision]:
    """The decisions in a run's directory; none where there is no file. A last line without its end is left
    out."""
    try:
        lines = (folder / FILE).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=Decision) for line in lines]


def _open(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        where = error.filename or folder
        raise UserError(f"{where}: cannot write the hub's decisions: {error.strerror}") from None
