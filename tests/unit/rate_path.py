"""A path under a virtual clock, in bursts of a millisecond: a queue with drops at its end, a rate, a delay
and random loss after the queue; and flows that share it: `RateControl`'s, Cubic's and BBR's, roughly.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from atoll.ltp.control import RateControl, RateSample
from atoll.ltp.settings import LtpSettings

SIZE = 1400  # bytes of a datagram
TICK = 0.001  # seconds


@dataclass
class Burst:
    sent: float
    packets: int
    delivered: int  # packets acknowledged when it was sent
    delivered_at: float
    first_sent: float
    limited: bool
    came: int = 0
    runs: int = 0  # of packets that are lost in a row
    back: float = 0.0  # when its acknowledgement is there


class Flow:
    """A sender whose acknowledgements come burst by burst. `backlog`: packets it has to send."""

    def __init__(self, start: float = 0.0, backlog: float = math.inf) -> None:
        self.start, self.backlog = start, backlog
        self.unacked: deque[Burst] = deque()
        self.in_flight = 0
        self.delivered, self.delivered_at, self.first_sent = 0, start, start
        self.round_ends = 0
        self.budget = 0.0
        self.log: list[tuple[float, int]] = []  # (when, packets that came)
        self.heard = start

    def wanted(self, now: float) -> int:
        raise NotImplementedError

    def acked(self, now: float, burst: Burst, sample: RateSample, round_ended: bool) -> None:
        raise NotImplementedError

    def timed_out(self, now: float) -> None:
        pass

    def send(self, now: float) -> Burst | None:
        packets = int(min(self.wanted(now), self.backlog))
        if packets <= 0:
            return None
        if not self.in_flight:
            self.delivered_at = self.first_sent = self.heard = now
        self.backlog -= packets
        self.in_flight += packets
        limited = self.backlog <= 0
        return Burst(now, packets, self.delivered, self.delivered_at, self.first_sent, limited)

    def handle(self, now: float, burst: Burst) -> None:
        self.in_flight -= burst.packets
        self.heard = now
        self.delivered += burst.came
        self.log.append((now, burst.came))
        seconds = max(burst.sent - burst.first_sent, now - burst.delivered_at)
        sent_seconds = burst.sent - burst.first_sent
        sample = RateSample((self.delivered - burst.delivered) * SIZE, seconds, burst.limited, sent_seconds)
        self.delivered_at, self.first_sent = now, burst.sent
        ended = burst.delivered >= self.round_ends
        if ended:
            self.round_ends = self.delivered
        self.acked(now, burst, sample, ended)

    def rate(self, begin: float, end: float) -> float:
        """Bytes per second that came."""
        return SIZE * sum(came for when, came in self.log if begin <= when < end) / (end - begin)


class Ltp(Flow):
    def __init__(
        self,
        settings: LtpSettings | None = None,
        seed: int = 1,
        start: float = 0.0,
        backlog: float = math.inf,
    ) -> None:
        super().__init__(start, backlog)
        self.control = RateControl(settings or LtpSettings(), start, np.random.default_rng(seed))
        self.rounds = self.timeouts = 0
        self.rates: list[tuple[float, float, float, str, str]] = []  # a tick each
        self.started: float | None = None  # when start-up was over
        self.started_rounds = 0

    def wanted(self, now: float) -> int:
        control = self.control
        self.budget = min(self.budget + control.rate * TICK, max(2 * SIZE, control.rate * 0.002))
        decision = control.decision
        self.rates.append((now, control.rate, control.trip.smoothed, decision.row, decision.reason))
        room = control.in_flight_limit // SIZE - self.in_flight
        packets = int(min(self.budget / SIZE, max(room, 0)))
        self.budget -= min(packets, self.backlog) * SIZE
        return packets

    def acked(self, now: float, burst: Burst, sample: RateSample, round_ended: bool) -> None:
        self.rounds += round_ended
        self.timeouts = 0
        self.control.handle_ack(
            now,
            rtt=now - burst.sent if burst.came else None,
            sample=sample if burst.came else None,
            acked=burst.came,
            lost=burst.packets - burst.came,
            in_flight=self.in_flight * SIZE,
            round_ended=round_ended,
            runs=burst.runs,
        )
        if self.started is None and self.control.phase != "start-up":
            self.started, self.started_rounds = now, self.rounds

    def timed_out(self, now: float) -> None:
        patience = self.control.trip.smoothed + 4 * self.control.trip.variation + 0.005
        if now - self.heard > patience * 2**self.timeouts:
            self.heard, self.timeouts = now, self.timeouts + 1
            self.in_flight -= sum(burst.packets for burst in self.unacked if burst.back == math.inf)
            self.unacked = deque(burst for burst in self.unacked if burst.back < math.inf)
            self.control.handle_timeout(now)

    def paced(self, begin: float, end: float) -> float:
        """The mean rate it paced by, bytes per second."""
        return float(np.mean([rate for now, rate, *_ in self.rates if begin <= now < end]))

    def rtt(self, begin: float, end: float, quantile: float = 0.5) -> float:
        return float(np.quantile([rtt for now, _, rtt, *_ in self.rates if begin <= now < end], quantile))


class Cubic(Flow):
    """CUBIC (RFC 9438), whose losses are found a round trip later and counted once a round trip."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__(start)
        self.window, self.threshold = 10.0, math.inf
        self.most, self.epoch = 0.0, start
        self.recovered = 0.0

    def wanted(self, now: float) -> int:
        return int(self.window) - self.in_flight

    def acked(self, now: float, burst: Burst, sample: RateSample, round_ended: bool) -> None:
        rtt = now - burst.sent
        if burst.came < burst.packets and burst.sent >= self.recovered:
            self.recovered = now
            self.most, self.epoch = self.window, now
            self.window = self.threshold = max(2.0, 0.7 * self.window)
        elif self.window < self.threshold:
            self.window += burst.came
        else:
            since = (self.most * 0.3 / 0.4) ** (1 / 3)
            cubic = 0.4 * (now - self.epoch + rtt - since) ** 3 + self.most
            friendly = self.most * 0.7 + 0.53 * (now - self.epoch) / rtt
            target = min(max(cubic, friendly), 1.5 * self.window)
            self.window += max(0.0, target - self.window) * burst.came / self.window


