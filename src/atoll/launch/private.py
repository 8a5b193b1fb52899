"""The folder of a run's secrets: its key file, and the sockets by which its shards and nodes are reached.

The folder has mode 0700, so only its owner's processes can read the key or connect to a socket in it. It does
not lie in the run directory: the path of a socket has at most 107 characters, and some filesystems keep no
modes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from atoll.core.config import KEYS_VARIABLE, SOCKETS_VARIABLE
from atoll.net.keys import make_keys, write_keys
from atoll.net.socketfolder import PREFIX, make_socket_folder

KEY_FILE = "run.key"


class PrivateFolder:
    """Made at the run's start, with a new key; removed at its end.

    `shown_at`: a symbolic link to the key file is made there, for commands that the user gives by hand.
    Raises UserError where no folder of mode 0700 can be made.
    """

    def __init__(self, shown_at: Path) -> None:
        self.path = make_socket_folder()
        # The lock tells that the launcher lives. systemd-tmpfiles, too, spares folders that are locked.
        self._lock = _lock(self.path)
        _remove_left(self.path.parent)
        self._shown_at = shown_at
        try:
            write_keys(self.key_file, make_keys())
        except BaseException:
            self.close()
            raise
        with contextlib.suppress(OSError):  # a filesystem without symbolic links: the key is found without it
            shown_at.parent.mkdir(parents=True, exist_ok=True)
            shown_at.unlink(missing_ok=True)
            shown_at.symlink_to(self.key_file)

    @property
    def key_file(self) -> Path:
        """The run's key, mode 0600."""
        return self.path / KEY_FILE

    def environment(self) -> dict[str, str]:
        """Return the environment variables that tell the run's processes of the folder."""
        return {KEYS_VARIABLE: str(self.key_file), SOCKETS_VARIABLE: str(self.path)}

    def close(self) -> None:
        """Remove the folder."""
        if self._shown_at.is_symlink():
            with contextlib.suppress(OSError):
                self._shown_at.unlink()
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(folder: Path) -> int | None:
    """Lock a folder; None where another process has it, or it cannot be locked."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _remove_left(parent: Path) -> None:
    """Remove what launchers of this user have left that were killed. With each its run's processes ended."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.geteuid() or not (folder / KEY_FILE).exists():
                continue
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
