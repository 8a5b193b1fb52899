"""One turn of the hub: its time, message handlers, new records, and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.hub.records import AnyRecord
from atoll.wire.messages import AnyMessage, Message, Refused


class Turn:
    """Records and answers of the present turn, in order. `now` returns the hub's time in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        # handler(connection, message) by message type; the hub's objects register theirs.
        self.handlers: dict[type[Message], Callable[[bytes, Any], None]] = {}
        self.records: list[AnyRecord] = []
        self.answers: list[tuple[bytes, AnyMessage]] = []
        self.votes: list[tuple[bytes, AnyMessage]] = []  # answers that leave only if the records are written

    def keep(self, record: AnyRecord) -> None:
        """Add a record, written before any answer leaves."""
        self.records.append(record)

    def send(self, peer: bytes, message: AnyMessage) -> None:
        """Add an answer for the turn's end. An empty `peer`, of a request from before a restart, gets
        none."""
        self.answers.append((peer, message))

    def refuse(self, peer: bytes, reason: str, request: str, number: int = 0) -> None:
        """Add a refusal of a request."""
        self.send(peer, Refused(reason=reason[:4096], request=request, number=number))

    def clear(self) -> None:
        """Begin the next turn."""
        self.records.clear()
        self.answers.clear()
        self.votes.clear()