class Bbr(Flow):
    """BBR's first version: ten rounds' greatest rate, eight gains in turn, two paths' worth in flight."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__(start)
        self.rates: deque[float] = deque([1.25e6], maxlen=10)
        self.round_rate = 0.0
        self.least = math.inf
        self.cycle, self.starting, self.flat = 2, True, 0
        self.draining = False

    def wanted(self, now: float) -> int:
        best = max(self.rates)
        gain = (
            2.885 if self.starting else 0.35 if self.draining else (1.25, 0.75, 1, 1, 1, 1, 1, 1)[self.cycle]
        )
        self.budget = min(self.budget + gain * best * TICK, max(2 * SIZE, gain * best * 0.002))
        least = self.least if self.least < math.inf else 1.0
        room = int((2.885 if self.starting else 2.0) * best * least / SIZE) + 10 - self.in_flight
        packets = int(min(self.budget / SIZE, max(room, 0)))
        self.budget -= packets * SIZE
        return packets

    def acked(self, now: float, burst: Burst, sample: RateSample, round_ended: bool) -> None:
        self.least = min(self.least, now - burst.sent)
        self.round_rate = max(self.round_rate, sample.delivered / sample.seconds if sample.seconds else 0.0)
        if not round_ended:
            return
        if self.starting:
            self.flat = 0 if self.round_rate > 1.25 * max(self.rates) else self.flat + 1
            if self.flat >= 3:
                self.starting, self.draining = False, True
        elif self.draining:
            self.draining = self.in_flight * SIZE > max(self.rates) * self.least
        else:
            self.cycle = (self.cycle + 1) % 8
        self.rates.append(self.round_rate)
        self.round_rate = 0.0


@dataclass
class Path:
    """`rate` in bytes per second, `delay` the round trip in seconds, `queue_bytes` of room."""

    rate: float
    delay: float
    queue_bytes: float
    loss: float = 0.0
    seed: int = 7
    burst: float = 1.0  # packets lost in a row at random, at the mean
    flows: list[Flow] = field(default_factory=list)
    now: float = 0.0
    queued: float = 0.0  # bytes
    queues: list[tuple[float, float]] = field(default_factory=list)  # (when, seconds)
    dark: bool = False  # nothing comes through

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.bad, self.turns = False, 0  # a chain of bursts, and packets until its state turns

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end - TICK / 2:
            self.step()

    def step(self) -> None:
        now = self.now
        for flow in self.flows:
            while flow.unacked and flow.unacked[0].back <= now:
                flow.handle(now, flow.unacked.popleft())
            if flow.in_flight:
                flow.timed_out(now)
        sent = [(flow, flow.send(now) if now >= flow.start else None) for flow in self.flows]
        self.carry([(flow, burst) for flow, burst in sent if burst is not None])
        self.queues.append((now, self.queued / self.rate))
        self.queued = max(0.0, self.queued - self.rate * TICK)
        self.now = round(now + TICK, 6)

    def carry(self, sent: list[tuple[Flow, Burst]]) -> None:
        """A tick's packets, in whatever order: who loses when the queue is full is chance, by packet."""
        packets = [burst.packets for _, burst in sent]
        room = max(0, int((self.queue_bytes + self.rate * TICK - self.queued) / SIZE))
        taken = packets
        if sum(packets) > room:
            taken = [int(n) for n in self.rng.multivariate_hypergeometric(packets, room)]
        before, after = self.queued, self.queued + sum(taken) * SIZE
        self.queued = after
        piece = max(1, int(self.rate * TICK / SIZE))
        for (flow, burst), kept in zip(sent, taken, strict=True):
            pieces = -(-max(kept, 1) // piece)  # each of a tick of the path's rate, acknowledged once it left
            for place in range(pieces):
                here = kept * (place + 1) // pieces - kept * place // pieces
                whole = burst.packets * (place + 1) // pieces - burst.packets * place // pieces
                waits = (before + (after - before) * (place + 1) / pieces) / self.rate
                self.carry_piece(flow, replace(burst, packets=whole, came=here), waits)

    def carry_piece(self, flow: Flow, burst: Burst, waits: float) -> None:
        burst.runs = int(burst.came < burst.packets)
        lost, runs = self.lose(burst.came) if self.loss else (0, 0)
        burst.came = 0 if self.dark else burst.came - lost
        burst.runs += runs
        burst.back = burst.sent + self.delay + max(0.0, waits - TICK)
        if self.dark:
            burst.back = math.inf
        flow.unacked.append(burst)

    def lose(self, packets: int) -> tuple[int, int]:
        """How many of these are lost at random, and in how many runs."""
        if self.burst == 1.0:
            lost = int(self.rng.binomial(packets, self.loss))
            return lost, lost
        lost = runs = 0
        while packets:
            if not self.turns:
                self.bad = not self.bad
                runs += self.bad
                mean = self.burst if self.bad else self.burst * (1.0 - self.loss) / self.loss
                self.turns = int(self.rng.geometric(min(1.0, 1.0 / mean)))
            here = min(packets, self.turns)
            self.turns -= here
            packets -= here
            lost += self.bad * here
        return lost, runs

    def queue(self, begin: float, end: float, quantile: float) -> float:
        """Seconds of queue."""
        return float(np.quantile([queue for now, queue in self.queues if begin <= now < end], quantile))


def jain(rates: list[float]) -> float:
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))
