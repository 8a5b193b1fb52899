"""What the path can carry and how long it takes: measured at the sender, by its acknowledgements.

Source: docs/ltp-rates.md, "The estimate". All of it is fed once for each acknowledgement, so each step is a
few operations.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from atoll.ltp.losses import MOST_BASE
from atoll.ltp.rates import deviation, surely_above

INITIAL_RTT = 0.333  # seconds, until one was measured (RFC 9002, 6.2.2)
LEAST_RTT = 1e-6  # seconds: two clocks may say none at all
MIN_RTT_SECONDS = 10.0  # for which a least round trip is believed (BBR); then the path may have changed
RATE_ROUNDS = 10  # that count, over which the greatest delivery rate is taken (BBR)
# of what was sent, corrected for the path's own loss: when as much came, the path was not the limit
FAIR = 0.98

CHANCE = 2.0  # standard deviations of the path's own loss that may be missing by chance
LEAST_CAME = 0.1  # of what was sent: of less, nothing is told
MISSING = 0.9  # the same while less was sent than the estimate says
LEAST_BUSY = 0.001  # seconds of queue: less is jitter


@dataclass(frozen=True)
class RateSample:
    """What came between two acknowledgements: bytes of datagrams over the longer of the time in which they
    were sent and that in which they were acknowledged, as in BBR. `app_limited`: the sender had less to send
    than it could have, so that this says nothing of what the path could not carry."""

    delivered: int
    seconds: float
    app_limited: bool
    sent_seconds: float = 0.0  # in which they were sent: a sender's thread may be late; 0: not known


class RoundTrip:
    """Smoothed round trip and its variation (RFC 6298), and the least one of the last ten seconds."""

    def __init__(self) -> None:
        self.smoothed, self.variation = INITIAL_RTT, INITIAL_RTT / 2
        self.least = INITIAL_RTT
        self.measured = False
        self.round_least = math.inf  # of the round that runs
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
        """The path is another: the next round trip is the least that is known."""
        self._least_at.clear()
        self.round_least = math.inf

    def age(self, now: float) -> float:
        """Seconds since the least round trip was seen."""
        return now - self._least_at[0][0] if self._least_at else 0.0


@dataclass(frozen=True)
class Round:
    """What one round trip showed. Rates in bytes per second, corrected for the path's own loss."""

    rate: float  # delivered
    sent: float  # the rate at which its packets were paced; nan where there was none
    limited: bool  # by the application, or without a sample
    acked: int  # packets
    lost: int
    queue: float  # seconds of its least round trip above the least of all

    def path_was_limit(self, estimate: float, base: float, min_rtt: float, burst: float = 1.0) -> bool:
        """Whether its rate tells what the path can carry: a queue stood all through it, or less came than was
        sent, or more was lost than the path loses at any rate. Where less was sent than the estimate says, it
        does not if just that much came, nor if a little less came and no queue stood: that may be chance."""
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
        """Whether one round is enough to say so, and not chance, nor a little more loss."""
        return self.queue > least_busy(min_rtt) or self.rate < (1.0 - MOST_BASE) * self.sent


def least_busy(min_rtt: float) -> float:
    """Seconds of queue, all through a round, that show the path busy."""
    return max(min_rtt / 32, LEAST_BUSY)


class Bandwidth:
    """The estimate: the greatest of the delivery rates of the last rounds, in bytes per second of datagrams
    as they are sent: what came is corrected for what the path loses at any rate.

    A round's rate is the median of its last third of samples: each spans a round trip, so the first ones
    are still of the round before, and a single one may be off by a burst. It raises the estimate
    whenever it is above. Below, it counts only when the path was the limit, and not the sender.
    """

    def __init__(self, initial: float) -> None:
        self.estimate = initial
        self.measured = False
        self._free: list[tuple[float, float]] = []  # samples of the round that runs
        self._limited: list[tuple[float, float]] = []  # and those while the sender had too little to send
        self._greatest: deque[tuple[int, float]] = deque()  # (round, rate): rises, falls
        self._counted = 0  # rounds

    def take(self, sample: RateSample) -> None:
        if sample.seconds > 0.0 and sample.delivered > 0:
            rate = sample.delivered / sample.seconds
            sent = sample.delivered / sample.sent_seconds if sample.sent_seconds > 0.0 else math.inf
            (self._limited if sample.app_limited else self._free).append((rate, sent))

    def most_of_round(self) -> float:
        """The greatest sample of the round that runs, 0 without one: in start-up the rate rises within it."""
        return max((rate for rate, _ in self._free), default=0.0)

    def end_round(self, base: float, loss: float = 0.0) -> tuple[float, float, bool]:
        """The round's delivery rate, corrected for the path's own loss; the rate at which its packets really
        left, those among them that were lost (`loss` of them); and whether it was limited by the application
        alone. (0, inf, True) without a sample."""
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
        """A round showed that the path carries this."""
        if not self.measured or rate >= self.estimate:
            self.measured = True
            self.restart(rate)

    def count(self, rate: float) -> None:
        """A round in which the path was the limit."""
        self._counted += 1
        kept = self._greatest
        while kept and kept[-1][1] <= rate:
            kept.pop()
        kept.append((self._counted, rate))
        while kept[0][0] <= self._counted - RATE_ROUNDS:
            kept.popleft()
        self.estimate = kept[0][1]

    def measure(self, round_: Round, base: float, min_rtt: float, anew: bool, burst: float = 1.0) -> None:
        """A round ended. `anew`: the path has just changed, and the last word on it is the best. `burst`:
        packets that are lost in a row."""
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
            self.count(self.estimate)  # as much as it says was sent, and came

    def restart(self, rate: float) -> None:
        """What was measured before no longer holds."""
        self._greatest.clear()
        self._greatest.append((self._counted, rate))
        self.estimate = rate
