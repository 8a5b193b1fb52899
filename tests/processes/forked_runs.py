"""Run `atoll run` for a tenth of its cost: each of its processes is a fork of one that has imported torch.

    code, out, err = forked_run(folder, ["--workers", "2", "train.py"], deadline=60.0)

The command, torchrun's launcher, hub, shards and workers are the real ones, with process ids, sessions,
signals and exit statuses of their own; only `exec` and the imports are left out. What is started otherwise is
started as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from atoll.launch.processes import descendants
from support.pool import FORKSERVER

_END_SECONDS = 10.0  # for the processes of a run that was killed to end


def forked_run(
    folder: Path, arguments: Sequence[str], deadline: float, before: Callable[[], None] | None = None
) -> tuple[int | None, str, str]:
    """Run `atoll run` with `arguments` in `folder`: its exit status, stdout and stderr.

    The status is None where it had not ended after `deadline` seconds; all of its processes are killed then.
    `before` is called first; what it changes in Python is so in all processes of the run.
    """
    out, err = folder / "stdout", folder / "stderr"
    process = FORKSERVER.Process(target=_command, args=(str(folder), list(arguments), before))
    process.start()
    process.join(deadline)
    code = process.exitcode
    if code is None:
        assert process.pid is not None
        for each in (process.pid, *descendants(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.join(_END_SECONDS)
    process.close()
    return code, out.read_text(errors="replace"), err.read_text(errors="replace")


def _command(folder: str, arguments: list[str], before: Callable[[], None] | None) -> NoReturn:
    os.chdir(folder)
    if before is not None:
        before()
    with Path("stdout").open("wb") as out, Path("stderr").open("wb") as err:
        _become(
            "atoll.cli.app",
            ["run", *arguments],
            {**os.environ, "OMP_NUM_THREADS": "1"},
            out.fileno(),
            err.fileno(),
            session=True,
        )


class _Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A `Popen` that forks where the command is a module of this Python's."""

    def __init__(self, args: Any, *others: Any, **given: Any) -> None:
        is_module = isinstance(args, (list, tuple)) and len(args) > 2 and args[0] == sys.executable
        names = [each for each in (args[1:] if is_module else []) if each not in ("-u", "-m")]
        if not names or "pass_fds" in given or not names[0].startswith("atoll."):
            super().__init__(args, *others, **given)
            return
        self.args, self.returncode = args, None
        self.stdin = self.stdout = self.stderr = None
        self.text_mode = self._communication_started = False
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self._sigint_wait_secs = 0.25
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            out, err = given.get("stdout"), given.get("stderr")
            out_fd = out if isinstance(out, int) else out.fileno() if out is not None else 1
            err_fd = out_fd if err == subprocess.STDOUT else err.fileno() if err is not None else 2
            environment = given.get("env") or dict(os.environ)
            _become(names[0], names[1:], environment, out_fd, err_fd, bool(given.get("start_new_session")))


def _become(
    module: str, arguments: Sequence[str], environment: dict[str, str], out: int, err: int, session: bool
) -> NoReturn:
    """What a new Python that runs `module` does, from its start to the end of the process."""
    status = 1
    try:
        status = _live(module, arguments, environment, out, err, session)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def _live(
    module: str, arguments: Sequence[str], environment: dict[str, str], out: int, err: int, session: bool
) -> int:
    if session:
        os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for each in {int(path.name) for path in Path("/dev/fd").iterdir()} - {0, 1, 2}:
        with contextlib.suppress(OSError):  # the listing's own
            os.close(each)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    atexit._clear()
    _register_what_ends_well()
    _forget_parents()
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    _prepare(module)
    sys.argv = [module, *arguments]
    status = 0
    try:
        if module == "atoll.cli.app":
            from atoll.cli.app import main

            main()
        else:
            sys.modules.pop(module, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status & 0xFF


def _register_what_ends_well() -> None:
    """Register what runs at the end of a process that has imported these modules, in their order."""
    from zmq.utils import garbage

    from atoll.net import context
    from atoll.train.api import ending

    for act in (garbage.gc._atexit, context.finish, ending._wait_for_ends):
        atexit.register(act)


def _stream(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


def _forget_parents() -> None:
    """What multiprocessing knows of the process that this one is a fork of."""
    from multiprocessing import process, resource_tracker, util

    process._parent_process = None  # type: ignore[attr-defined]
    process._children.clear()  # type: ignore[attr-defined]
    current: Any = process.current_process()
    current._identity, current._parent_pid, current._name = (), None, "MainProcess"
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)


def _prepare(module: str) -> None:
    """Have this process's children forked, and what it needs imported by now."""
    import torch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    torch.set_num_threads(1)
    for place in (subprocess, subprocess_handler):
        vars(place)["Popen"] = _Forked
    if module == "atoll.cli.app":  # for all that come after
        import torch.distributed.run

        import atoll.hub.main
        import atoll.train.sync.peersstart  # noqa: F401
        from atoll.launch import run

        # Neither the picture nor TensorBoard's records, whose imports cost a second for each run.
        vars(run).update(draw_picture=lambda *_: "", _writers=lambda _directory, _progress: [])
    if module == "atoll.launch.worker" and "peers" in Path(os.environ["ATOLL_CONFIG"]).read_text():
        from support.cpu_sides import fork_cpu_sides

        fork_cpu_sides()
