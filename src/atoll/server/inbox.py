"""What has come to a shard and is not handled yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from atoll.net.endpoint import Received
from atoll.server.common import Common
from atoll.server.door import Door
from atoll.server.heard import Handler, Heard
from atoll.server.stepper import Stepper
from atoll.store.pulls import Asked
from atoll.wire import messages
from atoll.wire.lost import ZERO
from atoll.wire.messages import AnyMessage, Hello, WireError, decode_untrusted

IN_BOX = 64  # messages taken while chunks are stepped, and kept for later


class Inbox:
    """Messages come from outside: each is checked before anything is kept for it, and what is wrong is
    refused with a line, or dropped and counted. `handlers` take them.

    While chunks are stepped, `most` messages wait here; those of the types `at_once` are handled, too.
    """

    def __init__(
        self,
        common: Common,
        door: Door,
        handlers: Mapping[type, Handler],
        most: int,
        at_once: tuple[type, ...],
    ) -> None:
        self._server, self._peers, self._kept = common.server, common.peers, common.kept
        self._training = common.training
        self._door, self._handlers, self._most, self._at_once = door, handlers, most, at_once
        self._waiting: deque[tuple[Received, AnyMessage | None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether more messages may wait."""
        return len(self._waiting) < self._most

    def handle_one(self) -> bool:
        """Handle the next message, if there is one."""
        if self._waiting:
            received, message = self._waiting.popleft()
        else:
            taken = self._server.receive(0)
            if taken is None:
                return False
            received, message = taken, self._decode(taken)
        if message is not None:
            self._handle(received, message)
        return True

    def take_in(self, stepper: Stepper) -> list[Asked]:
        """While chunks are stepped: handle what cannot wait, and give the pulls that are ready; other
        messages wait for their turn."""
        ready: list[Asked] = []
        while self.has_room and (received := self._server.receive(0)) is not None:
            message, hello = self._decode(received), self._peers.who(received.peer)
            if message is not None and isinstance(message, self._at_once) and hello is not None:
                self._handle(received, message)  # of one whose Hello does not wait, too
            elif (
                hello is not None
                and isinstance(message, (messages.Pull, messages.PullMean))
                and stepper.may_pull(hello, message)
            ):
                asked = Asked(hello.worker, message, hello.member)
                ready += [asked] * stepper.is_ready(asked)
            else:
                self._waiting.append((received, message))
        return ready

    def _decode(self, received: Received) -> AnyMessage | None:
        try:
            message = decode_untrusted(received.header)
        except WireError as error:
            self._server.dropped += 1
            self._door.refuse(received.peer, str(error), "")
            return None
        if isinstance(message, messages.Push) and (message.lost is not None or received.lost is not None):
            return self._with_losses(received, message)
        return message

    def _with_losses(self, received: Received, push: messages.Push) -> messages.Push | None:
        """A Push with the link's word on its payload; None for one that says itself what was lost."""
        if push.lost is not None:
            self._door.refuse(received.peer, "a Push does not say what was lost of it: the link does", "Push")
            return None
        lost = received.lost
        if lost is None or not any(lost.missing):
            return msgspec.structs.replace(push, lost=None)
        # A block that were left out of the mean now, and in full in a later one, would step too far.
        if push.late:
            lost = msgspec.structs.replace(lost, how=ZERO)
        return msgspec.structs.replace(push, lost=lost)

    def _handle(self, received: Received, message: AnyMessage) -> None:
        name = type(message).__name__
        if isinstance(message, Hello):
            reason = self._door.greet(received.peer, message)
        else:
            hello, handler = self._peers.who(received.peer), self._handlers.get(type(message))
            if hello is None:
                reason = "say Hello first"
            elif handler is None:
                reason = f"a shard takes no {name}"
            elif (
                hello.role == "worker"
                and getattr(message, "incarnation", hello.incarnation) != hello.incarnation
            ):
                reason = f"this connection is of incarnation {hello.incarnation}"
            else:
                reason = self._do(handler, Heard(received.peer, hello, message, received.payload), received)
        if reason:
            self._door.refuse(received.peer, reason, name)

    def _do(self, handler: Handler, heard: Heard, received: Received) -> str:
        """Note a message, and handle it; returns why not. What is noted of a Push are its values: whoever
        hears it again, from the journal or as the standby, has the same bits, whatever the codec."""
        model = self._training.model
        if isinstance(heard.message, messages.Push) and model is not None:
            try:
                push, payload = model.decoded(heard.message, heard.payload)
            except WireError as error:
                return f"chunk {heard.message.chunk} of iteration {heard.message.iteration}: {error}"
            heard = Heard(heard.peer, heard.hello, push, payload)
        self._kept.note_message(heard, received.header)
        return handler(heard)
