"""A worker's process: its log, its bond to the launcher, the user's script, and the report of its failure.

torchrun runs this as a module, with the script's path and arguments, or with `-m`, a module's name and
arguments. The script runs as under `python`: with its own `__main__`, `sys.argv` and `sys.path`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from multiprocessing import util
from pathlib import Path

from atoll.core.childsignals import ignore_child_deaths
from atoll.core.config import FIRST_VARIABLE
from atoll.core.errors import AtollError
from atoll.core.events import AnyEvent, ChildEnded, Ended, Failed, Lost, Warned
from atoll.core.runclock import record_time
from atoll.core.scriptline import is_script, line_of_error
from atoll.core.sharing import open_like_folder
from atoll.core.texts import shortened
from atoll.launch.processes import PARENT_VARIABLE, die_with_parent
from atoll.launch.program import Program
from atoll.observe.failing import MESSAGE_CHARACTERS, failure_of, sigterm_ignored, text_of
from atoll.observe.journal import Journal
from atoll.observe.lastwords import say
from atoll.observe.logstream import LogStreams
from atoll.observe.rundir import RunDirectory
from atoll.train.api.uncaught import script_hook

END_OF_OUTPUT = "-- atoll: this worker ends with an error --"  # the command shows what follows in a log

_LASTING_SECONDS = 10.0  # that threads may go on beyond the script's end without a warning
_NAMES_CHARACTERS = 200


def main(script: str, arguments: list[str]) -> None:
    """Run `script`, and end the process with the script's status."""
    # torchrun stops its workers itself; this is for the day when it is killed and cannot.
    die_with_parent(signal.SIGKILL, int(os.environ[PARENT_VARIABLE]))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    run = RunDirectory.from_environment()
    assert run is not None, "started by atoll.launch.run, which sets the run directory"
    worker = int(os.environ["RANK"]) + int(os.environ.get(FIRST_VARIABLE, "0"))
    _write_to(run, worker)
    faulthandler.enable()
    util.register_after_fork(_say_child_end, partial(_watch_child, worker))
    program = Program.parse([script, *arguments])
    file = _resolved(program.file())  # before the script can change the folder
    say_end = partial(_say_end, run, worker)
    process = os.getpid()
    try:
        program.run()
    except SystemExit as error:
        if os.getpid() == process:
            ignore_child_deaths()
            say_end(*_exit_of(error), line_of_error(error))
            _watch_threads(run, worker)
        raise
    except KeyboardInterrupt as error:
        if os.getpid() != process:
            raise
        sys.last_value = error  # as Python sets it for an error that nothing has caught
        status = 128 + signal.SIGINT
        say_end(status, "KeyboardInterrupt", "", line_of_error(error))
        sys.exit(status)
    except BaseException as error:
        if os.getpid() != process:  # the script has forked: its child's end is not the worker's
            raise
        sys.last_value = error
        ignore_child_deaths()
        with sigterm_ignored():
            status = _fail(run, worker, file, program.is_module, error)
        sys.exit(status)
    if os.getpid() == process:
        say_end(0)
        _watch_threads(run, worker)


def _exit_of(error: SystemExit) -> tuple[int, str, str]:
    """Return the status, the call and the text of a `sys.exit`, as Python takes them."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF, "sys.exit", ""
    return 1, "sys.exit", text_of(error.code)


def _watch_child(worker: int, _registered: object) -> None:
    """Have this process, just forked from a worker by `multiprocessing`, report its end."""
    util.Finalize(None, _say_child_end, args=(worker,), exitpriority=0)


def _say_child_end(worker: int) -> None:
    """Report a `sys.exit` that ends this process to the launcher; torch gives the worker no details of it."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        status, _, message = _exit_of(error)
        message = shortened(message, MESSAGE_CHARACTERS, "the log has all")
        line = line_of_error(error)
        now, process = record_time(), os.getpid()
        say(ChildEnded(time=now, worker=worker, pid=process, status=status, message=message, line=line))


