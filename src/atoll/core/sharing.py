"""Permissions of a run's folders and files.

`run.readable` says whether the owner, the group or everyone may read them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from atoll.core.config import Readable

FOLDER_MODES: dict[Readable, int] = {"owner": 0o700, "group": 0o750, "all": 0o755}


def open_like_folder(path: Path, flags: int) -> int:
    """Open a file for the readers of its folder, and create it if it is missing; returns the descriptor."""
    handle = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # A file of another owner, or on a filesystem without modes, stays as it is.
    with contextlib.suppress(OSError):
        folder = stat.S_IMODE(path.parent.stat().st_mode)
        os.fchmod(handle, 0o600 | folder & 0o044)
    return handle


def make_folder_like_parent(path: Path) -> None:
    """Create a folder, and its parents, if it is missing. The readers of its parent may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        return
    path.mkdir(exist_ok=True)
    with contextlib.suppress(OSError):
        path.chmod(0o700 | stat.S_IMODE(path.parent.stat().st_mode) & 0o055)


@contextlib.contextmanager
def files_for(readable: Readable) -> Iterator[int]:
    """Create files and folders inside the block with the permissions of `readable`.

    Yields the umask from before, for child processes that do not follow.
    """
    with files_under(~FOLDER_MODES[readable] & 0o777) as before:
        yield before


@contextlib.contextmanager
def files_like(folder: Path) -> Iterator[None]:
    """Create files and folders inside the block for the readers of `folder`."""
    mode = stat.S_IMODE(folder.stat().st_mode) if folder.is_dir() else FOLDER_MODES["owner"]
    with files_under(~mode & 0o077 | 0o022):
        yield


@contextlib.contextmanager
def files_under(mask: int) -> Iterator[int]:
    """Set this process's umask inside the block; yields the umask from before."""
    before = os.umask(mask)
    try:
        yield before
    finally:
        os.umask(before)
