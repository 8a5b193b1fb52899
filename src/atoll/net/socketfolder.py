"""A folder for Unix sockets that only one user's processes reach: mode 0700, and a path short enough."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from atoll.core.errors import UserError

PREFIX = "atoll-"
_LONGEST = 60  # bytes of the folder's path: a socket's has at most 103 in all (Linux: 107)


def make_socket_folder() -> Path:
    """A new folder of mode 0700, in $TMPDIR or else in /tmp. Raises UserError where there can be none."""
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
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UserError(
            f"{folder}: the nodes' folder of sockets is not this user's alone: somebody else may have named "
            "it; start the run again"
        )


def remove_if_empty(address: str) -> None:
    """Remove the folder of sockets in which a server at `address` was, unless something else is there."""
    folder = Path(address.removeprefix("ipc://")).parent
    if address.startswith("ipc://") and folder.name.startswith(PREFIX):
        with contextlib.suppress(OSError):
            folder.rmdir()
