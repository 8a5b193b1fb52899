"""Until when the hub has read all that its members have said.

A hub that is late has signs of life unread: in its own queue, in the system's buffers, and behind its
door, where connections wait to be let in. It cannot look into these. Whoever was judged by what the hub
has read would be buried alive. So before the hub counts a silent member as dead, it makes a connection
to itself as any member would, and sends an Echo over it. Once that has come back, and then the queue was
read empty, it judges as of the moment when that connection was begun: the system and ZeroMQ serve
connections in turn, so what members had said by then, or had begun to connect for, had come into the
queue before the Echo.

Where the queue never becomes empty, twice as many messages as there can be connections will do: ZeroMQ
takes a message of each connection in turn, but a new one's first, like the Echo's, within the round that
is under way.
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

_LOST_SECONDS = 15.0  # for an Echo to come back; then a hub that has read its queue empty goes by that
_LIMIT = 2**16  # bytes of a message
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_DESCRIPTORS = Path("/proc/self/fd")


class Hearing:
    """The hub's connection to itself, at `address`.

    `until` is the time, by the hub's clock, up to which all that members said has been read. It only grows
    after `ask`.
    """

    def __init__(self, address: str, keys: Keys | None, decisions: Decisions, turn: Turn) -> None:
        turn.handlers[Echo] = self.take
        for host, own in _ANY_HOST.items():
            address = address.replace(f"//{host}:", f"//{own}:")
        self.until = -math.inf
        self._address, self._keys, self._decisions = address, keys, decisions
        self._client: Client | None = None  # while an Echo is on its way
        self._token = secrets.token_hex(16)  # nobody else can say an Echo of ours
        self._number = 0
        self._asked: float | None = None  # when the Echo was sent that is not settled
        self._is_back = False
        self._to_read = 0  # messages before it is settled
        self._said = False

    @property
    def waits(self) -> bool:
        """Whether an Echo is on its way, or what came before it may be unread."""
        return self._asked is not None

    def ask(self, now: float) -> None:
        """Somebody may be dead: find out whether all that was said by `now` has been read."""
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
        """Up to when all that members said has been read, for who is to judge somebody's silence `now`."""
        self.ask(now)
        return self.until

    def take(self, _peer: bytes, echo: Echo) -> None:
        """An Echo has come back."""
        if echo.token == self._token and echo.number == self._number and not self._is_back:
            self._is_back = True
            self._to_read = 2 * _connections()
            self.close()

    def read(self, now: float, messages: int, *, is_empty: bool) -> None:
        """The hub has handled so many messages; `is_empty`: nothing is left in its queue. Where the Echo does
        not come back, for the door has no room for the hub itself, that has to do."""
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
    """How many connections this process may have, at the most."""
    try:
        return sum(1 for _ in _DESCRIPTORS.iterdir())
    except OSError:  # another system than Linux
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
