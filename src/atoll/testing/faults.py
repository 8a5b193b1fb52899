"""A plan of faults: which process is killed, stopped or slowed at which point of its code, and what fired.

    plan = write(tmp_path / "plan.json", [Fault("shard.logged", iteration=7, role="shard", index=1)])
    process = Popen([sys.executable, "-m", "atoll.testing.faults", str(plan), "--", "train.py"], env=...)
    ...
    assert not pending(plan)  # each fault of the plan has fired, as often as it says

The points are those of `atoll.core.points`. Who a process is, it is told by the environment:
`ATOLL_FAULTS_WHO="worker 1"`, "shard 0" or "hub"; else it is worker `$RANK`. Each firing is a line of
`plan.json.fired`, written before the deed, so that a fault fires as often as it says over all processes and
all that are started again in their place, and a test can count. A fault is one of:

| action | what happens at the point |
| --- | --- |
| `kill` | SIGKILL to the whole process |
| `stop` | SIGSTOP to the whole process; SIGCONT after `seconds`, or never with 0 |
| `sleep` | the thread that got there sleeps for `seconds`: a part that is slow, not gone |
| `full` | OSError "No space left on device" is raised: a disk that is full |
| `note` | nothing: the firing is written down |
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from atoll.core import points
from atoll.core.decoding import from_json
from atoll.core.errors import AtollError, DeadlineError, UserError

WHO_VARIABLE = "ATOLL_FAULTS_WHO"  # "worker 1", "shard 0", "hub"
LOCK_SECONDS = 30.0  # others hold the lock of the list of firings for microseconds, unless they were stopped

Action = Literal["kill", "stop", "sleep", "full", "note"]


class Fault(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A fault that a plan has for one process, or for each that fits.

    It happens `times` times over all processes.

    Attributes:
        point: the place in the code, by its name.
        iteration: the iteration at which it happens; None for any.
        role: "worker", "shard", "site", "hub"; None for any.
        index: the process's number, or the site of a site's shard; None for any.
        rank: a worker's number; None for any process.
        seconds: how long a "stop" or a "sleep" lasts.
    """

    point: str
    action: Action = "kill"
    iteration: int | None = None
    role: str | None = None
    index: int | str | None = None  # of a site's shard: the site's name
    rank: int | None = None
    seconds: float = 0.0
    times: int = 1

    def fits(self, who: str) -> bool:
        """True if the fault is for the process of this name: "worker 1", "hub"."""
        role, _, index = who.partition(" ")
        if self.rank is not None and (role, index) != ("worker", str(self.rank)):
            return False
        return self.role in (None, role) and (self.index is None or str(self.index) == index)


class Firing(msgspec.Struct, frozen=True):
    """A fault that has happened, or was about to. `time` is this machine's monotonic clock, in seconds."""

    fault: int  # its place in the plan
    point: str
    iteration: int
    who: str
    pid: int
    time: float


def write(path: str | os.PathLike[str], faults: Sequence[Fault]) -> Path:
    """Write a plan, of which nothing has fired yet; gives its path."""
    plan = Path(path)
    _fired_file(plan).unlink(missing_ok=True)
    plan.write_bytes(msgspec.json.format(msgspec.json.encode(list(faults))))
    return plan


def read(path: str | os.PathLike[str]) -> list[Fault]:
    """The faults of a plan; raises UserError where it is none."""
    try:
        plan = from_json(Path(path).read_bytes(), list[Fault])
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: not a plan of faults: {error}") from None
    for place, fault in enumerate(plan):
        if fault.point not in points.POINTS:
            near = difflib.get_close_matches(fault.point, points.POINTS, 1)
            meant = f"; did you mean {near[0]}?" if near else "; atoll.core.points has them all"
            raise UserError(f"{path}: fault {place}: there is no point {fault.point!r}{meant}")
        if fault.seconds < 0 or fault.times < 1:
            raise UserError(f"{path}: fault {place}: seconds must be at least 0, and times at least 1")
    return plan


def fired(path: str | os.PathLike[str]) -> list[Firing]:
    """Return the faults of a plan that have happened so far, in order."""
    try:
        raw = _fired_file(Path(path)).read_bytes()
    except FileNotFoundError:
        return []
    return [from_json(line, Firing) for line in raw.splitlines()]


