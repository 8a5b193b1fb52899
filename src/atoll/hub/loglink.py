"""The hub's own connection to a log (shard 0's, or a site's): whom to fence, and what has been used."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from atoll.core.errors import UserError
from atoll.net.endpoint import Client
from atoll.net.keys import Keys
from atoll.store.leases import Key
from atoll.wire.messages import (
    VERSION,
    Fence,
    Fenced,
    Hello,
    Look,
    Looked,
    Refused,
    WireError,
    decode_untrusted,
    encode,
)

LIMIT = 2**26  # bytes of a message: all that an incarnation has ever used

_MESSAGES = 256  # taken in one go


class LogLink:
    """Tells the log whom to fence until it answers, over lost connections and before it is known where it is.

    `waiting()` gives those whom it has yet to fence. `fenced(message)` takes its word on what was used: asked
    for, or as news. `failed(line)` takes what the log or the connection refuses. `name` is who keeps the log.
    `looked(message)` takes its answers to `look`.
    """

    def __init__(
        self,
        keys: Keys | None,
        run: str,
        waiting: Callable[[], Collection[Key]],
        fenced: Callable[[Fenced], None],
        failed: Callable[[str], None],
        name: str = "shard 0",
        looked: Callable[[Looked], None] = lambda _looked: None,
    ) -> None:
        self._keys, self._run, self._name = keys, run, name
        self._waiting, self._fenced, self._failed, self._looked = waiting, fenced, failed, looked
        self._sent: set[Key] = set()  # on this connection
        self._losses = 0
        self._said = ""  # the last failure told: each only once
        self.client: Client | None = None

    def connect(self, address: str) -> None:
        """Who keeps the log is there; a connection to another place is given up."""
        if self.client is not None and self.client.address == address:
            return
        self.close()
        self.client = Client(address, self._keys, limit=LIMIT, name=self._name)
        self._losses = 0
        self._introduce()

    def flush(self) -> None:
        """Send the fences that are new."""
        if self.client is None:
            return
        waiting = set(self._waiting())
        for worker, incarnation in sorted(waiting - self._sent):
            self.client.send(encode(Fence(worker=worker, incarnation=incarnation)))
        self._sent = waiting

    def look(self, worker: int, incarnation: int) -> None:
        """Ask for a worker's connection to the log: now or not at all."""
        if self.client is not None and self.client.connected:
            self.client.send(encode(Look(worker=worker, incarnation=incarnation)))

    def take(self) -> None:
        """Take what the log has sent, and see that it knows us after a lost connection."""
        if self.client is None:
            return
        try:
            self.client.check()
        except UserError as error:
            self._fail(str(error))
        if self.client.losses != self._losses:
            self._losses = self.client.losses
            self._introduce()
        for _ in range(_MESSAGES):
            received = self.client.receive(0)
            if received is None:
                break
            self._handle(received[0])

    def close(self) -> None:
        """Let the connection go; what is not answered is asked again after the next `connect`."""
        if self.client is not None:
            self.client.close()
            self.client = None

    def _handle(self, header: bytes) -> None:
        try:
            message = decode_untrusted(header)
        except WireError as error:
            self._fail(f"{self._name} sent {error}")
            return
        if isinstance(message, Fenced):
            self._fenced(message)
        elif isinstance(message, Looked):
            self._looked(message)
        elif isinstance(message, Refused):
            self._fail(f"{self._name} refused: {message.reason}")

    def _introduce(self) -> None:
        assert self.client is not None
        hello = Hello(version=VERSION, run=self._run, role="hub", pid=os.getpid())
        self.client.send(encode(hello))
        self._sent.clear()
        self.flush()

    def _fail(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self._failed(line)
