"""Messages between a node's worker and its CPU side, over a Unix socket of packets (wire/device.py)."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence

from atoll.wire.device import DeviceMessage, decode, encode

_PIECE = 2**16  # bytes of a packet; Linux takes up to some 200 KiB
_LAST, _MORE = b"\0", b"\1"  # the first byte of a packet
_DESCRIPTORS = 4  # with a message, at most


class PostClosedError(Exception):
    """The other side has closed the socket, or is gone."""


class Post:
    """One end of the socket. Messages that do not fit into the socket's buffer wait here, so sending never
    blocks: the owner calls `flush` when the Post `is_full` and the socket is writable."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._link = link
        self._outgoing: deque[tuple[bytes, Sequence[int]]] = deque()
        self._pieces: list[bytes] = []
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        return self._link.fileno()

    @property
    def is_full(self) -> bool:
        """True while something waits to be sent."""
        return bool(self._outgoing)

    def send(self, message: DeviceMessage, descriptors: Sequence[int] = ()) -> None:
        """Send, never waiting; the descriptors are duplicated, so the caller may close its own. Raises
        PostClosedError."""
        if len(descriptors) > _DESCRIPTORS:
            raise ValueError(f"{len(descriptors)} file descriptors, where {_DESCRIPTORS} is the most")
        header = encode(message)
        kept = [os.dup(each) for each in descriptors]
        starts = range(0, len(header), _PIECE)
        for start in starts:
            last = start + _PIECE >= len(header)
            piece = (_LAST if last else _MORE) + header[start : start + _PIECE]
            self._outgoing.append((piece, kept if last else ()))
        self.flush()

    def flush(self) -> None:
        """Send waiting messages, as far as the socket takes them. Raises PostClosedError."""
        while self._outgoing:
            piece, descriptors = self._outgoing[0]
            carried = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            try:
                self._link.sendmsg([piece], carried if descriptors else [])
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError) as error:
                raise PostClosedError from error
            self._outgoing.popleft()
            for each in descriptors:
                os.close(each)

    def receive(self) -> tuple[DeviceMessage, list[int]] | None:
        """Return the next message and its file descriptors, which the caller must close; None if no
        message is whole yet. Raises PostClosedError, WireError."""
        while True:
            try:
                piece, descriptors, _flags, _from = socket.recv_fds(self._link, _PIECE + 1, _DESCRIPTORS)
            except BlockingIOError:
                return None
            except ConnectionResetError as error:
                raise PostClosedError from error
            self._descriptors += descriptors
            if not piece:
                raise PostClosedError
            self._pieces.append(piece[1:])
            if piece[:1] == _LAST:
                whole, self._pieces = b"".join(self._pieces), []
                carried, self._descriptors = self._descriptors, []
                return decode(whole), carried

    def wait(self, timeout: float) -> bool:
        """Wait for up to `timeout` seconds for something to receive, and send waiting messages meanwhile;
        return whether there is something."""
        until = time.monotonic() + timeout
        poller = select.poll()
        while True:
            poller.register(self._link, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
            left = max(0.0, until - time.monotonic())
            happened = poller.poll(left * 1000)
            if any(what & ~select.POLLOUT for _, what in happened):
                return True
            if not happened and left <= 0:
                return False
            self.flush()

    def close(self) -> None:
        """Close this end; waiting messages are dropped."""
        for _, descriptors in self._outgoing:
            for each in descriptors:
                with contextlib.suppress(OSError):
                    os.close(each)
        self._outgoing.clear()
        for each in self._descriptors:
            os.close(each)
        self._descriptors = []
        with contextlib.suppress(OSError):  # the other end is gone
            self._link.shutdown(socket.SHUT_RDWR)  # a forked process may hold a copy (a DataLoader's)
        self._link.close()
