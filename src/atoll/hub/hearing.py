"""The time up to which the hub has read all messages of its members.

A busy hub has unread signs of life: in its queue, in the system's buffers, and in connections that wait to be
accepted. It cannot look into these, and a judgement by what it has read would declare live members dead. So
before the hub counts a silent member as dead, it connects to itself like any member and sends an Echo. Once
the Echo has come back and the queue was read empty, silences are judged as of the moment when that connection
was begun: the system and ZeroMQ serve connections in turn, so all that members sent or began to connect for
by then was queued before the Echo.

If the queue never becomes empty, reading twice as many messages as there can be connections suffices: ZeroMQ
takes one message from each connection in turn, but a new connection's first message, like the Echo, within
the round in progress.
"""

from __future__ import annotations

import math
import resource
import secrets
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.hub.decisions import Decisions
from atoll.hub.turn import Turn
from atoll.net.endpoint import SOON, Client
from atoll.net.keys import Keys
from atoll.wire.messages import Echo, encode

_LOST_SECONDS = 15.0  # seconds for an Echo to come back; after that an empty queue suffices
_LIMIT = 2**16  # bytes of a message
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_DESCRIPTORS = Path("/proc/self/fd")


class Hearing:
    """The hub's connection to itself, at `address`.

    `until` is the time, by the hub's clock, up to which all messages of members have been read. Only `ask`
    starts an update.
    """

    def __init__(self, address: str, keys: Keys | None, decisions: Decisions, turn: Turn) -> None:
        turn.handlers[Echo] = self.take
        for host, own in _ANY_HOST.items():
            address = address.replace(f"//{host}:", f"//{own}:")
        self.until = -math.inf
        self._address, self._keys, self._decisions = address, keys, decisions
        self._client: Client | None = None  # while an Echo is in flight
        self._token = secrets.token_hex(16)  # keeps others from forging an Echo
        self._number = 0
        self._asked: float | None = None  # when the unsettled Echo was sent
        self._is_back = False
        self._to_read = 0  # messages to read before the Echo is settled
        self._said = False

    @property
    def waits(self) -> bool:
        """True if an Echo is in flight, or messages before it may be unread."""
        return self._asked is not None

    def ask(self, now: float) -> None:
        """Send an Echo to find out whether all messages up to `now` have been read; called when a member may
        be dead."""
        if self.waits:
            return
        self._asked, self._is_back = now, False
        self._number += 1
        try:
            self._client = Client(
                self._address, self._keys, limit=_LIMIT, name="the hub itself", reconnect=SOON
            )
            self._client.send(encode(Echo(token=self._token, number=self._number)))
        except AtollError as error:
            self._fail(str(error))

    def heard_until(self, now: float) -> float:
        """Return the time up to which all messages have been read, and ask for a later one."""
        self.ask(now)
        return self.until

    def take(self, _peer: bytes, echo: Echo) -> None:
        """Handle a returned Echo."""
        if echo.token == self._token and echo.number == self._number and not self._is_back:
            self._is_back = True
            self._to_read = 2 * _connections()
            self.close()

    def read(self, now: float, messages: int, *, is_empty: bool) -> None:
        """Note that `messages` were handled; `is_empty`: the queue is empty. If the Echo is lost, say because
        the port has no room for the hub itself, an empty queue suffices."""
        if self._asked is None:
            return
        self._to_read -= messages
        is_lost = not self._is_back and is_empty and now >= self._asked + _LOST_SECONDS
        if is_lost:
            self._fail("no answer from its own door; silences are judged by what was read")
            self.close()
        if is_lost or (self._is_back and (is_empty or self._to_read <= 0)):
            self.until, self._asked = self._asked, None

    def _fail(self, why: str) -> None:
        if not self._said:
            self._said = True
            self._decisions.add("hub", "does not hear itself", why)

    def close(self) -> None:
        """Close the connection; closing twice does no harm."""
        if self._client is not None:
            self._client.abandon()
            self._client = None


def _connections() -> int:
    """The most connections that this process can have."""
    try:
        return sum(1 for _ in _DESCRIPTORS.iterdir())
    except OSError:  # another system than Linux
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
