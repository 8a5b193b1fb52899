"""When a sender asks for a share of a link that its receiver shares out. Source: docs/ltp.md, "Grants"."""

from __future__ import annotations

import math

from atoll.ltp.grants import ASK_SECONDS

ASK_AGAIN = ASK_SECONDS / 2  # while there is something to send: one Ask may be lost


class Asking:
    """One end's Asks, from the other end's first Grant on."""

    def __init__(self) -> None:
        self._at = math.inf  # when to ask, if there is something to send
        self._asked = False  # the last Ask named bytes

    def handle_grant(self, now: float) -> None:
        """The other end shares its link out."""
        if self._at == math.inf:
            self._at = now

    def due(self, left: int, little: int) -> float:
        """When to ask, or to say that nothing is needed any more.

        Args:
            left: bytes that are still to be sent.
            little: bytes for which no share is asked.
        """
        if self._at == math.inf:
            return math.inf
        if left > little:
            return self._at
        return -math.inf if self._asked and not left else math.inf

    def ask(self, now: float, left: int) -> None:
        """An Ask for `left` bytes goes out."""
        self._asked = left > 0
        self._at = now + ASK_AGAIN if left else now
