"""A look at a process of this machine for which another one has waited in vain.

A process that has called `show_stack_on_signal` writes its Python stack to its log on request, even while it
imports modules or waits for a file system.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
from pathlib import Path

from atoll.core.liveness import look_at, read_process

_SIGNAL = signal.SIGUSR1
_ANSWER_SECONDS = 1.0  # for the process to write its stack
_LOOK_SECONDS = 0.02
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)
_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d+) in (\S+)$', re.MULTILINE)
_ATOLL = f"{Path(__file__).parents[1]}/"


def show_stack_on_signal() -> None:
    """Let this process write its stack to its stderr when `account_of` asks for it."""
    if sys.stderr is not None:  # else descriptor 2 may be any file
        faulthandler.register(_SIGNAL, 2, all_threads=False)


def account_of(pid: int, log: Path) -> str:
    """Return a text on a process's activity and its place in its code; takes a second or two.

    `pid` is a child of this process that was not reaped, so that no other process has its id. The child's
    stderr goes to `log`.
    """
    seen, place = look_at(pid), _place_of(pid, log)
    return f"{seen}, at {place}" if place else seen


def _place_of(pid: int, log: Path) -> str:
    """Return the place of a process in its code, as "hub/main.py:88 (serve)"; empty if unknown."""
    reading = read_process(pid)
    if reading is None or reading.ended or reading.states[0] == "T":
        return ""
    try:
        caught = _CAUGHT.search(Path(f"/proc/{pid}/status").read_text(errors="replace"))
        if caught is None or not int(caught[1], 16) >> (_SIGNAL - 1) & 1:
            return ""  # the signal would end the process
        if not log.is_file():
            return ""
        before, until = log.stat().st_size, time.monotonic() + _ANSWER_SECONDS
        os.kill(pid, _SIGNAL)
        place = ""
        while not place and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            with log.open("rb") as file:
                file.seek(before)
                place = _innermost(file.read().decode(errors="replace"))
    except OSError:
        return ""
    return place


def _innermost(stack: str) -> str:
    """Return the innermost place of a stack that lies in a file."""
    for file, line, name in _FRAME.findall(stack):
        if not file.startswith("<"):  # importlib's own
            path = file.removeprefix(_ATOLL) if file.startswith(_ATOLL) else "/".join(Path(file).parts[-2:])
            return f"{path}:{line} ({name})"
    return ""
