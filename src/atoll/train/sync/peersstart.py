"""A worker's hold on its node's CPU side: starts the process, speaks with it, and notices its end."""

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
    """What this asks of a process: subprocess.Popen has it."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def kill(self) -> None: ...


def start_process(link: socket.socket) -> Process:
    """Start the process whose end of the socket is `link`."""
    command = [sys.executable, "-m", "atoll.cpuside.main", str(link.fileno()), str(os.getpid())]
    # A signal from the terminal is the worker's to handle: the CPU side goes when it does.
    return subprocess.Popen(
        command, pass_fds=[link.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
    )


class CpuSide:
    """The CPU side of node `node`, as a process that ends when this one does, or closes its socket.

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
        """What can be read from when a message has come, or the process has ended."""
        return self._post.fileno()

    def send(self, message: DeviceMessage, descriptors: Sequence[int] = ()) -> None:
        """Send, never waiting. Raises what `receive` raises when the CPU side is gone."""
        self._see()
        try:
            self._post.send(message, descriptors)
        except PostClosedError:
            self._gone()

    def receive(self, timeout: float = 0.0) -> tuple[DeviceMessage, list[int]] | None:
        """The next message and its file descriptors, waiting for up to `timeout` seconds.

        Raises the CPU side's own error where it cannot go on, RunError where it is gone without a word
        (GivenUpError where it was killed).
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
        """As `receive`; DeadlineError where nothing comes in time, naming what was waited for."""
        got = self.receive(timeout)
        if got is None:
            doing = account_of(self.pid, _OWN_STDERR)  # which the CPU side shares
            raise DeadlineError(f"waited {timeout:.1f} s for {self.name} on {what}: {doing}")
        return got

    def close(self) -> None:
        """Close the socket, and see the process end; it is killed when it does not within 5 seconds."""
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
        """Its socket is closed: raise its last word, or how it ended."""
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
