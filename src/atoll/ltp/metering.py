"""How fast the path delivers, by what Acks tell: bytes and times by the receiver's own clock.

So neither a late Ack nor several that come together change what is measured, and a short transfer is measured
by its own length and not by the round trip before it. Source: docs/ltp-rates.md,
"What is measured".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.ltp.bandwidth import RateSample
from atoll.ltp.sent import Mark, Told
from atoll.wire.datagrams import Acknowledgement

LEAST_SPAN = 0.004  # seconds; two bursts: what arrives within one says nothing
LEAST_ROUND = 0.01  # seconds that a round lasts: of one of 0.3 ms a host's jitter would be all that is seen
MOST_CLAIMED, CLAIMED_BYTES = 2, 2**16  # of what was acknowledged, what the other end may say that it had
SPAN_SHARE = 1 / 4  # of the least round trip


@dataclass(frozen=True)
class _State:
    delivered: int
    arrived: float
    sent: float  # when what that Ack named as its largest was sent


class Meter:
    """Of one session, over its stripes."""

    def __init__(self) -> None:
        self.acked = 0  # bytes
        self._latest: _State | None = None
        self._anchor: _State | None = None  # the first since this end was idle
        self._round_end = 0
        self._ended_at = -math.inf
        self._limited_until = 0

    def mark(self, idle: bool) -> Mark:
        """What a burst is sent with. `idle`: nothing else is on its way."""
        if idle:
            self._latest = self._anchor = None
        latest, limited = self._latest, self._limited_until > self.acked
        if latest is None:
            return Mark(0, -1.0, 0.0, self.acked, limited)
        return Mark(latest.delivered, latest.arrived, latest.sent, self.acked, limited)

    def handle_limited(self, in_flight: int) -> None:
        """There is nothing to send though more could be."""
        self._limited_until = self.acked + in_flight

    def handle_ack(self, ack: Acknowledgement, told: Told, min_rtt: float) -> tuple[RateSample | None, bool]:
        """What was delivered at which rate, and whether a round trip has ended."""
        self.acked += told.acked_bytes
        if told.newest is None:
            return None, False
        sent, mark = told.newest
        ended = mark.acked >= self._round_end and ack.arrived >= self._ended_at + LEAST_ROUND
        if ended:
            self._round_end, self._ended_at = self.acked, ack.arrived
        if not told.exact:
            return None, ended
        state = _State(ack.delivered, ack.arrived, sent)
        latest = self._latest
        # On a near path a round trip is shorter than what a rate can be told by: then marks stay for longer.
        held = max(2 * LEAST_SPAN - min_rtt, 0.0)
        if latest is None or (ack.delivered > latest.delivered and ack.arrived >= latest.arrived + held):
            self._latest = state
        since = _State(mark.delivered, mark.arrived, mark.sent) if mark.arrived >= 0 else self._anchor
        if since is None:
            self._anchor = state
            return None, ended
        # The count is the other end's word alone: what it has acknowledged is what it can have had, but for
        # Acks themselves, copies, and what was told of since.
        delivered = min(
            ack.delivered - since.delivered, MOST_CLAIMED * (self.acked - mark.acked) + CLAIMED_BYTES
        )
        seconds = max(ack.arrived - since.arrived, sent - since.sent)
        if delivered <= 0 or seconds < max(LEAST_SPAN, SPAN_SHARE * min_rtt):
            return None, ended
        return RateSample(delivered, seconds, mark.limited, sent - since.sent), ended
