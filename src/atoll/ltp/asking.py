"""When a sender asks for a share of a link that its receiver shares out. Source: docs/ltp.md, "Grants"."""

from __future__ import annotations

import math

from atoll.ltp.flights import Flights
from atoll.ltp.grants import ASK_SECONDS
from atoll.ltp.leaving import Sender
from atoll.ltp.settings import Settings

ASK_AGAIN = ASK_SECONDS / 2  # while there is something to send: one Ask may be lost


class Asking:
    """One end's Asks, from the other end's first Grant on: for what its sender has still to send."""

    def __init__(self, settings: Settings, sender: Sender, flights: Flights) -> None:
        self._settings, self._sender, self._flights = settings, sender, flights
        self._at = math.inf  # when to ask, if there is something to send
        self._asked = False  # the last Ask named bytes

    def handle_grant(self, now: float) -> None:
        """The other end shares its link out."""
        if self._at == math.inf:
            self._at = now

    @property
    def due(self) -> float:
        """When to ask, or to say that nothing is needed any more; inf: never. No share is asked for what
        goes in one burst."""
        if self._at == math.inf:
            return math.inf
        left = self._sender.bytes_left
        if left > self._flights.burst * self._settings.datagram_bytes:
            return self._at
        return -math.inf if self._asked and not left else math.inf

    def ask(self, now: float) -> int:
        """An Ask goes out; returns the bytes for which it asks."""
        left = self._sender.bytes_left
        self._asked = left > 0
        self._at = now + ASK_AGAIN if left else now
        return left