def pending(path: str | os.PathLike[str]) -> list[Fault]:
    """The faults of a plan that have not fired as often as they say: for `assert not pending(plan)`."""
    count = Counter(firing.fault for firing in fired(path))
    return [fault for place, fault in enumerate(read(path)) if count[place] < fault.times]


def install(path: str | os.PathLike[str], who: str | None = None) -> None:
    """Let the plan's faults happen to this process, which is `who` ("worker 1"; None: by the environment)."""
    plan = Path(path).resolve()  # the program may change its directory
    me = _who() if who is None else _checked(who, "who")
    mine: dict[str, list[tuple[int, Fault]]] = {}
    for place, fault in enumerate(read(plan)):
        if fault.fits(me):
            mine.setdefault(fault.point, []).append((place, fault))

    def handler(point: str, iteration: int) -> None:
        for place, fault in mine.get(point, ()):
            if fault.iteration in (None, iteration):
                firing = Firing(place, point, iteration, me, os.getpid(), time.monotonic())
                if _claim(plan, firing, fault.times):
                    _happen(fault)

    points.install(handler)


def _who() -> str:
    told = os.environ.get(WHO_VARIABLE)
    if told is not None:
        return _checked(told, WHO_VARIABLE)
    return f"worker {os.environ.get('RANK') or os.environ.get('ATOLL_RANK') or 0}"


def _checked(who: str, name: str) -> str:
    if not re.fullmatch(r"[a-z]+( \w+)?", who):
        raise UserError(f"{name}={who}: write it as a role and an index, such as 'worker 1', or 'hub'")
    return who


def _fired_file(plan: Path) -> Path:
    return plan.with_name(plan.name + ".fired")


def _claim(plan: Path, firing: Firing, times: int) -> bool:
    """Write the firing down, unless the fault has fired `times` times already, in whatever process."""
    with _fired_file(plan).open("ab+") as file, _locked(file):
        file.seek(0)
        before = sum(from_json(line, Firing).fault == firing.fault for line in file)
        if before >= times:
            return False
        file.write(msgspec.json.encode(firing) + b"\n")
        file.flush()
    return True


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Nobody else counts or writes meanwhile, nor another thread of this process."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                raise DeadlineError(f"{file.name} was locked by another for {LOCK_SECONDS:g} s") from None
            time.sleep(0.001)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _happen(fault: Fault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LOCK_SECONDS)  # not a line of this thread runs between the signal and the end
    elif fault.action == "stop":
        _stop(fault.seconds)
    elif fault.action == "sleep":
        time.sleep(fault.seconds)
    elif fault.action == "full":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (a planned fault at {fault.point})")


def _stop(seconds: float) -> None:
    """Stop this process; who is stopped cannot wake itself, so that a child does."""
    me = os.getpid()
    wake = None
    if seconds:
        script = f"sleep {seconds}; kill -CONT {me}"
        wake = subprocess.Popen(
            ["sh", "-c", script], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
    os.kill(me, signal.SIGSTOP)
    time.sleep(0.05)  # by then the signal has come; what is left of the sleep passes after SIGCONT
    if wake is not None:
        wake.wait(seconds + LOCK_SECONDS)


_USAGE = "usage: python -m atoll.testing.faults PLAN.json -- SCRIPT|-m MODULE [ARGUMENTS]"


def main(arguments: Sequence[str]) -> None:
    """Run a script, or a module, under a plan; raises UserError for arguments that are none."""
    if len(arguments) < 3 or arguments[1] != "--" or (arguments[2] == "-m" and len(arguments) < 4):
        raise UserError(_USAGE)
    plan, _, *program = arguments
    install(plan)
    points.reach("faults.start")
    if program[0] == "-m":
        sys.argv = program[1:]  # runpy puts the module's file into the first
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    if not Path(program[0]).exists():
        raise UserError(f"{program[0]}: there is no such script")
    sys.argv = list(program)
    sys.path.insert(0, str(Path(program[0]).resolve().parent))
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except AtollError as error:  # of the plan, or one that a script would have shown with its stack
        print(f"atoll: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
