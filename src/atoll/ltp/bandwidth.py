"""Bandwidth and round trip of the path, measured at the sender from acknowledgements.

Source: docs/ltp-rates.md, "The estimate". Each acknowledgement costs a few operations.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from atoll.ltp.losses import MOST_BASE
from atoll.ltp.rates import deviation, surely_above

INITIAL_RTT = 0.333  # seconds, until the first measurement (RFC 9002, 6.2.2)
LEAST_RTT = 1e-6  # seconds: a coarse clock may measure 0
MIN_RTT_SECONDS = 10.0  # a least round trip is valid for so long (BBR); then the path may have changed
RATE_ROUNDS = 10  # counted rounds over which the greatest delivery rate is taken (BBR)
# Delivered share of the sent rate, corrected for the path's own loss, from which the path was not the limit.
FAIR = 0.98

CHANCE = 2.0  # standard deviations of the path's own loss that count as chance
LEAST_CAME = 0.1  # least delivered share by which the sent rate is corrected
MISSING = 0.9  # delivered share below which, beside a queue, "halved" takes the estimate anew
LEAST_BUSY = 0.001  # seconds of queue: less is jitter


@dataclass(frozen=True)
class RateSample:
    """Delivery rate between two acknowledgements.

    Bytes of datagrams over the longer of the time in which they were sent and the time in which they were
    acknowledged, as in BBR. `app_limited`: the sender had less to send than the rate allowed, so the sample
    is no upper bound of the path.
    """

    delivered: int
    seconds: float
    app_limited: bool
    sent_seconds: float = 0.0  # in which they were sent: a sender's thread may be late; 0 if unknown


class RoundTrip:
    """Smoothed and least round trip, in seconds.

    Smoothing and variation follow RFC 6298; the least one is of the last MIN_RTT_SECONDS.
    """

    def __init__(self) -> None:
        self.smoothed, self.variation = INITIAL_RTT, INITIAL_RTT / 2
        self.least = INITIAL_RTT
        self.measured = False
        self.round_least = math.inf  # of the current round
        self._least_at: deque[tuple[float, float]] = deque()  # (when, rtt): both rise

    def take(self, now: float, rtt: float) -> None:
        rtt = max(rtt, LEAST_RTT)
        if not self.measured:
            self.measured = True
            self.smoothed, self.variation = rtt, rtt / 2
        else:
            self.variation += (abs(rtt - self.smoothed) - self.variation) / 4
            self.smoothed += (rtt - self.smoothed) / 8
        self.round_least = min(self.round_least, rtt)
        kept = self._least_at
        while kept and kept[-1][1] >= rtt:
            kept.pop()
        kept.append((now, rtt))
        while kept[0][0] < now - MIN_RTT_SECONDS:
            kept.popleft()
        self.least = kept[0][1]

    def forget_least(self) -> None:
        """Forget the least round trip, because the path has changed."""
        self._least_at.clear()
        self.round_least = math.inf

    def age(self, now: float) -> float:
        """Seconds since the least round trip was measured."""
        return now - self._least_at[0][0] if self._least_at else 0.0


@dataclass(frozen=True)
class Round:
    """Measurements of one round trip. Rates in bytes per second, corrected for the path's own loss."""

    rate: float  # delivered
    sent: float  # pacing rate of its packets; nan if it changed in between
    limited: bool  # by the application, or without a sample
    acked: int  # packets
    lost: int
    queue: float  # seconds: its least round trip minus the least of all

    def path_was_limit(self, estimate: float, base: float, min_rtt: float, burst: float = 1.0) -> bool:
        """Return True if the round's rate shows how much the path can carry.

        True if a queue stood all through the round, less arrived than was sent, or more was lost than the
        path's own loss. For a sender below the estimate, a shortfall that may be chance does not count.
        """
        busy = self.queue > least_busy(min_rtt)
        if math.isnan(self.sent):
            return busy
        if self.sent < FAIR * estimate:
            short = self.rate < (FAIR if busy else 1.0 - MOST_BASE) * self.sent
            return short or (busy and self.rate * FAIR > self.sent)
        counted = max(self.acked + self.lost, 1)
        chance = CHANCE * deviation(base, counted, burst)
        return (
            busy or self.rate < (FAIR - chance) * self.sent or surely_above(self.lost, counted, base, burst)
        )

    def much_is_missing(self, min_rtt: float) -> bool:
        """Return True if this round alone is proof: neither chance nor slightly more loss explains it."""
        return self.queue > least_busy(min_rtt) or self.rate < (1.0 - MOST_BASE) * self.sent


