"""`python train.py` by hand, in a process that is forked from one that has imported torch."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.pool import FORKSERVER


def _run(
    script: Path, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], said: Path
) -> None:
    """As the interpreter does: a script's arguments, environment, working directory, output and status."""
    output = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which a forked process does not: what is still to be sent is lost


class ForkedScript:
    """A script that runs in `folder`; `said` is what it has written to stdout and stderr."""

    def __init__(
        self, script: Path, *arguments: str, folder: Path, environment: Mapping[str, str], log: Path
    ) -> None:
        self._log = log
        self._process = FORKSERVER.Process(
            target=_run, args=(script, arguments, folder, dict(environment), log), daemon=True
        )
        self._process.start()

    @property
    def status(self) -> int | None:
        """As `subprocess.Popen.poll`: None while it runs, and negative if a signal has ended it."""
        return self._process.exitcode

    @property
    def said(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def wait(self, deadline: float) -> int:
        self._process.join(deadline)
        assert self.status is not None, f"still runs after {deadline:g} s: {self.said}"
        return self.status

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
