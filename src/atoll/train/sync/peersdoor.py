"""The questions of a device to its node's CPU side, without the leader (`cpuside/door.py`)."""

from __future__ import annotations

import socket
import time

from atoll.core.errors import DeadlineError, RunError
from atoll.net.post import Post, PostClosedError
from atoll.wire.device import State, Waiting, WantState

_SLICE_SECONDS = 0.2


def ask_at(door: str, question: WantState, file: int, timeout: float, who: str, what: str) -> State:
    """Ask at the CPU side's door, and return the answer.

    Raises DeadlineError after `timeout` seconds (sync.timeout), with the reason why the CPU side waits, and
    RunError if the CPU side is gone.

    Args:
        door: the name of the CPU side's socket.
        question: the question.
        file: the descriptor of the file that takes the state.
        timeout: seconds to wait.
        who: this worker, in words for errors.
        what: the state asked for, in words for errors.
    """
    began, holds_up = time.monotonic(), ""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(timeout)
    post: Post | None = None
    try:
        link.connect(f"\0{door}")
        post = Post(link)
        post.send(question, [file])
        while (waited := time.monotonic() - began) < timeout:
            got = post.receive()
            if got is None:
                post.wait(min(_SLICE_SECONDS, timeout - waited))
            elif isinstance(got[0], State):
                return got[0]
            elif isinstance(got[0], Waiting):
                holds_up = f"; it waits for {got[0].what}"
        raise DeadlineError(
            f"{who} waited {waited:.1f} s for {what}{holds_up} (deadline sync.timeout, {timeout:g} s)"
        )
    except (PostClosedError, OSError) as error:
        how = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
        raise RunError(
            f"{who} cannot have {what}: the CPU side of its node, which its first worker has started, is "
            f"gone{how}"
        ) from None
    finally:
        link.close() if post is None else post.close()
