"""The socket on which a launcher's workers send heartbeats, and hear which of them the hub has.

It is a Unix socket in the run's folder of sockets, which only its user reaches (net/socketfolder.py). Each
message is one packet (SOCK_SEQPACKET), and no call waits: a message that finds no room is not sent.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from atoll.core.config import LAUNCHER_VARIABLE, SOCKETS_VARIABLE
from atoll.wire.base import decode_with
from atoll.wire.messages import ToLauncher, WireError

SOCKET = "heartbeats"  # the name of the socket in the run's folder of sockets
_BACKLOG = 1024  # workers that connect at once
_MOST_LINES = 8192  # connections; the oldest is closed for a new one
_PACKET_BYTES = 2048
_AT_ONCE = 64  # packets that are read from one connection before another's turn
_RETRY_SECONDS = (
    1.0  # before a worker connects again, and before a launcher without descriptors accepts again
)
_CONFIRMED = struct.Struct("<Q")

_decoder: msgspec.msgpack.Decoder[ToLauncher] = msgspec.msgpack.Decoder(ToLauncher)
_encoder = msgspec.msgpack.Encoder()
_Self = TypeVar("_Self", bound="HeartbeatLine")


class Launcher(NamedTuple):
    """A launcher that passes heartbeats on: its name, and the path of its socket."""

    name: str
    socket: str


def launcher_from_environment(environment: Mapping[str, str] = os.environ) -> Launcher | None:
    """Return the launcher that started this process and passes its heartbeats on; None: there is none."""
    name, folder = environment.get(LAUNCHER_VARIABLE, ""), environment.get(SOCKETS_VARIABLE, "")
    return Launcher(name, f"{folder}/{SOCKET}") if name and folder else None


class HeartbeatLine:
    """A worker's connection to its launcher, made again when lost. No call waits or raises."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._retry_at = 0.0  # monotonic

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> bool:
        """Connect, unless connected, or a try failed a moment ago; return whether the connection stands."""
        if self._socket is None and time.monotonic() >= self._retry_at:
            link = None
            try:
                link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                link.setblocking(False)
                link.connect(self._path)
                self._socket = link
            except OSError:
                if link is not None:
                    link.close()
                self._retry_at = time.monotonic() + _RETRY_SECONDS
        return self._socket is not None

    def send(self, said: ToLauncher) -> bool:
        """Send a heartbeat to the launcher; return whether the system has taken it."""
        if self._socket is None:
            return False
        try:
            self._socket.send(_encoder.encode(said), socket.MSG_DONTWAIT)
        except BlockingIOError:  # the launcher reads nothing
            return False
        except OSError:
            self._lose()
            return False
        return True

    def confirmed(self) -> int:
        """Return the number of the latest heartbeat that the hub has heard, by the launcher's messages
        since the last call; 0 if there was none."""
        latest = 0
        try:
            while self._socket is not None:
                packet = self._socket.recv(_CONFIRMED.size, socket.MSG_DONTWAIT)
                if len(packet) != _CONFIRMED.size:  # the launcher has closed it
                    self._lose()
                    break
                latest = max(latest, _CONFIRMED.unpack(packet)[0])
        except BlockingIOError:
            pass
        except OSError:
            self._lose()
        return latest

    def _lose(self) -> None:
        self.close()
        self._retry_at = time.monotonic() + _RETRY_SECONDS

    def close(self) -> None:
        """Close the connection; closing twice does no harm."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class HeartbeatDoor:
    """A launcher's socket, at `path`. `take` returns the workers' messages, `confirm` answers them.

    Raises OSError if there can be no such socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[int, socket.socket] = {}  # in the order in which they came
        self._came = 0  # connections so far
        self._accept_at: float | None = (
            None  # monotonic; when to accept again, where descriptors were lacking
        )
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(os.fsencode(path))
            path.chmod(0o600)
            self._listener.setblocking(False)
            self._listener.listen(_BACKLOG)
            self._selector.register(self._listener, selectors.EVENT_READ, 0)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return a descriptor that is readable while `take` has something to do."""
        return self._selector.fileno()

    def take(self) -> list[tuple[int, ToLauncher]]:
        """Return the workers' messages since the last call, each with its source for `confirm`."""
        if self._accept_at is not None and time.monotonic() >= self._accept_at:
            self._accept_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, 0)
        said: list[tuple[int, ToLauncher]] = []
        for key, _ in self._selector.select(0):
            if key.data:
                said += self._read(key.data)
            else:
                self._accept()
        return said

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                line, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # there are no descriptors: waiting workers send their heartbeats to the hub
                self._selector.unregister(self._listener)
                self._accept_at = time.monotonic() + _RETRY_SECONDS
                return
            if len(self._lines) >= _MOST_LINES:
                self._close(next(iter(self._lines)))
            line.setblocking(False)
            self._came += 1
            self._lines[self._came] = line
            self._selector.register(line, selectors.EVENT_READ, self._came)

    def _read(self, source: int) -> list[tuple[int, ToLauncher]]:
        said: list[tuple[int, ToLauncher]] = []
        line = self._lines.get(source)
        for _ in range(_AT_ONCE if line is not None else 0):
            assert line is not None
            try:
                packet = line.recv(_PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                self._close(source)
                break
            with contextlib.suppress(WireError):  # no message of a worker
                said.append((source, decode_with(_decoder, packet, "heartbeat")))
        return said

    def confirm(self, source: int, number: int) -> None:
        """Tell a worker that the hub has heard its heartbeat of this number, unless there is no room."""
        line = self._lines.get(source)
        if line is None:
            return
        try:
            line.send(_CONFIRMED.pack(number), socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError:
            self._close(source)

    def _close(self, source: int) -> None:
        line = self._lines.pop(source)
        self._selector.unregister(line)
        line.close()

    def close(self) -> None:
        """Close all connections, and remove the socket; closing twice does no harm."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        self._listener.close()
        self._selector.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
