"""Follows a worker's log while it grows."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

from atoll.launch.worker import END_OF_OUTPUT

# Colours ("\x1b[...m") may pass; sequences that move the cursor would tear a live display.
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-LN-Za-ln-z]")


class Tail:
    """The new lines of a log, up to the point where the worker says that it ends with an error."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        """`from_end`: what is there already is passed over, but for a line that is not finished."""
        self._path = path
        self._offset = _last_line(path) if from_end else 0
        self._rest = b""
        self._ended = False

    def read(self, last: bool = False) -> list[str]:
        """The lines written since the last call; with `last`, an unfinished one too."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if last and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return self._until_end([shown(line) for line in lines])

    def go_on(self) -> None:
        """The worker was started again: what it writes from now on counts again."""
        self._ended = False

    def _until_end(self, lines: list[str]) -> list[str]:
        if self._ended:
            return []
        if END_OF_OUTPUT in lines:
            self._ended = True
            return lines[: lines.index(END_OF_OUTPUT)]
        return lines


def _last_line(path: Path) -> int:
    """Where the last line begins in the file, or will."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(len(line) for line in file if line.endswith(b"\n"))


def shown(line: bytes) -> str:
    """A log's line as a terminal would leave it: of a progress bar that rewrote its line, the last state."""
    text = line.decode("utf-8", errors="replace").rstrip("\r")
    return _MOVES.sub("", text.rpartition("\r")[2])


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines that are not empty; none when there is no log."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        return list(deque((shown(line.rstrip(b"\n")) for line in file if line.strip()), maxlen=count))
