"""The outputs of one call of a node."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.peers.outputs import Note, Output, Send
from atoll.wire.messages import Message


class Outbox:
    """Collects the outputs of all parts of a node during one call, in order."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []

    def add(self, output: Output) -> None:
        self._outputs.append(output)

    def send(self, to: int, message: Message) -> None:
        self._outputs.append(Send(to, message))

    def send_all(self, nodes: Iterable[int], message: Message) -> None:
        self._outputs += [Send(node, message) for node in nodes]

    def note(self, what: str, about: str, reason: str) -> None:
        self._outputs.append(Note(what, about, reason))

    def take(self) -> list[Output]:
        """Return all outputs, and clear them."""
        outputs, self._outputs = self._outputs, []
        return outputs
