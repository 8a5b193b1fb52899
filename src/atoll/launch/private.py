"""The folder of a run's secrets: its key file, and the sockets by which its shards and nodes are reached.

The folder has mode 0700, so only its owner's processes can read the key or connect to a socket in it. It does
not lie in the run directory: the path of a socket has at most 107 characters, and some filesystems keep no
modes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from atoll.core.config import KEYS_VARIABLE, SOCKETS_VARIABLE
from atoll.net.keys import make_keys, write_keys
from atoll.net.socketfolder import KEY_FILE, hold_folder, make_socket_folder, remove_left_folders


class PrivateFolder:
    """A folder that is made at the run's start, with a new key, and removed at its end.

    `shown_at`: a symbolic link to the key file is made there, for commands that the user gives by hand.
    Raises UserError if no folder of mode 0700 can be made.
    """

    def __init__(self, shown_at: Path) -> None:
        self.path = make_socket_folder()
        self._lock = hold_folder(self.path, alone=True)
        remove_left_folders(self.path.parent)
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
        """Return the environment variables that give the run's processes the folder."""
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
