"""Forwarding of the workers' heartbeats by their launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from atoll.core.config import KEYS_VARIABLE, LAUNCHER_VARIABLE, SOCKETS_VARIABLE
from atoll.core.errors import AtollError
from atoll.hub.forwarder import Forwarder
from atoll.net.keys import read_keys


class Heartbeats:
    """Forwards the workers' heartbeats to the hub at `address`, if there is a folder for the socket.

    `warn` is called once if this fails; then each worker sends its own.
    """

    def __init__(
        self, address: str, environment: Mapping[str, str], run: str, warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._forwarder: Forwarder | None = None
        folder, keys = (environment.get(name) for name in (SOCKETS_VARIABLE, KEYS_VARIABLE))
        if not folder or not sys.platform.startswith("linux"):  # other systems have no such sockets
            return
        try:
            found = read_keys(keys) if keys else None
            self._forwarder = Forwarder(Path(folder), address, found, run)
        except (OSError, AtollError) as error:
            self._tell(str(error))

    def environment(self) -> dict[str, str]:
        """Return the environment variables by which workers find the launcher's socket."""
        return {} if self._forwarder is None else {LAUNCHER_VARIABLE: self._forwarder.launcher.name}

    def look(self) -> None:
        """Warn once if the heartbeats are no longer forwarded."""
        if self._forwarder is not None and self._forwarder.trouble:
            self._tell(self._forwarder.trouble)
            self._forwarder = None

    def close(self) -> None:
        """Stop forwarding."""
        if self._forwarder is not None:
            self._forwarder.close()

    def _tell(self, trouble: str) -> None:
        self._warn(f"the launcher passes no heartbeats on, and each worker sends its own: {trouble}")
