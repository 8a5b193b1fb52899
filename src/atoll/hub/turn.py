"""One turn of the hub: its time, who takes which message, what is written down, and what is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.hub.records import AnyRecord
from atoll.wire.messages import AnyMessage, Message, Refused


class Turn:
    """The records and the answers of the turn under way, in order. `now` gives the hub's seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        # Who owns a subject puts itself here, by the message's type: handler(connection, message).
        self.handlers: dict[type[Message], Callable[[bytes, Any], None]] = {}
        self.records: list[AnyRecord] = []
        self.answers: list[tuple[bytes, AnyMessage]] = []
        self.votes: list[tuple[bytes, AnyMessage]] = []  # answers that leave only if the records are written

    def keep(self, record: AnyRecord) -> None:
        """Have this written down before anybody is answered."""
        self.records.append(record)

    def send(self, peer: bytes, message: AnyMessage) -> None:
        """Answer at the turn's end. Nobody (an empty peer) is who asked before a restart."""
        self.answers.append((peer, message))

    def refuse(self, peer: bytes, reason: str, request: str, number: int = 0) -> None:
        """Answer that what was asked is not done."""
        self.send(peer, Refused(reason=reason[:4096], request=request, number=number))

    def clear(self) -> None:
        """Begin another one."""
        self.records.clear()
        self.answers.clear()
        self.votes.clear()
