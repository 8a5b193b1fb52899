"""Draws a run's picture in a process of its own: matplotlib takes more memory than all else in the command.

Run as a module, with the run directory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.launch.processes import PARENT_VARIABLE, die_with_parent
from atoll.observe import report
from atoll.observe.rundir import RunDirectory

DRAW_SECONDS = 60.0  # takes about two
_LOOK_SECONDS = 0.1  # between looks whether somebody is in a hurry
_MISSING = 3  # the status if matplotlib is missing; a warning at the start of a run says so


def draw_picture(run: RunDirectory, hurried: Callable[[], bool] = lambda: False) -> str:
    """Draw report.png. Return why there is none, unless a warning has said so before.

    Once `hurried` is true the picture is given up.
    """
    command = [sys.executable, "-m", "atoll.launch.picture", str(run.path.absolute())]
    try:
        drawing = subprocess.Popen(
            command,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C comes to this process alone
        )
    except OSError as error:
        return str(error)
    until = time.monotonic() + DRAW_SECONDS
    while True:
        try:
            _, errors = drawing.communicate(timeout=_LOOK_SECONDS)
            break
        except subprocess.TimeoutExpired:
            is_late = time.monotonic() > until
            if is_late or hurried():
                drawing.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                    drawing.wait(_LOOK_SECONDS)
                return f"it took more than {DRAW_SECONDS:g} s" if is_late else "it was stopped"
    if drawing.returncode in (0, _MISSING):
        return ""
    said = errors.decode(errors="replace").strip().splitlines()
    return said[-1] if said else f"its process ended with status {drawing.returncode}"


def main(path: str) -> int:
    """Draw the picture of the run in the directory `path`; return the status."""
    die_with_parent(signal.SIGKILL, int(os.environ[PARENT_VARIABLE]))
    try:
        report.draw(RunDirectory(Path(path)))
    except ModuleNotFoundError:
        return _MISSING
    except (AtollError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
