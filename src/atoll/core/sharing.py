"""Who may read a run's files: the modes of its folders and files."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from atoll.core.config import Readable

FOLDER_MODES: dict[Readable, int] = {"owner": 0o700, "group": 0o750, "all": 0o755}


def open_like_folder(path: Path, flags: int) -> int:
    """Open a file, made where it is missing: whoever may read its folder may read the file."""
    handle = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # A file of another owner, or on a filesystem without modes, stays as it is.
    with contextlib.suppress(OSError):
        folder = stat.S_IMODE(path.parent.stat().st_mode)
        os.fchmod(handle, 0o600 | folder & 0o044)
    return handle


def make_folder_like_parent(path: Path) -> None:
    """Make a folder, where it is missing: whoever may read the one above may read this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        return
    path.mkdir(exist_ok=True)
    with contextlib.suppress(OSError):
        path.chmod(0o700 | stat.S_IMODE(path.parent.stat().st_mode) & 0o055)


@contextlib.contextmanager
def files_for(readable: Readable) -> Iterator[int]:
    """Give files and folders that this process makes while this is entered the modes of `readable`. Gives the
    process's own umask, for children that are not to follow."""
    with files_under(~FOLDER_MODES[readable] & 0o777) as before:
        yield before


@contextlib.contextmanager
def files_like(folder: Path) -> Iterator[None]:
    """Let whoever may read `folder` read what this process makes while this is entered."""
    mode = stat.S_IMODE(folder.stat().st_mode) if folder.is_dir() else FOLDER_MODES["owner"]
    with files_under(~mode & 0o077 | 0o022):
        yield


@contextlib.contextmanager
def files_under(mask: int) -> Iterator[int]:
    """Make files and folders under this umask while this is entered. Gives the one before."""
    before = os.umask(mask)
    try:
        yield before
    finally:
        os.umask(before)
