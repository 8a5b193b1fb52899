"""The run directory, with the path of each record of a run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.core.characters import encoded
from atoll.core.config import Readable
from atoll.core.errors import UserError
from atoll.core.sharing import FOLDER_MODES, open_like_folder

_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")  # lines about the run name the directory
DIRECTORY_VARIABLE = "ATOLL_RUN_DIRECTORY"  # set by `atoll run` for its workers


class UsedError(UserError):
    """The directory holds the records of a run, or a run is at work there."""


class Claim:
    """A lock on a run directory, until `release` or the end of the process.

    `trouble` is the reason if the directory could not be locked: nothing then keeps another run out of it.
    """

    def __init__(self, descriptor: int, trouble: str = "", lock: Path | None = None) -> None:
        self._descriptor, self.trouble, self._lock = descriptor, trouble, lock

    @property
    def removed(self) -> str:
        """A line on the removal or move of the directory by somebody else; empty if it is still there."""
        if self._descriptor < 0 or self._lock is None:
            return ""
        own = os.fstat(self._descriptor)
        with contextlib.suppress(OSError):
            found = self._lock.stat()
            if (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino):
                return ""
        return (
            f"{self._lock.parent}: was removed or moved while the run was at work; its records and figures "
            "end there, the training did not"
        )

    def release(self) -> None:
        """Unlock the directory."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@dataclass(frozen=True)
class RunDirectory:
    """The paths in a run directory; nothing is created before `create`."""

    path: Path

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> RunDirectory | None:
        """Return the directory that `atoll run` has given this worker; None outside of `atoll run`."""
        path = (os.environ if environment is None else environment).get(DIRECTORY_VARIABLE)
        return RunDirectory(Path(path)) if path else None

    @property
    def name(self) -> str:
        """The run's name: the directory's name, as text that can be sent."""
        return encoded(self.path.name).decode()

    @property
    def config(self) -> Path:
        """The configuration as used."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON line per iteration, all workers merged (`observe.metrics.Line`)."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The whole run in one JSON object (`observe.summary.Summary`)."""
        return self.path / "summary.json"

    @property
    def picture(self) -> Path:
        return self.path / "report.png"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def launcher_log(self) -> Path:
        """The output of torchrun's launcher."""
        return self.logs / "launcher.log"

    @property
    def ends(self) -> Path:
        """The ends of the workers' processes as seen by the launcher; exists only if one failed."""
        return self.logs / "ends.json"

    def ends_of(self, first: int) -> Path:
        """Return the file with the ends of one of several launches; `first` is its first worker."""
        return self.logs / f"ends-{first}.json"

    def log(self, worker: int) -> Path:
        """Return the file with the worker's stdout and stderr."""
        return self.logs / f"worker-{worker}.log"

    @property
    def workers(self) -> Path:
        return self.path / "workers"

    def journal(self, worker: int) -> Path:
        """Return the file with the worker's events (`observe.journal`)."""
        return self.workers / f"{worker}.jsonl"

    def journals(self) -> dict[int, Path]:
        """Return the existing journals, by worker."""
        found = {int(path.stem): path for path in self.workers.glob("*.jsonl") if path.stem.isdecimal()}
        return dict(sorted(found.items()))

    @property
    def lock(self) -> Path:
        """The file that `atoll run` or worker 0 locks during a run; holds the process's id."""
        return self.path / "lock"

    def claim(self, readable: Readable = "owner") -> Claim:
        """Create and lock the directory for a new run; `readable` may read it.

        Raises UsedError if the directory has another run's records or another run is at work there, and
        UserError if it cannot be created.
        """
        if _CONTROLS.search(str(self.path)):
            raise UserError(f"run.directory {str(self.path)!r} holds control characters; give another name")
        try:
            is_used = self._is_used
        except OSError as error:  # a name that is too long, a loop of links
            raise self._not_made(error) from None
        if is_used:
            if self.lock.exists():
                self.hold().release()  # raises if that run is still at work
            raise self._used()
        self.create(readable)
        claim = self.hold()
        if self._is_used:  # by a run that has ended meanwhile
            claim.release()
            raise self._used()
        return claim

    def hold(self) -> Claim:
        """Lock the directory against other runs; raises UsedError if one is at work there."""
        try:
            descriptor = open_like_folder(self.lock, os.O_RDWR)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR):
                raise UserError(f"{self.path}: cannot write there: {error.strerror}") from None
            return Claim(-1, self._not_locked(error))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
            os.close(descriptor)
            process = f" (process {who})" if who.isdecimal() else ""
            raise UsedError(
                f"{self.path}: a run is at work there{process}; wait for its end, or give another "
                "run.directory"
            ) from None
        except OSError as error:  # a file system without locks
            os.close(descriptor)
            return Claim(-1, self._not_locked(error))
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError:  # a full disk; the lock holds all the same
            pass
        return Claim(descriptor, lock=self.lock)

    def _not_locked(self, error: OSError) -> str:
        return f"{self.lock}: {error.strerror}; nothing keeps a second run out of the run directory"

    @property
    def _is_used(self) -> bool:
        """True if the directory has records of a run, with which new ones would be mixed."""
        return self.summary.exists() or bool(self.journals())

    def _used(self) -> UsedError:
        return UsedError(f"{self.path}: holds a run already; remove it, or give another run.directory")

    def create(self, readable: Readable = "owner") -> None:
        """Create the directory and its subfolders, for `readable` to read; raises UserError if that fails.

        A directory that is not empty keeps its mode, as do the folders above.
        """
        mode = FOLDER_MODES[readable]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not any(self.path.iterdir()):
                with contextlib.suppress(PermissionError):  # another user's directory
                    self.path.chmod(mode)
            for directory in (self.logs, self.workers):
                if not directory.exists():
                    directory.mkdir(exist_ok=True)
                    directory.chmod(mode)
        except OSError as error:
            raise self._not_made(error) from None

    def _not_made(self, error: OSError) -> UserError:
        where = Path(error.filename or self.path)
        if isinstance(error, FileExistsError):
            why = "a link that leads nowhere is there" if where.is_symlink() else "a file is there"
        else:
            why = error.strerror or str(error)
        return UserError(f"{where}: cannot make the run directory: {why}; give another run.directory")
