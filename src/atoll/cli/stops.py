"""The message of `atoll run` when a signal ends it before its workers run or after they have ended.

While workers run, `launch/run.py` handles signals itself. Nothing has to be cleaned up before and after.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from types import FrameType


def end_at_signals(arguments: Sequence[str]) -> None:
    """Print a line when SIGTERM or SIGHUP ends `atoll run`; other commands keep the system's handling.

    `arguments` are those of the command line.
    """
    if list(arguments[:1]) != ["run"]:
        return
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(signum, _end)


def _end(signum: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # standard error is closed
        os.write(2, f"atoll: stopped by {signal.Signals(signum).name}\n".encode())
    os._exit(128 + signum)
