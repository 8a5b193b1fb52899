"""A folder for Unix sockets that only one user's processes reach: mode 0700, and a path short enough.

Each user of such a folder holds a lock on it, as long as its process lives. So a folder that nobody holds,
and in which nobody listens, was left by processes that were killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from atoll.core.errors import UserError

PREFIX = "atoll-"
KEY_FILE = "run.key"  # in the folder of a run that `atoll run` has started
_LONGEST = 60  # bytes of the folder's path: a socket's has at most 103 in all (Linux: 107)


def make_socket_folder() -> Path:
    """Make a folder of mode 0700, in $TMPDIR or else in /tmp. Raises UserError if there can be none."""
    why = ": the path of $TMPDIR is too long"
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        if len(os.fsencode(parent)) + len("/atoll-xxxxxxxx") > _LONGEST:
            continue
        try:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError as error:
            why = f": {error.strerror}"
            continue
        if path.stat().st_mode & 0o077 == 0:
            return path
        path.rmdir()
        why = ": its filesystem keeps no modes"
    raise UserError(
        f"{tempfile.gettempdir()}: cannot make a folder that only you may read, for the run's sockets{why}; "
        f"set TMPDIR to a folder whose path has at most {_LONGEST - 15} bytes"
    )


def check_socket_folder(folder: str) -> None:
    """Raise UserError unless the folder that others have named is this user's alone."""
    try:
        found = Path(folder).lstat()
    except (OSError, ValueError) as error:
        raise UserError(f"the nodes' folder of sockets cannot be used: {error}") from None
    if not _is_own(found):
        raise UserError(
            f"{folder}: the nodes' folder of sockets is not this user's alone: somebody else may have named "
            "it; start the run again"
        )


def hold_folder(folder: Path, *, alone: bool = False) -> int | None:
    """Lock a folder, shared with its other users or `alone`, until the returned descriptor is closed.

    Return None if the folder cannot be locked so: somebody else holds it, or the filesystem has no locks.
    systemd-tmpfiles, too, spares locked folders.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def remove_left_folders(parent: Path) -> None:
    """Remove folders of this user in `parent` whose processes were all killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if not _is_own(folder.lstat()) or not _holds_sockets_alone(folder):
                continue
            lock = hold_folder(folder, alone=True)
            if lock is not None:
                try:
                    # An earlier version of Atoll held no locks.
                    if not any(_listens(each) for each in folder.iterdir()):
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def remove_if_empty(address: str) -> None:
    """Remove the folder of sockets in which a server at `address` was, unless something else is there."""
    folder = Path(address.removeprefix("ipc://")).parent
    if address.startswith("ipc://") and folder.name.startswith(PREFIX):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _is_own(found: os.stat_result) -> bool:
    """True for a folder of this user that nobody else may enter."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _holds_sockets_alone(folder: Path) -> bool:
    """True for a folder of Atoll's: one with a key file, or with sockets and nothing else. An empty one may
    have been made just now, and not be locked yet."""
    if (folder / KEY_FILE).exists():
        return True
    modes = [each.lstat().st_mode for each in folder.iterdir()]
    return bool(modes) and all(map(stat.S_ISSOCK, modes))


def _listens(path: Path) -> bool:
    """True if a process listens at the socket `path`."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        return client.connect_ex(os.fsencode(path)) != errno.ECONNREFUSED
