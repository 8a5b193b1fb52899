"""The standard streams, made such that a command can write to them whatever they are."""

from __future__ import annotations

import contextlib
import io
import os
import sys

from atoll.core.characters import SHOWN


def open_streams() -> None:
    """Open the null device where a stream was closed, and let no character raise.

    With `atoll ... >&-` the next file that is opened would be standard output, and libraries would write into
    the file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=SHOWN)


def say(line: str) -> None:
    """Write a line to standard error, as far as it can be written."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def flush_streams() -> None:
    """Write what Python holds back. Where the reader has ended, drop it: at its end Python would complain."""
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
