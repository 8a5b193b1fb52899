"""Follows a worker's log while it grows.

A log may grow faster than anybody reads, in lines of any length. Unread data stays in the file, so a Tail
holds one block and the beginning of one line at most.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

from atoll.launch.worker import END_OF_OUTPUT

BLOCK = 64 << 10  # bytes that one `read` takes from the file
LONGEST = 64 << 10  # bytes of a line that are shown
_ENDING = 1 << 20  # bytes before a gap in which END_OF_OUTPUT is looked for
_END_LINE = f"\n{END_OF_OUTPUT}\n".encode()
# Colours ("\x1b[...m") may pass. Sequences that move the cursor or set up a terminal would tear a display.
_MOVES = re.compile(
    r"\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # a title, a link
    r"|\x1b\[[0-?]*[ -/]*[@-ln-~]"
    r"|\x1b(?!\[[0-9;:]*m)"
)
_ERROR = re.compile(r"(?:\w+\.)*\w+(?:Error|Exception): ")  # the last line of a traceback
_LOOKED_AT = 20  # lines, for a process's last word
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")


class Tail:
    """The new lines of a log, up to the worker's line that it ends with an error."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        """`from_end`: pass over existing lines, but for an unfinished one."""
        self._path = path
        self._offset = _last_line(path) if from_end else 0
        self._line = _Line()
        self._ended = False

    @property
    def behind(self) -> int:
        """Number of bytes of the log that were not read yet."""
        return max(0, _size(self._path) - self._offset)

    def read(self, last: bool = False) -> list[str]:
        """Read the next block, and return the lines that end in it.

        With `last`, an unfinished line at the end of the file is returned too. A line longer than `LONGEST`
        is cut, and says so.
        """
        size = _size(self._path)
        if size < self._offset:  # somebody has emptied the log, or removed it
            self._offset, self._line = 0, _Line()
        if not size:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(BLOCK)
        self._offset += len(data)
        first, *others = data.split(b"\n")
        self._line.add(first)
        lines: list[str] = []
        if others:
            lines = [self._line.take(), *_all_shown(others[:-1])]
            self._line.add(others[-1])
        if last and self._line and not self.behind:
            lines.append(self._line.take())
        return self._until_end(lines)

    def skip(self, keep: int) -> int:
        """Pass over all but the last `keep` bytes of the log, and over a line that begins before these.

        Return the number of bytes passed over, or 0 if none of them would be shown.
        """
        start = self._offset + self.behind - keep
        if start <= self._offset:
            return 0
        left_out = 0 if self._ended else start - self._offset + self._line.length
        with self._path.open("rb") as file:
            before = max(self._offset, start - _ENDING)
            file.seek(before)
            self._ended |= _END_LINE in file.read(start - before + len(_END_LINE))
            file.seek(start)
            torn, newline, _ = file.read(keep).partition(b"\n")
        rest = len(torn) + len(newline) if newline else 0
        self._offset, self._line = start + rest, _Line()
        return left_out + rest if left_out else 0

    def go_on(self) -> None:
        """Show new lines again: the worker was started again."""
        self._ended = False

    def _until_end(self, lines: list[str]) -> list[str]:
        if self._ended:
            return []
        if END_OF_OUTPUT in lines:
            self._ended = True
            return lines[: lines.index(END_OF_OUTPUT)]
        return lines


class _Line:
    """An unfinished line: what a terminal would show of it now, and at most LONGEST bytes."""

    def __init__(self) -> None:
        self._kept = b""
        self._returns = 0  # carriage returns since; more text overwrites what is kept
        self.length = 0  # bytes, including those that are not kept

    def __bool__(self) -> bool:
        return self.length + self._returns > 0

    def add(self, piece: bytes) -> None:
        """Append bytes without a newline."""
        text = piece.rstrip(b"\r")
        if text:
            _, overwrites, state = text.rpartition(b"\r")
            if overwrites or self._returns:
                self._kept, self.length = b"", 0
            self._kept += state[: LONGEST - len(self._kept)]
            self.length += len(state)
            self._returns = 0
        self._returns += len(piece) - len(text)

    def take(self) -> str:
        """Return the line, which ends here, and begin a new one."""
        line = _cut(_text(self._kept), self.length - len(self._kept))
        self._kept, self._returns, self.length = b"", 0, 0
        return line


def shown(line: bytes) -> str:
    """Return a log's line as a terminal would leave it: for a progress bar that rewrote its line, the last
    state."""
    if b"\r" in line:
        line = line.rstrip(b"\r").rpartition(b"\r")[2]
    return _cut(_text(line[:LONGEST]), len(line) - LONGEST)


def _all_shown(lines: list[bytes]) -> list[str]:
    """Return `shown` of each line, at a small cost for each."""
    whole = b"\n".join(lines)
    if b"\r" in whole or any(len(line) > LONGEST for line in lines):
        return [shown(line) for line in lines]
    return _text(whole).split("\n") if lines else []


def _text(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace")
    if _CONTROLS.search(text):
        text = _CONTROLS.sub("", text) if "\x1b" not in text else _CONTROLS.sub("", _MOVES.sub("", text))
    elif "\x1b" in text:
        text = _MOVES.sub("", text)
    return text


def _cut(text: str, more: int) -> str:
    return f"{text} ... ({more:,} more bytes of this line are in the log)" if more > 0 else text


def _size(path: Path) -> int:
    """Return the size of a log; 0 if there is none, or another kind of file is in its place."""
    try:
        found = path.stat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _last_line(path: Path) -> int:
    """Return the position at which the last line begins, or will; a long unfinished line counts from
    LONGEST on."""
    size = _size(path)
    if not size:
        return 0
    start = max(0, size - LONGEST)
    with path.open("rb") as file:
        file.seek(start)
        return start + file.read(size - start).rfind(b"\n") + 1


def last_word(path: Path) -> str:
    """Return the last line in a process's log on why it ends: Atoll's own line, or the last one of a
    traceback. Empty if there is none."""
    return next(filter(None, map(_word_in, reversed(last_lines(path, _LOOKED_AT)))), "")


def closing_word(path: Path) -> str:
    """Return the last line of a log if it says why the process ended; else an empty string."""
    return "".join(map(_word_in, last_lines(path, 1)))


def _word_in(line: str) -> str:
    said = line.removeprefix("atoll: ")
    if said != line:
        return "" if said.startswith("warning: ") else said
    return line if _ERROR.match(line) else ""


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last `count` non-empty lines of the log's last block; none if there is no log."""
    size = _size(path)
    if not size:
        return []
    with path.open("rb") as file:
        file.seek(max(0, size - BLOCK))
        data = file.read(BLOCK)
    _torn, newline, rest = data.partition(b"\n")
    lines = (rest if size > BLOCK and newline and rest else data).split(b"\n")
    return [shown(line) for line in lines if line.strip()][-count:]
