"""Appending of whole lines to a file on a disk that may be full."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

_CUT_OFF = b" cut off\n"  # so that a line of which only the end is missing is not read as a whole one


class Appender:
    """Appends lines, each with its end, to the file that `open_file` opens; raises nothing.

    One append writes all lines of a call, so two writers of one file do not mix their lines. A line that was
    written in part gets an end that marks it before the next line. `torn`: the file's last line has no end
    yet.
    """

    def __init__(self, open_file: Callable[[], int], torn: bool = False) -> None:
        self._open, self._torn = open_file, torn
        self._file = -1  # opened by the first write, and again by each while it cannot be

    def write(self, lines: Sequence[bytes]) -> tuple[int, str]:
        """Append lines; returns the number of whole lines written, and the error if some were not ("")."""
        before = _CUT_OFF if self._torn and lines else b""
        data, done = memoryview(before + b"".join(lines)), 0
        try:
            if self._file < 0:
                self._file = self._open()
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError as error:
            whole, end = 0, len(before)
            for line in lines:
                end += len(line)
                whole += end <= done
            if done:
                self._torn = data[done - 1] != ord("\n")
            return whole, error.strerror or str(error)
        self._torn = self._torn and not data
        return len(lines), ""

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
