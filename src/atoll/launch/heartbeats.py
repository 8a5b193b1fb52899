"""The launcher's passing on of its workers' heartbeats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from atoll.core.config import KEYS_VARIABLE, LAUNCHER_VARIABLE, SOCKETS_VARIABLE
from atoll.core.errors import AtollError
from atoll.hub.forwarder import Forwarder
from atoll.net.keys import read_keys


class Heartbeats:
    """Passes the workers' heartbeats on to the hub at `address`, where there is a folder for the socket.

    `warn` is told once of trouble, with which each worker sends its own.
    """

    def __init__(
        self, address: str, environment: Mapping[str, str], run: str, warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._forwarder: Forwarder | None = None
        folder, keys = (environment.get(name) for name in (SOCKETS_VARIABLE, KEYS_VARIABLE))
        if not folder or not sys.platform.startswith("linux"):  # others have no such sockets
            return
        try:
            found = read_keys(keys) if keys else None
            self._forwarder = Forwarder(Path(folder), address, found, run)
        except (OSError, AtollError) as error:
            self._tell(str(error))

    def environment(self) -> dict[str, str]:
        """What tells the workers of it."""
        return {} if self._forwarder is None else {LAUNCHER_VARIABLE: self._forwarder.launcher.name}

    def look(self) -> None:
        """Say so once if the heartbeats are not passed on any more."""
        if self._forwarder is not None and self._forwarder.trouble:
            self._tell(self._forwarder.trouble)
            self._forwarder = None

    def close(self) -> None:
        """Pass none on any more."""
        if self._forwarder is not None:
            self._forwarder.close()

    def _tell(self, trouble: str) -> None:
        self._warn(f"the launcher passes no heartbeats on, and each worker sends its own: {trouble}")
