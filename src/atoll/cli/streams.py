"""Preparation of the standard streams, so that a command can always write to them."""

from __future__ import annotations

import contextlib
import io
import os
import sys

from atoll.core.characters import SHOWN


def open_streams() -> None:
    """Open the null device for closed streams, and let no character raise an error.

    After `atoll ... >&-` the next opened file would become standard output, and libraries would write into
    it.
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
    """Write a line to standard error; errors are ignored."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def flush_streams() -> None:
    """Flush the standard streams; if a reader has ended, drop its rest, or Python complains at exit."""
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
