"""The hub's own connection to a log (shard 0's, or a site's): whom to fence, and what has been used."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator

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
    """Tells the log of `run` whom to fence until it answers, over lost connections and before it is known
    where it is. `name` is who keeps the log. `failed(line)` takes what the log or the connection refuses."""

    def __init__(self, keys: Keys | None, run: str, name: str, failed: Callable[[str], None]) -> None:
        self._keys, self._run, self._name, self._failed = keys, run, name, failed
        self._sent: set[Key] = set()  # fences, on this connection
        self._losses = 0
        self._said = ""  # the last failure told: each only once
        self.client: Client | None = None

    def connect(self, address: str) -> None:
        """Who keeps the log is there; a connection to another place is given up. Raises UserError for an
        address that cannot be used from here."""
        if self.client is not None and self.client.address == address:
            return
        self.close()
        self.client = Client(address, self._keys, limit=LIMIT, name=self._name)
        self._losses = 0
        self._introduce(self.client)

    def flush(self, waiting: Collection[Key]) -> None:
        """Send the fences that are new, of those that wait for an answer."""
        if self.client is None:
            return
        for worker, incarnation in sorted(set(waiting) - self._sent):
            self.client.send(encode(Fence(worker=worker, incarnation=incarnation)))
        self._sent = set(waiting)

    def look(self, worker: int, incarnation: int) -> None:
        """Ask for a worker's connection to the log: now or not at all."""
        if self.client is not None and self.client.connected:
            self.client.send(encode(Look(worker=worker, incarnation=incarnation)))

    def take(self) -> Iterator[Fenced | Looked]:
        """What the log has sent: its word on what was used, asked for or as news, and its answers to `look`.
        After a lost connection it is told again who this is."""
        client = self.client
        if client is None:
            return
        try:
            client.check()
        except UserError as error:
            self._fail(str(error))
        if client.losses != self._losses:
            self._losses = client.losses
            self._introduce(client)
        for _ in range(_MESSAGES):
            received = client.receive(0)
            if received is None:
                break
            try:
                message = decode_untrusted(received[0])
            except WireError as error:
                self._fail(f"{self._name} sent {error}")
                continue
            if isinstance(message, (Fenced, Looked)):
                yield message
            elif isinstance(message, Refused):
                self._fail(f"{self._name} refused: {message.reason}")

    def close(self) -> None:
        """Let the connection go; what is not answered is asked again after the next `connect`."""
        if self.client is not None:
            self.client.close()
            self.client = None

    def _introduce(self, client: Client) -> None:
        client.send(encode(Hello(version=VERSION, run=self._run, role="hub", pid=os.getpid())))
        self._sent.clear()

    def _fail(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self._failed(line)
