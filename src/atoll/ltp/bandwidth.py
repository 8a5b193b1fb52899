"""What the path can carry and how long it takes: measured at the sender, by its acknowledgements.

Source: S3, "The sender", 4. All of it is fed once for each acknowledgement, so each step is a few operations.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from atoll.ltp.rates import surely_above

INITIAL_RTT = 0.333  # seconds, until one was measured (RFC 9002, 6.2.2)
LEAST_RTT = 1e-6  # seconds: two clocks may say none at all
MIN_RTT_SECONDS = 10.0  # for which a least round trip is believed (BBR); then the path may have changed
RATE_ROUNDS = 10  # that count, over which the greatest delivery rate is taken (BBR)
LOSS_ROUNDS = 4  # over which the path's loss is taken: "the last few"
BASE_PACKETS = 1000  # of which a loss is told well enough to take the least of several
BASE_SPANS = 32  # of so many packets and at least a round, over which the least is taken: several probes
SURE_SPANS = 8  # after which the base may be more than FIRST_BASE: some spans were below the path's rate
FIRST_BASE = 0.03
MOST_BASE = 0.2  # of loss that is taken for the path's own, and not for the rate's
# of what was sent, corrected for the path's own loss: when as much came, the path was not the limit
FAIR = 0.98

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


class Losses:
    """Packets that came and were lost, by round trip."""

    def __init__(self) -> None:
        self.acked = self.lost = 0  # in the round that runs
        self.quiet_rounds = 0
        self._rounds: deque[tuple[int, int]] = deque(maxlen=LOSS_ROUNDS)
        self._spans: deque[float] = deque(maxlen=BASE_SPANS)
        self._span_acked = self._span_lost = 0
        self.base = 0.0  # the least loss of a span: what the path loses at any rate

    def take(self, acked: int, lost: int) -> None:
        self.acked += acked
        self.lost += lost
        if lost:
            self.quiet_rounds = 0

    def end_round(self) -> tuple[int, int]:
        """Of the round that ended: (acked, lost)."""
        ended = self.acked, self.lost
        counted = self.acked + self.lost
        if counted:
            self._rounds.append(ended)
            self._span_acked += self.acked
            self._span_lost += self.lost
            self._end_span()
            if not self.lost:
                self.quiet_rounds += 1
        self.acked = self.lost = 0
        return ended

    def _end_span(self) -> None:
        counted = self._span_acked + self._span_lost
        share = self._span_lost / counted
        if counted >= BASE_PACKETS:
            self._spans.append(share)
            self._span_acked = self._span_lost = 0
        most = MOST_BASE if len(self._spans) >= SURE_SPANS else FIRST_BASE
        self.base = min(most, min(self._spans) if self._spans else share)

    def recent(self) -> tuple[int, int]:
        """Of the last few round trips: (lost, counted)."""
        lost = sum(each[1] for each in self._rounds) + self.lost
        return lost, lost + sum(each[0] for each in self._rounds) + self.acked

    @property
    def share(self) -> float:
        lost, counted = self.recent()
        return lost / counted if counted else 0.0

    def forget(self) -> None:
        """The rate was changed for this loss: what follows is judged anew."""
        self._rounds.clear()
        self.acked = self.lost = self.quiet_rounds = 0


@dataclass(frozen=True)
class Round:
    """What one round trip showed. Rates in bytes per second, corrected for the path's own loss."""

    rate: float  # delivered
    sent: float  # the rate at which its packets were paced; nan where there was none
    limited: bool  # by the application, or without a sample
    acked: int  # packets
    lost: int
    queue: float  # seconds of its least round trip above the least of all

    def path_was_limit(self, estimate: float, base: float, min_rtt: float) -> bool:
        """Whether its rate tells what the path can carry: a queue stood all through it, or less came than was
        sent, or more was lost than the path loses at any rate. Where less was sent than the estimate says, it
        does not if just that much came, nor if a little less came and no queue stood: that may be chance."""
        busy = self.queue > least_busy(min_rtt)
        if math.isnan(self.sent):
            return busy
        if self.sent < FAIR * estimate:
            short = self.rate < (FAIR if busy else MISSING) * self.sent
            return short or (busy and self.rate * FAIR > self.sent)
        short = self.rate < FAIR * self.sent
        return busy or short or surely_above(self.lost, max(self.acked + self.lost, 1), base)

    def much_is_missing(self, min_rtt: float) -> bool:
        """Whether one round is enough to say so, and not chance, nor a little more loss."""
        return self.queue > least_busy(min_rtt) or self.rate < MISSING * self.sent


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

    def end_round(self, base: float) -> tuple[float, float, bool]:
        """The round's delivery rate, corrected, and whether it was limited by the application alone;
        (0, True) without a sample."""
        free, limited = self._free, self._limited
        self._free, self._limited = [], []
        rates = free or limited
        if not rates:
            return 0.0, math.inf, True
        late = rates[-max(1, len(rates) // 3) :]
        rate, sent = (sorted(each)[len(late) // 2] / (1.0 - base) for each in zip(*late, strict=True))
        return rate, sent, not free

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

    def measure(self, round_: Round, base: float, min_rtt: float, anew: bool) -> None:
        """A round ended. `anew`: the path has just changed, and the last word on it is the best."""
        limit = not round_.limited and round_.path_was_limit(self.estimate, base, min_rtt)
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
