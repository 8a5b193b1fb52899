"""A worker's hold on its node's CPU side: it starts the process, exchanges messages with it, and notices its
end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from atoll.core.awaited import account_of
from atoll.core.errors import AtollError, DeadlineError, GivenUpError, RunError, error_named
from atoll.net.post import Post, PostClosedError
from atoll.wire.device import DeviceMessage, Failed

_ENDING_SECONDS = 5.0  # for a CPU side whose socket is closed to end by itself
_LAST_WORD_SECONDS = 0.5
_OWN_STDERR = Path("/proc/self/fd/2")
_LOOK_SECONDS = 0.5  # between looks whether the process lives


class Process(Protocol):
    """The part of subprocess.Popen that is needed of a process."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def kill(self) -> None: ...


def start_process(link: socket.socket) -> Process:
    """Start a CPU side whose end of the socket is `link`."""
    command = [sys.executable, "-m", "atoll.cpuside.main", str(link.fileno()), str(os.getpid())]
    # The worker handles a signal from the terminal; the CPU side ends when the worker ends.
    return subprocess.Popen(
        command, pass_fds=[link.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
    )


class CpuSide:
    """The CPU side of node `node`: a process that ends when this one ends, or when this one closes its
    socket.

    `name` stands in every error: "the CPU side of node 2 (process 4711)".
    """

    def __init__(self, node: int, start: Callable[[socket.socket], Process] | None = None) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = (start or start_process)(its)
        self._post = Post(mine)
        self.pid = self._process.pid
        self.name = f"the CPU side of node {node} (process {self.pid})"
        self._failure: AtollError | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable when a message has come, or when the process has ended."""
        return self._post.fileno()

    def send(self, message: DeviceMessage, descriptors: Sequence[int] = ()) -> None:
        """Send a message without waiting. Raises the errors of `receive` if the CPU side is gone."""
        self._see()
        try:
            self._post.send(message, descriptors)
        except PostClosedError:
            self._gone()

    def receive(self, timeout: float = 0.0) -> tuple[DeviceMessage, list[int]] | None:
        """Return the next message and its file descriptors, waiting for up to `timeout` seconds; None if
        nothing came.

        Raises the CPU side's own error if it cannot go on, and RunError if it is gone without a word
        (GivenUpError if it was killed).
        """
        self._see()
        until = time.monotonic() + timeout
        while True:
            try:
                self._post.flush()
                got = self._post.receive()
                if got is None and timeout:
                    self._post.wait(min(_LOOK_SECONDS, max(0.0, until - time.monotonic())))
                    got = self._post.receive()
            except PostClosedError:
                self._gone()
                return None
            if got is not None and isinstance(got[0], Failed):
                self._fail(got[0])
            if got is not None or time.monotonic() >= until:
                return got
            if self._process.poll() is not None and not self._post.wait(0.0):
                self._gone()

    def await_message(self, timeout: float, what: str) -> tuple[DeviceMessage, list[int]]:
        """Return the next message like `receive`. Raises DeadlineError if none comes in time; `what` names
        the wait."""
        got = self.receive(timeout)
        if got is None:
            doing = account_of(self.pid, _OWN_STDERR)  # the CPU side shares stderr
            raise DeadlineError(f"waited {timeout:.1f} s for {self.name} on {what}: {doing}")
        return got

    def close(self) -> None:
        """Close the socket, and wait for the process to end; kill it after 5 seconds."""
        self._post.close()
        try:
            self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_ENDING_SECONDS)

    def _see(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, failed: Failed) -> None:
        self._failure = error_named(failed.error, failed.reason)
        raise self._failure

    def _gone(self) -> None:
        """Raise the CPU side's last word, or an error that says how it ended: its socket is closed."""
        try:
            while (got := self._post.receive()) is not None:
                if isinstance(got[0], Failed):
                    self._fail(got[0])
        except PostClosedError:
            pass
        try:
            status = self._process.wait(_LAST_WORD_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        if status is None:
            how = "has closed its socket"
        elif status < 0:
            how = f"was killed by {_signal_name(-status)}"
        else:
            how = f"has ended with status {status}"
        kind = GivenUpError if status is not None and status < 0 else RunError
        self._failure = kind(f"{self.name} {how}")
        raise self._failure


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
