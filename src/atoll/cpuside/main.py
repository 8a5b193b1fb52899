"""A node's CPU side, as a process of its own: `python -m atoll.cpuside.main DESCRIPTOR PARENT`.

DESCRIPTOR is the socket to the worker that started it, whose process is PARENT. It ends when that socket is
closed or that process is gone, however either ended, and leaves nothing behind.
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
from atoll.net.post import Post, PostClosedError
from atoll.wire.device import Failed

_LAST_WORD_SECONDS = 1.0
# Seconds for which one thread keeps the interpreter while another waits: Python's 5 ms, at each of the
# optimizer's calls, would make a step of ten calls 50 ms long beside a loop that is busy.
_SWITCH_SECONDS = 0.0005


def main(arguments: list[str]) -> int:
    """Serve the worker until it is done or gone; returns the process's status."""
    return serve(int(arguments[0]), int(arguments[1]))


def serve(descriptor: int, parent: int) -> int:
    """As `main`; for who has a process already."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the worker handles them, and this process ends with it
    show_stack_on_signal()
    post = Post(socket.socket(fileno=descriptor))
    try:
        watch = _watch(parent)
    except ProcessLookupError:
        return 0  # it was gone before anybody could watch
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
    """A descriptor that can be read from once the process `parent` has ended; -1 where the system has none. A
    socket alone does not tell: a child that the worker has forked holds a copy of it. Raises
    ProcessLookupError where it has ended already."""
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(parent)
    except ProcessLookupError:
        raise
    except OSError:
        return -1


def _last_word(post: Post, error: str, reason: str) -> None:
    """Tell the worker why this process ends."""
    until = time.monotonic() + _LAST_WORD_SECONDS
    with contextlib.suppress(PostClosedError):
        post.send(Failed(error=error, reason=reason))
        while post.is_full and time.monotonic() < until:
            post.wait(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
