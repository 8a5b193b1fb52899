"""`atoll lab run` from outside: the lab's folder, its first process, and the signals that end it.

A lab's folder holds files that its processes share. The runner locks the folder. The processes inside lock
its file `inside.lock` until the last one ends. The next start removes folders whose runner is gone; after a
recent kill it waits for the second lock first.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import msgspec

from atoll.core.decoding import from_json
from atoll.core.errors import RunError, UserError
from atoll.lab import namespaces
from atoll.lab.emulator import available
from atoll.lab.report import RECORD
from atoll.lab.spec import Result, Spec, check_command
from atoll.lab.topology import Topology

START_SECONDS = 30.0  # for the first process to report
CLEAR_SECONDS = 20.0  # for a killed lab's processes to be gone
_CLOSING_SECONDS = 30.0  # from the first signal to the end of workers, services and emulator
_GONE_SECONDS = 10.0  # for killed processes to be gone
_LOOK_SECONDS = 0.5
_TRY_SECONDS = 0.02  # between two attempts to get a lock
_TURN_SECONDS = 60.0  # for another start to finish clearing

_INSIDE_LOCK = "inside.lock"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_lab(
    topology: Topology,
    command: Sequence[str],
    *,
    folder: str | os.PathLike[str] | None = None,
    kept: Callable[[Path], str] = lambda _records: "",
) -> int:
    """Run `command` for each worker of `topology`, in its site; return the first failing worker's status.

    The status of a worker killed by a signal is 128 plus the signal; 130 after Ctrl-C, 143 after SIGTERM.

    Args:
        folder: for `lab.json`, the services' logs and the workers' journals; None: a new one below runs/.
        kept: called with the complete folder; returns text to print after its path.

    Raises:
        UserError: an argument is wrong, or this machine cannot have a lab; nothing was started.
        RunError: a part of the lab failed.
    """
    if missing := available():
        raise UserError(missing)
    check_command(command, topology, os.environ)
    way = namespaces.find_way()
    records = _make_records(folder)
    with _own_folder() as place, _passed_on() as signals:
        spec = Spec(topology, list(command), str(place), str(records), f"lab-{place.name}")
        spec.write(place / "spec.json")
        result = _Start(way, place, signals).follow()
    if result.report:
        print(f"{result.report}\nthe lab's records are in {records}{kept(records)}", flush=True)
    if result.line:
        if result.user or not result.report:
            raise (UserError if result.user else RunError)(result.line)
        print(f"atoll: {result.line}", file=sys.stderr, flush=True)
    return result.status


def _make_records(folder: str | os.PathLike[str] | None) -> Path:
    """Make the folder of records, with its subfolders."""
    try:
        path = _new_folder(Path("runs")) if folder is None else Path(folder)
        if (path / RECORD).exists():
            raise UserError(f"{path}: holds a lab's records already; remove it, or give another folder")
        for part in ("logs", "journals"):
            (path / part).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot make the folder of records: {error.strerror}") from None
    return path.absolute()


def _new_folder(parent: Path) -> Path:
    """Make a new folder in `parent`, named after the time."""
    parent.mkdir(parents=True, exist_ok=True)
    name, count = f"lab-{time.strftime('%Y%m%d-%H%M%S')}", 1
    while True:
        path = parent / (name if count == 1 else f"{name}-{count}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
        count += 1


# The lab's own folder


def labs_folder() -> Path:
    """Return the folder of this user's labs, made if missing. Raises UserError if others may write there."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    user = os.geteuid()
    parent = Path(runtime) / "atoll-lab" if runtime else Path("/tmp") / f"atoll-lab-{user}"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = parent.lstat()
    except OSError as error:
        raise UserError(f"{parent}: cannot make the folder of labs: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o022:
        raise UserError(f"{parent}: other users may write there; remove it, or set XDG_RUNTIME_DIR")
    return parent


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """Make a locked folder for one lab, and remove it afterwards. Leftovers of killed labs are removed
    first."""
    with _turn() as parent:
        for left in sorted(path for path in parent.iterdir() if path.is_dir()):
            _clear(left)
        number = 1
        while (path := parent / f"{os.getpid()}-{number}").exists():
            number += 1
        (path / "tmp").mkdir(mode=0o700, parents=True)
        lock = _lock(path)
        assert lock is not None, "nobody else makes folders now"
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
        with contextlib.suppress(OSError), _turn() as parent:
            parent.rmdir()  # unless others are in it


@contextlib.contextmanager
def _turn() -> Iterator[Path]:
    """Lock the folder of labs, for one process at a time to add or remove a lab."""
    until = time.monotonic() + _TURN_SECONDS
    while True:
        parent = labs_folder()
        with _locked(parent, until, "another lab to clear what a killed one left") as handle:
            if _is_same(parent, handle):  # else the last lab's process removed the folder meanwhile
                yield parent
                return


def _is_same(path: Path, handle: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(handle))
    return False


def _clear(left: Path) -> None:
    """Remove a lab's folder unless its runner lives."""
    try:
        lock = _lock(left)
    except FileNotFoundError:  # its runner is removing it now
        return
    if lock is None:
        return
    try:
        inside, until = left / _INSIDE_LOCK, time.monotonic() + CLEAR_SECONDS
        what = f"the processes of the lab {left}, whose runner was killed, to be gone"
        if inside.exists():
            with _locked(inside, until, what):
                pass
        shutil.rmtree(left, ignore_errors=True)
    finally:
        os.close(lock)


@contextlib.contextmanager
def _locked(path: Path, until: float, what: str) -> Iterator[int]:
    """Open and lock a file or folder for the context. `until` is by time.monotonic()."""
    start = time.monotonic()
    while (handle := _lock(path)) is None:
        if time.monotonic() > until:
            raise RunError(f"waited {time.monotonic() - start:.0f} s for {what}")
        time.sleep(_TRY_SECONDS)
    try:
        yield handle
    finally:
        os.close(handle)


def _lock(path: Path) -> int | None:
    """Open and lock a file or folder; None if another process holds the lock."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


# The lab's first process


class _Signals:
    """Signals to this process, passed on to the lab, which does not get the terminal's own."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.first_at = 0.0
        self._control = -1  # the pipe to the lab's first process, once there is one

    def hand_to(self, control: int) -> None:
        """Write signals to `control` from now on, earlier ones included; -1: to nobody."""
        self._control = control
        self._write(self.came)

    def take(self, signum: int, _frame: FrameType | None) -> None:
        self.came.append(signum)
        self.first_at = self.first_at or time.monotonic()
        self._write([signum])

    def _write(self, signums: Sequence[int]) -> None:
        if self._control >= 0 and signums:
            with contextlib.suppress(OSError):  # the first process has ended
                os.write(self._control, bytes(signums))


@contextlib.contextmanager
def _passed_on() -> Iterator[_Signals]:
    signals = _Signals()
    before = {
        signum: signal.signal(signum, signals.take)
        for signum in _SIGNALS
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN  # under nohup
    }
    try:
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _Start:
    """A lab's first process, from its start to the end of the last process inside."""

    def __init__(self, way: Sequence[str], place: Path, signals: _Signals) -> None:
        self._signals = signals
        self._replies = b""
        self._children = _children()  # not of this lab
        namespaces.adopt_orphans()  # if `unshare` is killed, this process reaps the lab's first one
        control, self._control = os.pipe2(os.O_CLOEXEC)
        self._result, result = os.pipe2(os.O_CLOEXEC)
        given = [control, result, os.dup(1), os.dup(2)]
        (place / _INSIDE_LOCK).touch(0o600)
        lock = _lock(place / _INSIDE_LOCK)
        assert lock is not None, "nobody else knows of this folder"
        module = [sys.executable, "-m", "atoll.lab.inside", str(place / "spec.json"), *map(str, given)]
        self._log = place / "unshare.log"
        sys.stdout.flush()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*way, *module],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[*given, lock],
                start_new_session=True,  # the terminal's Ctrl-C reaches only this process
            )
        for handle in (*given, lock):
            os.close(handle)
        signals.hand_to(self._control)

    def follow(self) -> Result:
        """Wait for the end of the whole lab; return the first process's result."""
        try:
            until = time.monotonic() + START_SECONDS
            self._read(lambda: until if b"\n" not in self._replies else 0.0)
            if b"\n" not in self._replies and self._process.poll() is None:
                raise RunError(f"the lab's first process did not begin within {START_SECONDS:g} s")
            self._read(self._deadline)
        finally:
            self._signals.hand_to(-1)
            os.close(self._control)
            os.close(self._result)
            self._wait_for_the_last()
        try:
            return from_json(self._replies.partition(b"\n")[2], Result)
        except msgspec.DecodeError:
            said = self._log.read_text(errors="replace").strip().splitlines()
            why = f": {said[-1]}" if said else ""
            return Result(1, f"the lab's first process was killed or failed, and the lab ended with it{why}")

    def _read(self, deadline: Callable[[], float]) -> None:
        """Read the first process's output until it ends or `deadline()` has passed (time.monotonic())."""
        poll = select.poll()
        poll.register(self._result, select.POLLIN)
        while (left := deadline() - time.monotonic()) > 0:
            if poll.poll(1000 * min(left, _LOOK_SECONDS)):
                data = os.read(self._result, 65536)
                if not data:
                    return
                self._replies += data
            elif self._process.poll() is not None:
                return  # `unshare` was killed before it had bound the first process to itself

    def _deadline(self) -> float:
        """Return the time to give up: inf before a request to end, 0 at the third request."""
        if not self._signals.came:
            return math.inf
        return self._signals.first_at + _CLOSING_SECONDS if len(self._signals.came) < 3 else 0.0

    def _wait_for_the_last(self) -> None:
        """Wait until no process of the lab is left. Its first process is the last to go, by force if need
        be."""
        try:
            self._process.wait(_GONE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # which ends the first process, and so all others
            self._process.wait(_GONE_SECONDS)
        if self._process.returncode >= 0:
            return
        until = time.monotonic() + _GONE_SECONDS
        while time.monotonic() < until and (orphans := _children() - self._children):
            for pid in orphans:  # `unshare` was killed, and the first process is ours to reap
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(_TRY_SECONDS)


def _children() -> set[int]:
    """Return the pids of this thread's children, zombies included; this thread starts all of the process."""
    with contextlib.suppress(OSError):
        return {int(pid) for pid in Path("/proc/thread-self/children").read_text().split()}
    return set()
