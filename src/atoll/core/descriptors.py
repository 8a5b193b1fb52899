"""The limit on file descriptors, and a reserve of descriptors for files.

Connections from outside take descriptors too. A process that listens raises its limit and keeps a reserve, so
that it can open its journal and snapshots while connections take all other descriptors.
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
_MOST = 2**20  # the limit is raised no further: some programs close all numbers below it
_RETRY_SECONDS = 5.0  # for connections to be closed, so that a file can be opened
_PAUSE_SECONDS = 0.005
_FULL = (errno.EMFILE, errno.ENFILE)  # too many open files: of this process, of the system

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
    """Descriptors of /dev/null that `opened` gives up for a file. Close it at the end."""

    def __init__(self, count: int = RESERVED) -> None:
        self._count, self._held = count, [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
        self.refill()
        with _lock:
            _reserves.append(self)

    def give(self) -> None:
        """Free the descriptors until `refill`."""
        freed, self._held = self._held, []
        for each in freed:
            os.close(each)

    def refill(self) -> None:
        """Take the full number of descriptors again, or as many as there are."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Free the descriptors for good; closing twice does no harm."""
        with _lock:
            if self in _reserves:
                _reserves.remove(self)
        self.give()


def files_in(folder: str | os.PathLike[str], pattern: str) -> list[str]:
    """Return the names in `folder` that match `pattern`, in no order; none if there is no such folder."""
    # On some versions of Python, Path.glob treats a folder that cannot be listed as an empty one.
    try:
        return fnmatch.filter(opened(lambda: os.listdir(folder)), pattern)  # noqa: PTH208
    except FileNotFoundError:
        return []


def opened(open_it: Callable[[], _Opened], seconds: float = _RETRY_SECONDS) -> _Opened:
    """Return `open_it()`, which opens files, with descriptors of the reserves if all others are taken.

    While there are too many open files, `open_it` is called again, for up to `seconds`. It must leave nothing
    behind when it fails.
    """
    until = time.monotonic() + seconds
    try:
        return open_it()
    except OSError as error:
        if error.errno not in _FULL:
            raise
    with _lock:  # one thread at a time, or threads take each other's freed descriptors
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
