"""File descriptors: the limit on them, and some kept back for files.

Connections from outside take descriptors too. A process that listens raises its limit, and keeps a few
descriptors back, so that its journal and its snapshots can be opened while connections take all others.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import resource
import threading
import time
from collections.abc import Callable
from typing import TypeVar

RESERVED = 16  # descriptors that a Reserve holds
_MOST = 2**20  # a limit of any number is raised to no more: some programs close all numbers below it
_RETRY_SECONDS = 5.0  # for connections to be closed, so that a file can be opened
_PAUSE_SECONDS = 0.005
_FULL = (errno.EMFILE, errno.ENFILE)  # this process has too many files open; the system has

_Opened = TypeVar("_Opened")
_lock = threading.RLock()
_reserves: list[Reserve] = []


def raise_descriptor_limit() -> int:
    """Let this process open as many files and connections as its hard limit allows; returns that number.

    The soft limit is 1,024 on most systems, for programs that use `select`; Atoll does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return soft


class Reserve:
    """Descriptors of nothing, whose places files may take (`opened`). Close it at the end."""

    def __init__(self, count: int = RESERVED) -> None:
        self._count, self._held = count, [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
        self.refill()
        with _lock:
            _reserves.append(self)

    def give(self) -> None:
        """Close them: others may take their places, until `refill`."""
        held, self._held = self._held, []
        for each in held:
            os.close(each)

    def refill(self) -> None:
        """Hold as many again, as far as there is room."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Closing twice does no harm."""
        with _lock:
            if self in _reserves:
                _reserves.remove(self)
        self.give()


def files_in(folder: str | os.PathLike[str], pattern: str) -> list[str]:
    """The names in `folder` that match `pattern`, in no order; none where there is no such folder."""
    # Path.glob takes a folder that cannot be listed for an empty one, on some versions of Python.
    try:
        return fnmatch.filter(opened(lambda: os.listdir(folder)), pattern)  # noqa: PTH208
    except FileNotFoundError:
        return []


def opened(open_it: Callable[[], _Opened], seconds: float = _RETRY_SECONDS) -> _Opened:
    """Return `open_it()`, which opens files. While this process has too many open, it is called again, for
    up to `seconds`, in the place of what the reserves held. It must leave nothing behind where it fails so.
    """
    until = time.monotonic() + seconds
    try:
        return open_it()
    except OSError as error:
        if error.errno not in _FULL:
            raise
    with _lock:  # one at a time, or they take each other's places
        try:
            while True:
                for reserve in _reserves:
                    reserve.give()
                try:
                    return open_it()
                except OSError as error:
                    if error.errno not in _FULL or time.monotonic() > until:
                        raise
                time.sleep(_PAUSE_SECONDS)
                for reserve in _reserves:
                    reserve.refill()
        finally:
            for reserve in _reserves:
                reserve.refill()
