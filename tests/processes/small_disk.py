"""A file system of a few MiB, to be filled: a tmpfs in a mount namespace of its own.

A process holds the namespace, and with it goes all. Others reach what is mounted there through
/proc/PID/root (proc(5)), so a test and the processes that it starts need no namespace themselves. Root
makes it as it is, others in a user namespace, where the system lets them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_WAYS = (["--mount"], ["--mount", "--user", "--map-root-user"])
_HOLD = 'mount -t tmpfs -o size="$1" none "$2" && echo mounted && exec cat'  # until stdin ends, with the test
_PIECE = bytes(2**16)


class NoDiskError(Exception):
    """Why there can be none."""


class SmallDisk:
    """`folder` is on a file system of `size` bytes. Who resolves the path ends in another one: to such, it is
    `where`, in a process that is started by `inside`."""

    def __init__(self, where: Path, size: int) -> None:
        where.mkdir(parents=True, exist_ok=True)
        self.where = where
        self._holder, self._way = _mount(where, size)
        self.folder = Path(f"/proc/{self._holder.pid}/root{where}")
        self._filler = self.folder / "filler"
        assert os.statvfs(self.folder).f_blocks * os.statvfs(self.folder).f_frsize == size

    def fill(self, leave: int = 0) -> None:
        """Let `leave` bytes be free, in whole pages."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(_PIECE)
        os.truncate(self._filler, max(0, self._filler.stat().st_size - leave))

    def inside(self, *command: str) -> list[str]:
        """The command that runs `command` in the namespace."""
        own = ["--user", "--preserve-credentials"] if "--user" in self._way else []
        return ["nsenter", f"--target={self._holder.pid}", *own, "--mount", "--", *command]

    def make_room(self) -> None:
        self._filler.unlink()

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


def _mount(where: Path, size: int) -> tuple[subprocess.Popen[str], list[str]]:
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None:
        raise NoDiskError("mount namespaces are made by Linux's `unshare` (util-linux)")
    said = ""
    for way in _WAYS:
        command = ["unshare", *way, "sh", "-c", _HOLD, "sh", str(size), str(where.absolute())]
        holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None
        if holder.stdout.readline() == "mounted\n":
            return holder, way
        said = holder.communicate()[1].strip() or said
    raise NoDiskError(f"this user may not mount a tmpfs in a namespace: {said}")


@contextlib.contextmanager
def small_disk(where: Path, size: int) -> Iterator[SmallDisk]:
    disk = SmallDisk(where, size)
    try:
        yield disk
    finally:
        disk.close()
