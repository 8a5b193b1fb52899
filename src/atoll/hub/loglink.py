"""The hub's connection to one log, shard 0's or a site's: fences, and reports of used samples."""

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

LIMIT = 2**26  # bytes of a message, which may list all samples of an incarnation

_MESSAGES = 256  # the most taken at a time


class LogLink:
    """Sends fences to the log of `run` until it answers, across lost connections and before its address is
    known. `name` is the name of the log's shard. `failed(line)` is called with refusals and connection
    errors."""

    def __init__(self, keys: Keys | None, run: str, name: str, failed: Callable[[str], None]) -> None:
        self._keys, self._run, self._name, self._failed = keys, run, name, failed
        self._sent: set[Key] = set()  # fences sent on this connection
        self._losses = 0
        self._said = ""  # the latest failure reported, to report it once
        self.client: Client | None = None

    def connect(self, address: str) -> None:
        """Connect to the log's shard at `address`; a connection to another address is closed. Raises
        UserError for an unusable address."""
        if self.client is not None and self.client.address == address:
            return
        self.close()
        self.client = Client(address, self._keys, limit=LIMIT, name=self._name)
        self._losses = 0
        self._introduce(self.client)

    def flush(self, waiting: Collection[Key]) -> None:
        """Send those of the unanswered fences that were not sent on this connection."""
        if self.client is None:
            return
        for worker, incarnation in sorted(set(waiting) - self._sent):
            self.client.send(encode(Fence(worker=worker, incarnation=incarnation)))
        self._sent = set(waiting)

    def look(self, worker: int, incarnation: int) -> None:
        """Ask about a worker's connection to the log; skipped if the log is not connected."""
        if self.client is not None and self.client.connected:
            self.client.send(encode(Look(worker=worker, incarnation=incarnation)))

    def take(self) -> Iterator[Fenced | Looked]:
        """Yield the log's messages: reports of used samples, and answers to `look`. Says Hello again after a
        lost connection."""
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
        """Close the connection. Unanswered fences are sent again after the next `connect`."""
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
