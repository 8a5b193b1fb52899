"""A CPU side's connection to the hub, which votes as witness in views of two nodes and stores nothing.

Messages that are sent without a connection are lost, and nothing blocks. Source: docs/peers.md, "When an
iteration may be applied".
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from atoll.core.errors import UserError
from atoll.core.texts import one_line
from atoll.net.endpoint import Client
from atoll.net.keys import Keys
from atoll.wire.messages import (
    VERSION,
    AnyMessage,
    Hello,
    Message,
    Refused,
    WireError,
    decode_untrusted,
    encode,
)

_FRAME = 2**26  # bytes: no tensor comes this way


class WitnessLink:
    """The connection of node `node`, whose process is named `token`, to the hub.

    Attributes:
        refusal: the reason why the hub does not serve as witness; empty while it does.
    """

    def __init__(
        self, address: str, keys: Keys | None, *, run: str, node: int, incarnation: int, token: str
    ) -> None:
        self.client = Client(address, keys, limit=_FRAME, name="hub")
        self._hello = Hello(
            version=VERSION,
            run=run,
            role="node",
            worker=node,
            incarnation=incarnation,
            token=token,
            pid=os.getpid(),
        )
        self._losses = -1  # connections lost before the latest Hello
        self.refusal = ""

    def say(self, message: Message) -> None:
        """Send a message if there is a connection."""
        if self._stands():
            self.client.send(encode(message))  # type: ignore[arg-type]  # of AnyMessage

    def take(self) -> Iterator[AnyMessage]:
        """Return the messages that have come from the witness."""
        self._stands()
        while (got := self.client.receive(0)) is not None:
            try:
                message = decode_untrusted(got[0])
            except WireError:
                continue
            if isinstance(message, Refused):
                self.refusal = f"hub at {self.client.address}: {one_line(message.reason, 1000)}"
            else:
                yield message

    def _stands(self) -> bool:
        """True if there is a connection; sends Hello on a new one."""
        try:
            self.client.check()
        except UserError as error:
            self.refusal = str(error)
            return False
        if self.client.connected and self._losses != self.client.losses:
            self._losses = self.client.losses
            self.client.send(encode(self._hello))
        return self.client.connected

    def close(self) -> None:
        self.client.close()
