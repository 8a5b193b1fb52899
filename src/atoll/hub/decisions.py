"""What the hub decides, each with its reason: a line in a file, an event, and a line for whoever watches."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from atoll.core.appending import Appender
from atoll.core.errors import UserError
from atoll.core.events import Decided, EventBus
from atoll.core.runclock import record_time
from atoll.observe.journal import LineReader

FILE = "decisions.jsonl"  # in the run's directory
WAITED_FOR = "waited for"  # ends the name of the decision to wait for who is silent and lives
HUB = -1  # the hub's number where an event names a worker


class Decision(msgspec.Struct, frozen=True):
    """A line of the file. `time` is in seconds since the epoch."""

    time: float
    what: str
    choice: str
    reason: str


class Decisions:
    """Takes decisions and tells them to `bus`; writes them to a file in `folder` where there is one, each at
    once and by one append. `clock` is in seconds since the epoch. A disk that does not take a line costs that
    line of the file. While `muted`, nothing is told: what was decided before is only gone through again."""

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
        """Something was decided."""
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
    """Reads what is new in a run's decisions, which may still be made, or have no file yet. A line that is
    not whole, because the hub was killed or the disk was full, is left out."""
    return LineReader(folder / FILE, msgspec.json.Decoder(Decision).decode)


def read_decisions(folder: Path) -> list[Decision]:
    """The decisions in a run's directory so far; none where there is no file."""
    return list(decision_reader(folder).read())


def _is_whole(path: Path) -> bool:
    """Whether the file's last line has its end."""
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
    appender.write([])  # which opens it
    return appender
