"""torchrun's launcher, as `atoll run` starts it: ends with its parent, leaves word of how workers ended.

Run as a module, with torchrun's own arguments. torchrun starts each worker in a session of its own, sends
SIGTERM to the others when one fails, and hands SIGINT and SIGTERM on to all of them.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

from atoll.launch.processes import PARENT_VARIABLE, die_with_parent
from atoll.observe.rundir import RunDirectory


class WorkerEnd(msgspec.Struct, frozen=True):
    """How a worker's process ended: `exit_code` is its status, or minus the signal that killed it."""

    worker: int
    pid: int
    exit_code: int


def write_ends(ends: list[WorkerEnd], path: Path) -> None:
    path.write_bytes(msgspec.json.encode(ends))


def read_ends(path: Path) -> list[WorkerEnd]:
    """The ends of the workers that failed, in the order in which the launcher saw them; empty if none did."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[WorkerEnd])
    except (FileNotFoundError, msgspec.DecodeError):  # the launcher was killed before, or while, it wrote
        return []


def main() -> None:
    # SIGTERM, not SIGKILL: the launcher then stops its workers' whole sessions, what they started included.
    die_with_parent(signal.SIGTERM, int(os.environ[PARENT_VARIABLE]))
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for the workers
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    run = RunDirectory.from_environment()
    assert run is not None, "started by atoll.launch.run, which sets the run directory"
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        ends = [WorkerEnd(rank, failure.pid, failure.exitcode) for rank, failure in error.failures.items()]
        write_ends(ends, run.ends)
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None


if __name__ == "__main__":
    main()
