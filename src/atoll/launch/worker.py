"""A worker's process: its log, its bond to the launcher, the user's script, and word of how it failed.

torchrun runs this as a module, with the script's path and arguments, or with `-m`, a module's name and
arguments. The script sees what it would see under `python`: `__main__`, `sys.argv` and `sys.path`.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
import traceback
from pathlib import Path

from atoll.core.config import FIRST_VARIABLE
from atoll.core.errors import AtollError, PeerLostError
from atoll.core.events import Failed
from atoll.core.runclock import record_time
from atoll.core.scriptline import is_script
from atoll.launch.processes import PARENT_VARIABLE, die_with_parent
from atoll.launch.program import Program
from atoll.observe.journal import Journal
from atoll.observe.rundir import RunDirectory

END_OF_OUTPUT = "-- atoll: this worker ends with an error --"  # what follows in a log is shown by the command
_LOST_PEER = ("connection closed by peer", "connection reset by peer", "broken pipe", "connection refused")


def main(script: str, arguments: list[str]) -> None:
    """Run `script` and end the process as it ends."""
    # torchrun stops its workers itself; this is for the day when it is killed and cannot.
    die_with_parent(signal.SIGKILL, int(os.environ[PARENT_VARIABLE]))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    run = RunDirectory.from_environment()
    assert run is not None, "started by atoll.launch.run, which sets the run directory"
    worker = int(os.environ["RANK"]) + int(os.environ.get(FIRST_VARIABLE, "0"))
    _write_to(run.log(worker))
    faulthandler.enable()
    program = Program.parse([script, *arguments])
    try:
        program.run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        sys.exit(_fail(run, worker, program, error))


def _write_to(log: Path) -> None:
    """Send stdout and stderr, those of C code and of child processes too, to `log`, line by line."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a log is UTF-8 whatever the terminal's locale says
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _fail(run: RunDirectory, worker: int, program: Program, error: Exception) -> int:
    """Leave word of the failure in the journal, and its traceback in the log; returns the exit status."""
    whole = describe(error, program.file(), program.is_module)
    status = error.exit_status if isinstance(error, AtollError) else 1
    with Journal(run.journal(worker)) as journal:
        journal(
            Failed(
                time=record_time(),
                worker=worker,
                error=type(error).__name__,
                message=str(error),
                # A mistake of the user's is one line: a stack of Atoll's own frames would only hide it.
                traceback="" if isinstance(error, AtollError) else whole,
                exit_status=status,
                echo=is_echo(error),
            )
        )
    print(f"{END_OF_OUTPUT}\n{whole}", file=sys.stderr)
    return status


def describe(error: BaseException, script: str, is_module: bool = False) -> str:
    """The traceback, from the script's first frame on: the frames that started the script are left out."""
    trace = error.__traceback__
    own = str(Path(script).resolve())
    while trace is not None and str(Path(trace.tb_frame.f_code.co_filename).resolve()) != own:
        trace = trace.tb_next
    if trace is None and is_module:  # in a package around the module
        trace = error.__traceback__
        while trace is not None and not is_script(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip("\n")


def is_echo(error: BaseException) -> bool:
    """Whether another worker's end caused the error: a lost peer, or torch's word that a connection broke."""
    if isinstance(error, PeerLostError):
        return True
    said = str(error).lower()
    if isinstance(error, AtollError) or not isinstance(error, (RuntimeError, OSError)):
        return False
    kind = type(error).__name__
    return kind in ("DistNetworkError", "DistBackendError") or any(words in said for words in _LOST_PEER)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
