"""Draws a run's picture in a process of its own: matplotlib takes more memory than all else in the command.

Run as a module, with the run directory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.launch.processes import PARENT_VARIABLE, die_with_parent
from atoll.observe import report
from atoll.observe.rundir import RunDirectory

DRAW_SECONDS = 60.0  # takes about two
_MISSING = 3  # the status where matplotlib is not there, which is said at the start of a run


def draw_picture(run: RunDirectory) -> str:
    """Draw report.png. Returns why there is none, where that was not said before."""
    command = [sys.executable, "-m", "atoll.launch.picture", str(run.path.absolute())]
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    try:
        ended = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DRAW_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ended.returncode in (0, _MISSING):
        return ""
    said = ended.stderr.decode(errors="replace").strip().splitlines()
    return said[-1] if said else f"its process ended with status {ended.returncode}"


def main(path: str) -> int:
    """Draw the picture of the run in the directory `path`; returns the status."""
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
