"""A sender's requests to its receiver for a share of the link. Source: docs/ltp.md, "Grants"."""

from __future__ import annotations

import math

from atoll.ltp.flights import Flights
from atoll.ltp.grants import ASK_SECONDS
from atoll.ltp.leaving import Sender
from atoll.ltp.settings import LtpSettings

ASK_AGAIN = ASK_SECONDS / 2  # between Asks while data waits: one Ask may be lost


class Asking:
    """Decide when one end asks for a share: from the other end's first Grant on, while data waits."""

    def __init__(self, settings: LtpSettings, sender: Sender, flights: Flights) -> None:
        self._settings, self._sender, self._flights = settings, sender, flights
        self._at = math.inf  # time of the next Ask if data waits
        self._asked = False  # the last Ask named bytes

    def handle_grant(self, now: float) -> None:
        """Start asking: the other end shares out its link."""
        if self._at == math.inf:
            self._at = now

    @property
    def due(self) -> float:
        """Time of the next Ask; inf for never.

        Data that fits one burst needs no share. An Ask of 0 bytes gives the share back.
        """
        if self._at == math.inf:
            return math.inf
        left = self._sender.bytes_left
        if left > self._flights.burst * self._settings.datagram_bytes:
            return self._at
        return -math.inf if self._asked and not left else math.inf

    def ask(self, now: float) -> int:
        """Note that an Ask is sent now, and return its number of bytes."""
        left = self._sender.bytes_left
        self._asked = left > 0
        self._at = now + ASK_AGAIN if left else now
        return left
