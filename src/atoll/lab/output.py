"""Output of a lab's workers: whole lines, each with its worker's name in front."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from atoll.core.characters import encoded
from atoll.core.outlet import Outlet
from atoll.core.units import format_bytes

_LONGEST = 2**16  # bytes, longest line; a longer one is cut
_READ = 2**16
_DRAIN_SECONDS = 0.2  # of silence, until a pipe kept open by a worker's child is given up


class Output:
    """Pass on the workers' output, on a thread of its own.

    A slow reader of this output delays neither the workers nor the process that ends the lab: lines that
    cannot be shown are left out, with a note. The logs have everything.
    """

    def __init__(self) -> None:
        self._ways: dict[int, Outlet] = {}  # by descriptor
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._lock = threading.Lock()  # guards `_added`
        self._added: list[_Stream] = []
        self._ending = False
        self._thread = threading.Thread(target=self._serve, name="atoll-lab-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, name: str, pipes: Sequence[int], log: Path, targets: Sequence[int] = (1, 2)) -> None:
        """Pass on a worker's stdout and stderr as `[name] line`, and unchanged to the file `log`.

        Closes the pipes at their end.
        """
        with self._lock:
            for pipe, target in zip(pipes, targets, strict=True):
                self._added.append(_Stream(name, pipe, self._way(target), log))
        os.write(self._woken, b"+")

    def say(self, line: str) -> None:
        """Write a line of the lab's own to standard error."""
        self._way(2).write_bytes(encoded(line + "\n"))

    def close(self, deadline: float) -> None:
        """Pass on the remaining output and end, within `deadline` seconds."""
        if not self._thread.is_alive():
            return
        self._ending = True
        os.write(self._woken, b"-")
        until = time.monotonic() + deadline
        self._thread.join(deadline)
        for way in self._ways.values():
            way.drain(max(0.0, until - time.monotonic()), lambda: time.monotonic() > until)
            way.close()

    def _way(self, target: int) -> Outlet:
        if target not in self._ways:
            self._ways[target] = Outlet(os.fdopen(target, "w", encoding="utf-8", closefd=False))
        return self._ways[target]

    def _serve(self) -> None:
        while len(self._selector.get_map()) > 1 or self._added or not self._ending:
            ready = self._selector.select(_DRAIN_SECONDS if self._ending else None)
            if not ready and self._ending:
                break
            for key, _ in ready:
                if key.data is None:
                    self._take_added()
                else:
                    self._pass_on(key.data)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.close()

    def _take_added(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, _READ)
        with self._lock:
            added, self._added = self._added, []
        for stream in added:
            self._selector.register(stream.pipe, selectors.EVENT_READ, stream)

    def _pass_on(self, stream: _Stream) -> None:
        if not stream.read():
            self._selector.unregister(stream.pipe)
            stream.close()


class _Stream:
    """One pipe from a worker."""

    def __init__(self, name: str, pipe: int, way: Outlet, log: Path) -> None:
        self.pipe, self._way, self._path = pipe, way, log
        self._left_out = 0  # bytes, since something was shown
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._prefix = f"[{name}] ".encode()
        self._rest = b""

    def read(self) -> bool:
        """Pass on complete lines; return False at the end of the pipe."""
        data = os.read(self.pipe, _READ)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        if lines:
            self._write(lines)
        return bool(data)

    def close(self) -> None:
        """Pass on an incomplete last line, and close pipe and log."""
        if self._rest:
            self._write([self._rest])
        if self._left_out:
            self._way.write_bytes(self._prefix + self._gap() + b"\n")
        os.close(self.pipe)
        os.close(self._log)

    def _write(self, lines: Sequence[bytes]) -> None:
        write_all(self._log, b"".join(line + b"\n" for line in lines))
        if not self._way.room:
            self._left_out += sum(len(line) + 1 for line in lines)
            return
        if self._left_out:
            lines, self._left_out = [self._gap(), *lines], 0
        self._way.write_bytes(b"".join(self._prefix + shown(line) + b"\n" for line in lines))

    def _gap(self) -> bytes:
        return encoded(f"atoll: {format_bytes(self._left_out)} are left out here; see {self._path}")


def shown(line: bytes) -> bytes:
    """Return the last state of a line that a progress bar rewrote."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def write_all(target: int, data: bytes) -> None:
    """Write to a file descriptor; on an error, such as a full disk, drop the data."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(target, data) :]
