"""CPU sides of nodes that are forked: to start one takes three seconds of a core, for it imports torch.

A process that is to have nodes calls `fork_cpu_sides` while it has neither threads nor connections, which a
fork would take along. What it is then stays as a process that does nothing but fork.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import traceback
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from atoll.core.errors import DeadlineError
from atoll.cpuside import main
from atoll.net import context
from atoll.train.sync import peersstart

_FORK_SECONDS = 60.0
_LONGEST = 64  # bytes of a request: the worker's process


def fork_cpu_sides() -> None:
    """From now on the CPU sides that this process starts are forks of it as it is now."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _exit_after(partial(_fork_on_demand, its))
    its.close()
    peersstart.start_process = partial(_Forked, mine)


class _Forked:
    """As peersstart.Process. It is its keeper's child, who tells how it ended."""

    def __init__(self, forks: socket.socket, link: socket.socket) -> None:
        self._told, tells = Pipe(duplex=False)
        with tells:
            socket.send_fds(forks, [str(os.getpid()).encode()], [link.fileno(), tells.fileno()])
        if not self._told.poll(_FORK_SECONDS):
            raise DeadlineError(f"waited {_FORK_SECONDS:g} s for a CPU side to be forked")
        self.pid: int = self._told.recv()
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._after(0.0)

    def wait(self, timeout: float) -> int:
        status = self._after(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("the CPU side", timeout)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _after(self, seconds: float) -> int | None:
        if self._status is None and self._told.poll(seconds):
            self._status = self._told.recv()
            self._told.close()
        return self._status


def _fork_on_demand(door: socket.socket) -> int:
    """Fork a keeper for each request, until the worker is gone."""
    # What this process was forked with is the worker's: who waits for its end must not wait for this one's.
    for each in {int(path.name) for path in Path("/dev/fd").iterdir()} - {0, 1, 2, door.fileno()}:
        with contextlib.suppress(OSError):  # the listing's own
            os.close(each)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # as a CPU side does: it ends with its worker
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        request, descriptors, _, _ = socket.recv_fds(door, _LONGEST, 2)
        if not request:
            return 0
        if os.fork() == 0:
            door.close()
            link, tells = descriptors
            _exit_after(partial(_keep, link, tells, int(request)))
        for each in descriptors:
            os.close(each)


def _keep(link: int, tells: int, worker: int) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.close(tells)
        os.setsid()
        _exit_after(partial(_serve, link, worker))
    os.close(link)
    with Connection(tells, readable=False) as connection:
        connection.send(child)
        _, status = os.waitpid(child, 0)
        connection.send(os.waitstatus_to_exitcode(status))
    return 0


def _serve(link: int, worker: int) -> int:
    try:
        return main.serve(link, worker)
    finally:
        context.finish()  # as at the end of a process that was started


def _exit_after(act: partial[int]) -> NoReturn:
    """A fork's end: nothing of what the process it is a copy of has to do at its own."""
    status = 1
    try:
        status = act()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