def _write_to(run: RunDirectory, worker: int) -> None:
    """Send stdout and stderr, including those of C code and child processes, to the worker's log, line by
    line.

    If a log cannot be written, only its lines are lost; training goes on.
    """
    log = run.log(worker)

    def note(event: AnyEvent) -> None:
        with Journal(run.journal(worker)) as journal:
            journal(event)

    def tell(why: str) -> None:
        said = f"{log}: {why}; the run goes on, and what worker {worker} prints is missing there"
        note(Warned(time=record_time(), worker=worker, message=said))

    process = os.getpid()

    def count() -> None:
        if streams.lost and os.getpid() == process:  # a child that the script forked has its parent's count
            note(Lost(time=record_time(), worker=worker, printed=streams.lost))

    try:
        file = open_like_folder(log, os.O_WRONLY | os.O_APPEND)
    except OSError as error:
        tell(error.strerror or str(error))
        file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a log is UTF-8 whatever the terminal's locale says
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    streams = LogStreams(tell)
    streams.install()
    atexit.register(count)


def _say_end(
    run: RunDirectory, worker: int, status: int, call: str = "", message: str = "", line: str = ""
) -> None:
    """Report how the script ended, if not by an error."""
    message = shortened(message, MESSAGE_CHARACTERS, "the log has all")
    _leave_word(
        run, Ended(time=record_time(), worker=worker, status=status, call=call, message=message, line=line)
    )


def _watch_threads(run: RunDirectory, worker: int) -> None:
    """Warn of threads that keep this process from ending for a while. Python waits for them."""
    if not _lasting_threads():
        return

    def tell() -> None:
        time.sleep(_LASTING_SECONDS)
        if names := ", ".join(_lasting_threads()):
            with contextlib.suppress(OSError), Journal(run.journal(worker)) as journal:
                said = (
                    f"worker {worker}'s script has ended, and its process waits for threads of the script's: "
                    f"{shortened(names, _NAMES_CHARACTERS)}; end them, or start them with daemon=True"
                )
                journal(Warned(time=record_time(), worker=worker, message=said))

    threading.Thread(target=tell, name="atoll-lasting", daemon=True).start()


def _lasting_threads() -> list[str]:
    """Return the names of the threads that Python waits for at the end of this process."""
    current = threading.main_thread()
    return [each.name for each in threading.enumerate() if not each.daemon and each is not current]


def _fail(run: RunDirectory, worker: int, file: str, is_module: bool, error: BaseException) -> int:
    """Write the failure to the journal, and its traceback to the log; return the exit status.

    `file` is the program's. A hook of the script's for errors, or a stderr of its own, gets the error too.
    """
    now = record_time()
    whole = describe(error, file, is_module)
    failed = failure_of(worker, error, whole, now)
    with contextlib.suppress(OSError):
        os.close(0)  # the script may have used up its descriptors, and a word takes one
    _leave_word(run, failed)
    if not isinstance(error, AtollError) and ((hook := script_hook()) or sys.stderr is not sys.__stderr__):
        with contextlib.suppress(BaseException):
            (hook or sys.__excepthook__)(type(error), error, error.__traceback__)
    with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream; the launcher knows
        print(f"{END_OF_OUTPUT}\n{whole}", file=sys.__stderr__)
    return failed.exit_status


def _leave_word(run: RunDirectory, event: Failed | Ended) -> None:
    """Report this worker's end, in its journal and to the launcher. A full disk prevents only the former."""
    say(event)
    with contextlib.suppress(OSError), Journal(run.journal(event.worker)) as journal:
        journal(event)


def describe(error: BaseException, script: str, is_module: bool = False) -> str:
    """Return the traceback from the script's first frame on, without the frames that started the script."""
    trace = error.__traceback__
    own = _resolved(script)
    while trace is not None and _resolved(trace.tb_frame.f_code.co_filename) != own:
        trace = trace.tb_next
    if trace is None and is_module:  # in a package around the module
        trace = error.__traceback__
        while trace is not None and not is_script(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, trace)).rstrip("\n")
    except MemoryError:  # the script's objects live on in the frames
        return f"{type(error).__name__}: {text_of(error)}"


def _resolved(file: str) -> str:
    """Return a file's path without links; unchanged if this process's folder is gone."""
    try:
        return str(Path(file).resolve())
    except (OSError, RuntimeError):
        return file


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
