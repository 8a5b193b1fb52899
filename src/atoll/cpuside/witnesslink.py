"""A CPU side's connection to the hub, which votes as witness in views of two nodes and stores nothing.

Messages that are sent without a connection are lost, and nothing blocks. Source: docs/peers.md, "When an
iteration may be applied".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from atoll.core.errors import RunError, UserError
from atoll.net.hubconnection import HubConnection
from atoll.net.keys import Keys
from atoll.wire.messages import VERSION, AnyMessage, Hello, Message


class WitnessLink:
    """The connection of node `node`, whose process is named `token`, to the hub.

    Attributes:
        refusal: the reason why the hub does not serve as witness; empty while it does.
    """

    def __init__(
        self, address: str, keys: Keys | None, *, run: str, node: int, incarnation: int, token: str
    ) -> None:
        self._hub = HubConnection(address, keys)
        self.client = self._hub.client
        self._hello = Hello(
            version=VERSION,
            run=run,
            role="node",
            worker=node,
            incarnation=incarnation,
            token=token,
            pid=os.getpid(),
        )
        self._greeted = False
        self._trouble = ""

    @property
    def refusal(self) -> str:
        """Why the hub does not take this node, in words; empty where it does."""
        hub = self._hub
        return self._trouble or (f"hub at {self.client.address}: {hub.refusal}" if hub.refusal else "")

    def say(self, message: Message) -> None:
        """Send a message if there is a connection."""
        if self._stands():
            self._hub.say(message)  # type: ignore[arg-type]  # of AnyMessage

    def take(self) -> Iterator[AnyMessage]:
        """Return the messages that have come from the witness."""
        self._stands()
        with contextlib.suppress(RunError):  # what is no message
            yield from self._hub.take()

    def _stands(self) -> bool:
        """True if there is a connection; sends Hello on a new one."""
        try:
            self.client.check()
        except UserError as error:
            self._trouble = str(error)
            return False
        if self.client.connected:
            self._greeted = self._hub.greet(self._hello, again=not self._greeted) or self._greeted
        return self.client.connected

    def close(self) -> None:
        self.client.close()
