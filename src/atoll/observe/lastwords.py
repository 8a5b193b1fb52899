"""A pipe by which the processes of a run report how they end, so that a full disk cannot hide the cause.

`atoll run` holds both ends. Workers and torchrun's launcher find the pipe under /proc by an environment
variable, since torchrun passes no descriptors on. A message has at most PIPE_BUF bytes, which the system
writes in one piece. Without /proc (macOS) there is no pipe, and only the journals tell how a worker ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import time
from pathlib import Path

import msgspec

from atoll.core.environment import variable
from atoll.core.events import AnyEvent, Failed, decode, encode
from atoll.core.texts import shortened

LAST_WORDS_VARIABLE = "ATOLL_LAST_WORDS"  # the pipe's place: a process, its descriptor, the pipe's inode
_PIPE_BUF = 4096  # bytes that Linux writes to a pipe in one piece
_WAIT_SECONDS = 1.0  # for room in the pipe
_READ_BYTES = 2**16


class LastWords:
    """The reader's side, in `atoll run`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._rest = b""

    @property
    def where(self) -> str:
        """The value of LAST_WORDS_VARIABLE."""
        return f"{os.getpid()}:{self._read}:{os.fstat(self._read).st_ino}"

    def take(self) -> list[AnyEvent]:
        """Return the events that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read, _READ_BYTES):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        events: list[AnyEvent] = []
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):  # not written by `say`
                events.append(decode(line))
        return events

    def close(self) -> None:
        """Close the pipe; later messages are lost."""
        os.close(self._read)
        os.close(self._write)


def say(event: AnyEvent) -> bool:
    """Send an event to `atoll run`: how this process or a child ends, or an event that the journal lost.

    Returns True if the event was sent; False outside `atoll run`. Never raises.
    """
    where = variable(LAST_WORDS_VARIABLE)
    if not where:
        return False
    with contextlib.suppress(OSError, ValueError):  # the journal has the event too
        process, descriptor, inode = map(int, where.split(":"))
        path = Path(f"/proc/{process}/fd/{descriptor}")
        if not _is_pipe(path.stat(), inode):  # the process is gone, and another one has its id
            return False
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if _is_pipe(os.fstat(pipe), inode):
                return _write(pipe, _fitting(event))
        finally:
            os.close(pipe)
    return False


def _is_pipe(found: os.stat_result, inode: int) -> bool:
    return stat.S_ISFIFO(found.st_mode) and found.st_ino == inode


def _write(pipe: int, line: bytes) -> bool:
    until = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            return os.write(pipe, line) > 0
        except BlockingIOError:
            left = until - time.monotonic()
            if left <= 0:
                return False
            select.select([], [pipe], [], left)
            time.sleep(0.01)  # the pipe may have room for less than a whole word


def _fitting(event: AnyEvent) -> bytes:
    """Return the event's line, with its texts cut so that it fits into PIPE_BUF bytes; else no bytes."""
    most = 1200
    while len(line := encode(event) + b"\n") > _PIPE_BUF and isinstance(event, Failed) and most > 10:
        event = msgspec.structs.replace(
            event, message=shortened(event.message, most // 3), traceback=shortened(event.traceback, most)
        )
        most //= 2
    return line if len(line) <= _PIPE_BUF else b""
