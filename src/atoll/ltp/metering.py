"""Delivery rate from Acks: bytes and times by the receiver's clock.

Late or merged Acks therefore do not change the measurement, and a short transfer is measured by its own
length, not by the round trip before it. Source: docs/ltp-rates.md, "What is measured".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.ltp.bandwidth import RateSample
from atoll.ltp.sent import Mark, SettledDatagrams
from atoll.wire.datagrams import Acknowledgement

LEAST_SPAN = 0.004  # seconds, two bursts: arrivals within one burst give no rate
LEAST_ROUND = 0.01  # seconds, least round: in one of 0.3 ms a host's jitter hides everything
# Believed bytes of the receiver's count: MOST_CLAIMED times the acknowledged ones plus CLAIMED_BYTES.
MOST_CLAIMED, CLAIMED_BYTES = 2, 2**16
SPAN_SHARE = 1 / 4  # of the least round trip: a shorter span gives no rate


@dataclass(frozen=True)
class _State:
    delivered: int
    arrived: float
    sent: float  # when that Ack's largest datagram was sent


class Meter:
    """Delivery rate and rounds of one session, over its stripes."""

    def __init__(self) -> None:
        self.acked = 0  # bytes
        self._latest: _State | None = None
        self._anchor: _State | None = None  # first state since this end was idle
        self._round_end = 0
        self._ended_at = -math.inf
        self._limited_until = 0

    def mark(self, idle: bool) -> Mark:
        """Return the mark for a burst that is sent now. `idle`: nothing else is in flight."""
        if idle:
            self._latest = self._anchor = None
        latest, limited = self._latest, self._limited_until > self.acked
        if latest is None:
            return Mark(0, -1.0, 0.0, self.acked, limited)
        return Mark(latest.delivered, latest.arrived, latest.sent, self.acked, limited)

    def handle_limited(self, in_flight: int) -> None:
        """Note that there is too little to send for the rate."""
        self._limited_until = self.acked + in_flight

    def handle_ack(
        self, ack: Acknowledgement, told: SettledDatagrams, min_rtt: float
    ) -> tuple[RateSample | None, bool]:
        """Return the rate sample of an Ack, if it gives one, and True if a round trip has ended."""
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
        # On a near path a round trip is shorter than the least span of a rate: keep marks for longer.
        mark_seconds = max(2 * LEAST_SPAN - min_rtt, 0.0)
        if latest is None or (
            ack.delivered > latest.delivered and ack.arrived >= latest.arrived + mark_seconds
        ):
            self._latest = state
        since = _State(mark.delivered, mark.arrived, mark.sent) if mark.arrived >= 0 else self._anchor
        if since is None:
            self._anchor = state
            return None, ended
        # The other end alone claims `delivered`: bound it by the acknowledged bytes, with room for Acks,
        # copies, and datagrams acknowledged since.
        delivered = min(
            ack.delivered - since.delivered, MOST_CLAIMED * (self.acked - mark.acked) + CLAIMED_BYTES
        )
        seconds = max(ack.arrived - since.arrived, sent - since.sent)
        if delivered <= 0 or seconds < max(LEAST_SPAN, SPAN_SHARE * min_rtt):
            return None, ended
        return RateSample(delivered, seconds, mark.limited, sent - since.sent), ended