def least_busy(min_rtt: float) -> float:
    """Return the seconds of queue, all through a round, that show a busy path."""
    return max(min_rtt / 32, LEAST_BUSY)


class Bandwidth:
    """Bandwidth estimate: the greatest delivery rate of the last rounds, in bytes of sent datagrams per
    second.

    Delivery is corrected for the path's own loss. A round's rate is the median of its last third of samples:
    each sample spans a round trip, so the first ones belong to the round before, and a single one may be off
    by a burst. A higher rate raises the estimate at once. A lower one counts only if the path, not the
    sender, was the limit.
    """

    def __init__(self, initial: float) -> None:
        self.estimate = initial
        self.measured = False
        self._free: list[tuple[float, float]] = []  # samples of the current round: delivered, sent
        self._limited: list[tuple[float, float]] = []  # samples while the sender had too little to send
        self._greatest: deque[tuple[int, float]] = deque()  # (round, rate): rises, falls
        self._counted = 0  # rounds

    def take(self, sample: RateSample) -> None:
        if sample.seconds > 0.0 and sample.delivered > 0:
            rate = sample.delivered / sample.seconds
            sent = sample.delivered / sample.sent_seconds if sample.sent_seconds > 0.0 else math.inf
            (self._limited if sample.app_limited else self._free).append((rate, sent))

    def most_of_round(self) -> float:
        """Return the greatest sample of the current round, or 0: in start-up the rate rises within a
        round."""
        return max((rate for rate, _ in self._free), default=0.0)

    def end_round(self, base: float, loss: float = 0.0) -> tuple[float, float, bool]:
        """End the round and return its rates.

        Returns:
                The delivery rate, corrected for the path's own loss (`base`); the rate at which packets
            really left, the lost share `loss` included; and True if the application alone limited it. (0,
            inf, True) without a sample.
        """
        free, limited = self._free, self._limited
        self._free, self._limited = [], []
        rates = free or limited
        if not rates:
            return 0.0, math.inf, True
        late = rates[-max(1, len(rates) // 3) :]
        rate, sent = (sorted(each)[len(late) // 2] for each in zip(*late, strict=True))
        sent /= max(1.0 - loss, LEAST_CAME)
        return min(rate / (1.0 - base), max(rate, sent)), sent, not free

    def raise_to(self, rate: float) -> None:
        """Raise the estimate: a round showed that the path carries this rate."""
        if not self.measured or rate >= self.estimate:
            self.measured = True
            self.restart(rate)

    def count(self, rate: float) -> None:
        """Count a round in which the path was the limit."""
        self._counted += 1
        kept = self._greatest
        while kept and kept[-1][1] <= rate:
            kept.pop()
        kept.append((self._counted, rate))
        while kept[0][0] <= self._counted - RATE_ROUNDS:
            kept.popleft()
        self.estimate = kept[0][1]

    def measure(self, round_: Round, base: float, min_rtt: float, anew: bool, burst: float = 1.0) -> None:
        """Update the estimate at a round's end.

        Args:
            anew: the path has just changed, so the newest round overrides older ones.
            burst: packets lost in a row.
        """
        limit = not round_.limited and round_.path_was_limit(self.estimate, base, min_rtt, burst)
        if anew and limit and round_.much_is_missing(min_rtt):
            self.restart(round_.rate)
        elif round_.rate >= self.estimate:
            self.raise_to(round_.rate)
        elif round_.limited:
            return
        elif limit:
            self.count(round_.rate)
        elif round_.sent >= FAIR * self.estimate:
            self.count(self.estimate)  # the estimate was sent, and arrived

    def restart(self, rate: float) -> None:
        """Forget all earlier rounds and take `rate` as the estimate."""
        self._greatest.clear()
        self._greatest.append((self._counted, rate))
        self.estimate = rate
