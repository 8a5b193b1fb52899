"""Until when the hub has read all that its members have said.

A hub that is late has signs of life unread: in its own queue, and in the system's buffers, which it
cannot look into. Whoever was judged by what it has read would be buried alive. So the hub has a connection to
itself, over its own door. Before it counts a silent member as dead it sends an Echo, and judges as of that
moment once the Echo has come back: what the members had said by then was on its way before the Echo, and is
read by then, for the system's poll and ZeroMQ's queues serve all connections in turn.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable

from atoll.core.errors import AtollError
from atoll.net.endpoint import SOON, Client
from atoll.net.keys import Keys
from atoll.wire.messages import Echo, encode

_AGAIN_SECONDS = 1.0  # before another Echo is sent, where the last has not come back
_LOST_SECONDS = 5.0  # after which a hub that has read its queue empty goes by that
_LIMIT = 2**16  # bytes of a message
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


class Hearing:
    """The hub's connection to itself, at `address`; `say(choice, reason)` takes what goes wrong with it.

    `until` is the time, by the hub's clock, up to which all that members said has been read. It only grows
    after `ask`.
    """

    def __init__(self, address: str, keys: Keys | None, say: Callable[[str, str], None]) -> None:
        for host, own in _ANY_HOST.items():
            address = address.replace(f"//{host}:", f"//{own}:")
        self.until = -math.inf
        self._address, self._keys, self._say = address, keys, say
        self._client: Client | None = None
        self._token = secrets.token_hex(16)  # nobody else can say an Echo of ours
        self._number = 0
        self._asked: dict[int, float] = {}  # Echoes that are on their way -> when they were sent, in order
        self._said = False

    @property
    def waits(self) -> bool:
        """Whether an Echo is on its way."""
        return bool(self._asked)

    def ask(self, now: float) -> None:
        """Somebody may be dead: find out whether all that was said by `now` has been read."""
        if self._asked and now < next(reversed(self._asked.values())) + _AGAIN_SECONDS:
            return
        self._number += 1
        try:
            if self._client is None:
                self._client = Client(
                    self._address, self._keys, limit=_LIMIT, name="the hub itself", reconnect=SOON
                )
            self._client.send(encode(Echo(token=self._token, number=self._number)))
        except AtollError as error:
            self._fail(str(error))
        self._asked[self._number] = now

    def take(self, echo: Echo) -> None:
        """An Echo has come back."""
        asked = self._asked.get(echo.number)
        if echo.token != self._token or asked is None:
            return
        self._settle(asked)

    def read_empty(self, now: float) -> None:
        """Nothing is left in the hub's queue. Where Echoes do not come back, for the door has no room for
        the hub itself, that has to do."""
        if self._asked and now >= next(iter(self._asked.values())) + _LOST_SECONDS:
            self._fail("no answer from its own door; silences are judged by what was read")
            self._settle(next(reversed(self._asked.values())))

    def _settle(self, asked: float) -> None:
        self.until = max(self.until, asked)
        self._asked = {number: at for number, at in self._asked.items() if at > asked}

    def _fail(self, why: str) -> None:
        if not self._said:
            self._said = True
            self._say("does not hear itself", why)

    def close(self) -> None:
        """Close the connection; closing twice does no harm."""
        if self._client is not None:
            self._client.close()
            self._client = None
