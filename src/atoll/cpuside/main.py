"""A node's CPU side as a process of its own: `python -m atoll.cpuside.main DESCRIPTOR PARENT`.

DESCRIPTOR is the socket to the worker that started the process, and PARENT the worker's process id. The
process ends when the socket is closed or the worker is gone, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time

from atoll.core.awaited import show_stack_on_signal
from atoll.core.errors import AtollError
from atoll.core.heap import keep_freed_memory
from atoll.core.stopping import exit_quickly
from atoll.net.post import Post, PostClosedError
from atoll.wire.device import Failed

_LAST_WORD_SECONDS = 1.0
# Python's default of 5 ms would make each call of the optimizer wait so long beside a busy loop: 50 ms for a
# step of ten calls.
_SWITCH_SECONDS = 0.0005


def main(arguments: list[str]) -> int:
    """Serve the worker until it ends; returns the exit status."""
    return serve(int(arguments[0]), int(arguments[1]))


def serve(descriptor: int, parent: int) -> int:
    """Serve the worker at socket `descriptor` until it or its process `parent` ends, in this process.

    Returns the exit status.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the worker handles them, and this process ends with it
    show_stack_on_signal()
    post = Post(socket.socket(fileno=descriptor))
    try:
        watch = _watch(parent)
    except ProcessLookupError:
        return 0  # the worker has ended already
    keep_freed_memory(messages=True)
    sys.setswitchinterval(_SWITCH_SECONDS)
    from atoll.cpuside.process import CpuSideProcess  # torch takes seconds to import

    try:
        with CpuSideProcess(post, watch) as process:
            process.run()
    except PostClosedError:
        return 0
    except AtollError as error:
        _last_word(post, type(error).__name__, str(error))
        return error.exit_status
    except Exception as error:
        line = str(error).splitlines()[0] if str(error) else ""
        _last_word(post, "RunError", f"the node's CPU side failed: {type(error).__name__}: {line}"[:4000])
        raise
    return 0


def _watch(parent: int) -> int:
    """Return a descriptor that becomes readable when the process `parent` ends; -1 if the system has none.

    The socket alone does not show the worker's end, since a child that the worker has forked holds a copy.
    Raises ProcessLookupError if the process has ended already.
    """
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(parent)
    except ProcessLookupError:
        raise
    except OSError:
        return -1


def _last_word(post: Post, error: str, reason: str) -> None:
    """Tell the worker the reason why this process ends, within a second."""
    until = time.monotonic() + _LAST_WORD_SECONDS
    with contextlib.suppress(PostClosedError):
        post.send(Failed(error=error, reason=reason))
        while post.is_full and time.monotonic() < until:
            post.wait(0.05)


if __name__ == "__main__":
    exit_quickly(main(sys.argv[1:]))
