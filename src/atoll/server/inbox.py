"""The queue of messages that a shard has received and not handled yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from atoll.net.endpoint import Received
from atoll.server.common import Common
from atoll.server.door import Door
from atoll.server.heard import Handler, Heard
from atoll.server.logexecutor import LogExecutor
from atoll.store.pulls import PullRequest
from atoll.wire import messages
from atoll.wire.lost import ZERO
from atoll.wire.messages import AnyMessage, Hello, WireError, decode_untrusted

IN_BOX = 64  # messages that may wait while chunks are stepped


class Inbox:
    """Decodes, checks and dispatches a shard's messages to `handlers`.

    Input is untrusted: a message is checked before anything is allocated for it; an invalid one is refused or
    dropped, and counted. While chunks are stepped up to `most` messages wait; those of the types `at_once`
    are handled immediately.
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
        """True if more messages may wait."""
        return len(self._waiting) < self._most

    def handle_one(self) -> bool:
        """Handle the next message; False if there is none."""
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

    def take_in(self, stepper: LogExecutor) -> list[PullRequest]:
        """Handle urgent messages while chunks are stepped, and return the pulls that are ready; other
        messages wait."""
        ready: list[PullRequest] = []
        while self.has_room and (received := self._server.receive(0)) is not None:
            message, hello = self._decode(received), self._peers.who(received.peer)
            if message is not None and isinstance(message, self._at_once) and hello is not None:
                self._handle(received, message)
            elif (
                hello is not None
                and isinstance(message, (messages.Pull, messages.PullMean))
                and stepper.may_pull(hello, message)
            ):
                asked = PullRequest(hello.worker, message, hello.member)
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
        """Return the Push with the link's report on its payload; None, after a refusal, if the sender itself
        claims losses."""
        if push.lost is not None:
            self._door.refuse(received.peer, "a Push does not say what was lost of it: the link does", "Push")
            return None
        lost = received.lost
        if lost is None or not any(lost.missing):
            return msgspec.structs.replace(push, lost=None)
        # Late blocks count as zeros: left out of this mean and added in full later, they would step too far.
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
        """Record a message and handle it; returns why it is refused. A Push is recorded decoded, so that a
        journal's replay and a standby have the same bits, whatever the codec. One that came without its zeros
        is recorded without them."""
        model, shortened = self._training.model, False
        if isinstance(heard.message, messages.Push) and model is not None:
            try:
                push, payload = model.decoded(heard.message, heard.payload)
            except WireError as error:
                return f"chunk {heard.message.chunk} of iteration {heard.message.iteration}: {error}"
            shortened = heard.message.shortened and not push.shortened
            heard = Heard(heard.peer, heard.hello, push, payload)
        self._kept.note_message(heard, received.header, shortened=shortened)
        return handler(heard)
