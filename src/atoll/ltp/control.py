"""Rate control of a session: start-up, the rate table, draining of queues, and grants.

Decisions fall once a round trip; an acknowledgement costs a few additions. Source: docs/ltp-rates.md, which
has the states and the reason of each constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from atoll.ltp.bandwidth import (
    FAIR,
    MIN_RTT_SECONDS,
    MISSING,
    Bandwidth,
    RateSample,
    Round,
    RoundTrip,
    least_busy,
)
from atoll.ltp.losses import LOSS_ROUNDS, MOST_BASE, Losses, Verdict
from atoll.ltp.probing import PROBE_ROUNDS, Probing
from atoll.ltp.rates import PathLoss, Row, decide
from atoll.ltp.settings import LtpSettings
from atoll.ltp.target import Choice, Target

__all__ = ["RateControl", "RateDecision", "RateSample"]

Phase: TypeAlias = Literal["start-up", "emptying", "cruise"]

DOUBLING = 2.0  # rate factor per round trip in start-up
GROWTH = 1.25  # growth of the delivery rate per round trip while the path is not full (BBR)
SHORT = 0.8  # delivered share below which, with loss above the fill threshold, start-up ends
UNKNOWN_PROBES = 3  # successful probes in a row after which start-up begins again
REACHED = 0.8  # share of a grant from which the grant, not the path, is the limit
LEAST_TOLD = 250  # packets for start-up to act on a loss: in fewer, it may be one burst of the path's own
NEAR_SECONDS = 0.005  # round trip of a near path: half of the least round
FLAT_ROUNDS = 3  # rounds in a row without GROWTH that end start-up (BBR)
EMPTYING = 0.5  # share of the estimate until start-up's queue is gone
RECOVERY = 1.25  # rate factor per round for "up" below the estimate
HALF = 0.5  # share of the estimate after "halved", and the least one during a window
STANDING = 0.25  # share of the least round trip above which a queue is drained
LEAST_STANDING = 0.004  # seconds of queue: less is jitter of hosts
DRAIN_LEAST, DRAIN_MOST = 0.75, 0.95  # share of the estimate while a queue is drained
LEAST_PART = 0.4  # least part of that cut: a sender with a small share has queued less and drains less
DRAIN_ROUNDS = 6  # draining rounds after which a queue that stays belongs to others
MOST_CUT = 0.25  # least estimate after one "halved", as a share: a burst of other senders may pass
WINDOW_ROUNDS = 64  # longest window: a longer transfer gets several, so one loss does not slow all of it
ANEW_ROUNDS = 4  # rounds after "halved" in which the newest round overrides: the first mix old and new
SETTLED_ROUNDS = 2  # rounds until packets sent at the lower rate have arrived
STAYED_ROUNDS = 2  # rounds in which a drained queue should shrink
STAYED = 0.25  # least shrinking that counts, as a share of that of a queue that is all this sender's
YIELD = 0.85  # rate factor for loss beside another sender's standing queue
LOOK_AFTER = 0.9 * MIN_RTT_SECONDS
LOOK = 0.5  # share of the estimate for the one round trip that measures the least round trip
MOST_GRANT_SECONDS = 10.0  # longest grant: a dead receiver must not slow its sender for longer
SHARE_SECONDS = 10.0  # for which a window's first grant also bounds the next window's start
SHARE_TRIPS = 3.0  # round trips within which a new grant arrives: Ask and Grant take half of one each
LEAST_SHARE_PACKETS = 10.0  # per round trip: a smaller grant only asks to wait
HOST_SECONDS = 0.01  # delay of threads at both ends on loaded machines, beside the path's own
LEAST_RATE_PACKETS = 2.0  # per round trip: the least rate


@dataclass(frozen=True)
class RateDecision:
    """The rate in bytes per second, the row or state that set it, and why."""

    row: str
    rate: float
    reason: str


class RateControl:
    """Decide the sending rate of one session.

    Times are in seconds, `rate` in bytes of datagrams per second; `trip` has the round-trip times. Not
    thread-safe.
    """

    def __init__(self, settings: LtpSettings, now: float, rng: np.random.Generator) -> None:
        self._settings = settings
        self.trip = RoundTrip()
        self._losses = Losses()
        self._bandwidth = Bandwidth(settings.initial_rate)
        self._phase: Phase = "start-up"
        self._round = 0
        self._level = 1.0  # factor on the estimate: below 1 after "halved" and timeouts
        self._gain = 1.0  # factor for one round: a probe, a drain, a look
        self._starting_rate = settings.initial_rate
        self._flat = 0
        self._paced = self._paced_before = settings.initial_rate  # highest pace of this round and the last
        self._paced_then = self._paced  # pace at which the packets of the ended round left
        self._deaf_until = 0  # round before which losses stem from the previous rate
        self._drained = 0  # rounds
        self._undrained = 0.0  # estimate before the drain
        self._drained_from = (0, 0.0)  # round from which the queue should shrink, and its seconds then
        self._probing = Probing(rng)
        self._foreign = False  # the standing queue belongs to other senders
        self._busy_rounds = 0
        self._timeouts = 0
        self._granted = math.inf
        self._granted_until = -math.inf
        self._opening = True  # a window began without a grant, and none has arrived since
        self._share, self._share_at = math.inf, -math.inf  # a window's first grant, and its arrival time
        self._woken = False  # acknowledged after timeouts, and not yet back at the estimate
        self._before = self._came_before = 0.0  # estimate before "halved", and the rate that arrived then
        self._anew_until = 0
        self._window_from = 0
        self._queue_rises = 0
        self._emptied_from = 0
        self._looked = self._heard = now
        self._target = Target(settings.target_loss, settings.fill_above)
        self._came: list[float] = []  # delivery rates since the target's last observation
        self.rate = settings.initial_rate
        self.decision = RateDecision("start-up", self.rate, "nothing is known of the path")
        self._set("start-up", self.decision.reason)

    @property
    def loss(self) -> float:
        """Loss of the path over the last few round trips; repaired packets count as lost."""
        return self._losses.share

    @property
    def target(self) -> Choice:
        """Loss rate up to which the rate rises: fitted, or the safe value, with the reason."""
        return self._target.choice

    @property
    def estimate(self) -> float:
        """Estimated bandwidth in bytes per second."""
        return self._bandwidth.estimate

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def in_flight_limit(self) -> int:
        """Most bytes in flight: twice the path's capacity, since acknowledgements come in groups."""
        rate = max(self.rate, self._bandwidth.estimate)
        return int(2.0 * rate * (self.trip.least + HOST_SECONDS)) + 10 * self._settings.datagram_bytes

    def handle_ack(
        self,
        now: float,
        *,
        rtt: float | None,
        sample: RateSample | None,
        acked: int,
        lost: int,
        in_flight: int,
        round_ended: bool,
        runs: int | None = None,
    ) -> None:
        """Take in the effects of one acknowledgement.

        Args:
            rtt: round trip in seconds; None if not measured.
            sample: delivery rate; None if not measured.
            acked: packets that arrived.
            lost: packets found lost, those that parity restores included.
            in_flight: bytes.
            round_ended: a packet was acknowledged that left after the last round's end.
            runs: runs of consecutive lost packets; by default each was lost alone.
        """
        if rtt is not None:
            self.trip.take(now, rtt)
        if sample is not None:
            self._bandwidth.take(sample)
        self._losses.take(acked, lost, runs)
        self._heard = now
        if acked and self._timeouts:
            self._timeouts = 0
            self._level = max(HALF, self._level)
            self._woken = True
            self._deaf_until = self._round + 2  # losses reported now fell into the silence
            self._set_within("timeout", "heard again: half of the estimate, which may be out of date")
        if in_flight + self._settings.datagram_bytes > self.in_flight_limit:
            self._paced = math.nan
        if round_ended:
            self._end_round(now, in_flight)
        elif self._phase == "start-up" and rtt is not None:
            self._watch_queue(rtt)
        if now >= self._granted_until and self._granted < math.inf:
            self._granted = math.inf
            self._set_within("grant", "the receiver's grant has expired")

    def handle_timeout(self, now: float) -> None:  # noqa: ARG002  (as the other inputs)
        """Lower the rate: nothing was acknowledged for a probe timeout."""
        self._timeouts += 1
        self._level = max(HALF, self._level * HALF) if self._timeouts == 1 else self._level * HALF
        self._starting_rate = max(self._starting_rate * HALF, self._settings.initial_rate * HALF)
        self._gain = 1.0
        self._losses.forget()
        self._losses.stop_trial()
        self._set_within("timeout", f"nothing was heard, {self._timeouts} times in a row")

    def handle_path_change(self, reason: str) -> None:
        """Forget the fitted target and the least round trip, because data takes another path.

        The estimate stays, since most changes touch a router's table and not the path. If the path did
        change, loss and queue will show it. See docs/ltp-rates.md, "The target loss".
        """
        self._target.handle_path_change(reason)
        self._came.clear()
        self.trip.forget_least()

    def handle_grant(self, now: float, rate: float, seconds: float) -> None:
        """Take a grant: the receiver's link has `rate` bytes per second for this sender, for `seconds`."""
        if not (rate > 0.0 and seconds > 0.0):
            return
        seconds = min(seconds, MOST_GRANT_SECONDS)
        if self._opening and rate * self.trip.least >= LEAST_SHARE_PACKETS * self._settings.datagram_bytes:
            self._opening, self._share, self._share_at = False, rate, now
        self._granted, self._granted_until = rate, now + seconds
        self._set_within("grant", f"the receiver grants {rate / 1e6:.3g} MB/s for {seconds * 1e3:.0f} ms")

    def begin_window(self, now: float) -> RateDecision:
        """Start a transfer's window at the estimate, however long the sender was idle."""
        if now >= self._granted_until:
            # Senders may begin together: until a grant arrives, the last window's first one holds.
            fresh = now - self._share_at < SHARE_SECONDS
            self._granted = self._share if fresh else math.inf
            self._granted_until = now + SHARE_TRIPS * self.trip.smoothed
            self._opening = True
        if self._phase == "start-up":
            self._set("start-up", "a window begins, and the path is not known yet")
        else:
            self._level = 1.0 if not self._timeouts else self._level
            self._window_from = self._round
            if now - self._heard > self.trip.smoothed + 4.0 * self.trip.variation:
                # The queues had time to empty: what the last rounds did about them is past.
                self._phase, self._gain, self._foreign = "cruise", 1.0, False
                self._probing.stop()
                self._looked = now  # the first packets measure the least round trip
            shared = "" if self._granted == math.inf else ", and no more than the receiver's share"
            self._set_within("window", f"a window begins at the estimate{shared}")
        return self.decision

    # Once a round trip.

    def _end_round(self, now: float, in_flight: int) -> None:
        self._round += 1
        trip = self.trip
        queue = max(0.0, trip.round_least - trip.least) if trip.round_least < math.inf else 0.0
        trip.round_least = math.inf
        self._queue_rises = 0
        free = queue <= least_busy(trip.least) and self._round >= self._deaf_until
        acked, lost = self._losses.end_round(free)
        if self._round < self._deaf_until:
            self._losses.forget()
        base = self._losses.base
        # Packets that arrived in this round left in the round before.
        sent, self._paced_before = self._paced_before, self._paced
        rate, really_sent, limited = self._bandwidth.end_round(base, lost / max(acked + lost, 1))
        self._paced_then = sent
        sent = min(sent, really_sent)
        if self._phase == "start-up":
            self._start_up(Round(rate, sent, limited, acked, lost, queue))
        else:
            round_ = Round(rate, sent, limited, acked, lost, queue)
            self._bandwidth.measure(
                round_, base, trip.least, self._round <= self._anew_until, self._losses.burst
            )
            if self._phase == "emptying":
                self._empty(in_flight, queue)
            if self._phase == "cruise":
                self._observe(round_)
                self._cruise(now, round_)
        self._paced = self.rate

    def _observe(self, round_: Round) -> None:
        """Every few rounds, give the target an observation: loss, delivery rate and delay."""
        if round_.limited or self._round < self._deaf_until:
            return
        self._came.append(round_.rate * (1.0 - self._losses.base))
        if len(self._came) >= LOSS_ROUNDS:
            came = sum(self._came) / len(self._came)
            self._came.clear()
            self._target.handle_observation(self.loss, came, self.trip.smoothed, self.trip.least)

    def _start_up(self, round_: Round) -> None:
        bandwidth, rate, limited, queue = self._bandwidth, round_.rate, round_.limited, round_.queue
        grew = rate >= GROWTH * bandwidth.estimate or not bandwidth.measured
        if rate > 0.0 and (not limited or rate > bandwidth.estimate):
            bandwidth.raise_to(rate)
        if self._granted < math.inf and bandwidth.measured and not self._granted_more:
            self._phase, self._gain, self._level = "cruise", 1.0, 1.0
            self._probing.restart(self._round)
            self._set("grant", "the receiver's grant is reached")
            return
        if limited:
            if bandwidth.measured:
                self._starting_rate = max(DOUBLING * bandwidth.estimate, self._settings.initial_rate)
            self._set("start-up", "too little to send to learn the path's rate")
            return
        # A round at less than the growth looked for cannot show that growth; nan counts as offered.
        offered = not round_.sent < GROWTH * bandwidth.estimate
        self._flat = 0 if grew else self._flat + offered
        if self._flat >= FLAT_ROUNDS:
            self._leave_start_up(f"{FLAT_ROUNDS} rounds without growth")
        elif self._stands(queue):
            self._leave_start_up("a queue stands")
        elif rate < SHORT * round_.sent and self._enough_lost():
            self._leave_start_up("loss above the fill threshold, and less came than was sent")
        else:
            if grew:
                # On a near path a round has many round trips: delivery shows the current pace.
                known = 0.0 if self.trip.smoothed < NEAR_SECONDS else self._starting_rate
                self._starting_rate = DOUBLING * max(known, bandwidth.estimate)
            self._set("start-up", "doubled" if grew else "no growth; it may be chance")

    def _enough_lost(self) -> bool:
        seen = self._seen()
        return seen.counted >= LEAST_TOLD and seen.above_fill

    def _watch_queue(self, rtt: float) -> None:
        """End start-up within a round, as soon as a queue stands."""
        self._queue_rises = self._queue_rises + 1 if self._stands(rtt - self.trip.least) else 0
        if self._queue_rises >= 8 and self._bandwidth.measured:
            self._leave_start_up("a queue stands")

    def _leave_start_up(self, reason: str) -> None:
        self._phase = "emptying"
        self._gain, self._level = EMPTYING, 1.0
        self._emptied_from = self._round
        self._losses.forget()
        self._deaf_until = self._round + 3
        rate = self._bandwidth.most_of_round()
        if rate > self._bandwidth.estimate:
            self._bandwidth.raise_to(rate)
        self._set("emptying", f"start-up ends: {reason}")

    def _empty(self, in_flight: int, queue: float) -> None:
        capacity = self._bandwidth.estimate * self.trip.least  # bytes of the path without a queue
        since = self._round - self._emptied_from
        if in_flight <= capacity or since >= DRAIN_ROUNDS or (since > 1 and not self._stands(queue)):
            self._phase, self._gain = "cruise", 1.0
            self._probing.restart(self._round)
        else:
            self._set("emptying", f"start-up's queue of {queue * 1e3:.1f} ms")

    def _cruise(self, now: float, round_: Round) -> None:
        rate, limited, lost, queue = round_.rate, round_.limited, round_.lost, round_.queue
        busy = queue > least_busy(self.trip.least)
        verdict = self._try(round_, busy)
        if verdict == "lessened":
            self._bandwidth.restart(min(self._came_before, self._bandwidth.estimate))
        row = decide(self._seen())
        stands = self._stands(queue)
        if not stands:
            self._foreign, self._drained = False, 0
        self._busy_rounds = self._busy_rounds + 1 if busy else 0
        if self._busy_rounds % (2 * PROBE_ROUNDS) == PROBE_ROUNDS:
            self._probing.pay_back = PROBE_ROUNDS
        self._probing.end_round(self._round, rate, limited)
        if self._level < 1.0 and self._round >= self._window_from + WINDOW_ROUNDS:
            self.begin_window(now)
        elif verdict == "own":
            self._level, self._gain = 1.0, 1.0
            self._bandwidth.restart(max(self._before, self._bandwidth.estimate))
            own = self._losses.own
            self._set("own loss", f"half of the rate did not lessen it: {own:.1%} is the path's own loss")
        elif row.action == "halved":
            self._halve(row, round_)
        elif self._woken and self._round >= self._deaf_until:
            self._woken = False
            self._level = self._gain = 1.0
            self._set(row.seen, "the path is as before: back at the estimate")
        elif min(now - self._looked, self.trip.age(now)) >= LOOK_AFTER:
            self._looked = now
            self._gain = LOOK
            self._set("look", "the least round trip was seen too long ago")
        elif stands and not self._foreign and not limited:
            self._drain(round_)
        elif (
            stands and self._losses.beyond_own(lost, round_.acked + lost) and self._round >= self._deaf_until
        ):
            self._yield()
        elif self._probing.pay_back and busy:
            self._probing.pay_back -= 1
            self._gain = self._probing.gain_to_pay_back
            self._set(row.seen, "a small queue is given time to drain")
        elif row.action == "up":
            self._up(row, limited, busy)
        else:
            self._gain = 1.0
            self._set(row.seen, f"held: {row.reason}")

    def _try(self, round_: Round, busy: bool) -> Verdict:
        """Return the verdict on the loss for which the rate was halved; "" while it is open."""
        if self._round < self._deaf_until or busy:
            return ""
        if self._level > HALF:
            self._losses.stop_trial()
        return self._losses.try_round(round_.acked, round_.lost, self._settings.fill_above)

    @property
    def _granted_more(self) -> bool:
        """True if a grant is far above the estimate."""
        return self._bandwidth.estimate < REACHED * self._granted < math.inf

    def _start_anew(self, limited: bool, why: str) -> None:
        """Go back to start-up: the path carries far more than estimated, and probes would take 100 round
        trips."""
        self._probing.stop()
        self._phase, self._gain, self._flat = "start-up", 1.0, 0
        self._starting_rate = (1.0 if limited else DOUBLING) * self._bandwidth.estimate
        self._set("start-up", f"{why}: the path is not known yet")

    def _up(self, row: Row, limited: bool, busy: bool) -> None:
        self._gain = 1.0
        if self._level < 1.0:
            self._level = min(1.0, self._level * RECOVERY)
            self._set(row.seen, f"up, towards the estimate: {row.reason}")
        elif self._probing.found >= UNKNOWN_PROBES and not self._foreign and not busy:
            self._start_anew(limited, f"{UNKNOWN_PROBES} probes in a row found more")
        elif self._granted_more and not self._foreign and not busy:
            self._start_anew(limited, "the receiver grants more")
        elif self._probing.asked:
            self._gain = self._probing.gain_meanwhile
            self._set(row.seen, "up: the last probe's effect is not yet known")
        elif limited or not self._probing.may_begin(self._round):
            self._set(row.seen, "up not yet: the last probe found nothing")
        else:
            self._gain = self._probing.begin(self._round, self._bandwidth.estimate, self._foreign)
            self._set(row.seen, f"up, {self._gain - 1.0:.0%} above the estimate: {row.reason}")

    def _halve(self, row: Row, round_: Round) -> None:
        """Halve the rate; where the path was the limit, take the estimate anew.

        Where no queue stands, the estimate stays until half of the rate has lessened the loss: a loss that
        comes at any rate would else lower the estimate window by window.
        """
        was = self._bandwidth.estimate
        came = min(max(round_.rate, MOST_CUT * was), was)
        if self._level == 1.0:
            self._before, self._came_before = was, was if round_.limited else came
            self._losses.begin_trial()
        busy = round_.queue > least_busy(self.trip.least)
        short = round_.rate < (MISSING if busy else 1.0 - MOST_BASE) * round_.sent
        if ((short and round_.sent >= MISSING * was) or self._stands(round_.queue)) and not round_.limited:
            self._bandwidth.restart(came)
        self._level, self._gain = max(HALF, self._level * HALF), 1.0
        self._probing.stop()
        self._losses.forget()
        self._deaf_until = self._round + 2
        self._anew_until = self._round + ANEW_ROUNDS
        self._set(row.seen, f"halved: {row.reason}")

    def _drain(self, round_: Round) -> None:
        queue, least = round_.queue, self.trip.least
        self._drained += 1
        if self._drained == 1:
            self._undrained = self._bandwidth.estimate
        came = round_.rate >= FAIR * self._paced_then
        if self._drained <= SETTLED_ROUNDS or not came:
            self._drained_from = (self._drained, queue)
        begun, stood = self._drained_from
        rounds = self._drained - begun
        if rounds >= STAYED_ROUNDS and stood - queue < STAYED * (1.0 - self._gain) * least * rounds:
            self._drained, self._gain = 0, 1.0
            if queue - stood > least_busy(least):
                self._foreign = True
                self._set("drain", "the queue grows while it is drained: it belongs to other senders")
                return
            self.trip.forget_least()
            self._bandwidth.restart(max(self._undrained, self._bandwidth.estimate))
            kept = f"everything arrived at a lower rate, and a queue of {queue * 1e3:.1f} ms stayed"
            self._set("longer", f"the path has become longer: {kept}")
        elif self._drained > DRAIN_ROUNDS:
            self._foreign = True
            self._gain = 1.0
            self._set("drain", f"the queue stays for {DRAIN_ROUNDS} rounds: it belongs to other senders")
        else:
            gain = min(DRAIN_MOST, max(DRAIN_LEAST, 1.0 - queue / least))
            gain = 1.0 - (1.0 - gain) * max(self._probing.share, LEAST_PART)
            estimate = self._bandwidth.estimate
            if round_.rate < HALF * round_.sent:
                self._bandwidth.restart(min(max(round_.rate, MOST_CUT * estimate), estimate))
            elif not came:  # send less than arrives, whether path or in-flight limit is the cause
                gain *= min(1.0, max(HALF, round_.rate / (estimate * self._level)))
            self._gain = gain if self._drained == 1 else min(gain, self._gain)
            self._probing.stop()
            self._set("drain", f"a queue of {queue * 1e3:.1f} ms stands")

    def _yield(self) -> None:
        self._level = max(HALF, self._level * YIELD)
        self._gain = 1.0
        self._deaf_until = self._round + 2
        self._set("yield", "loss beside another's queue: the path is full")

    def _stands(self, queue: float) -> bool:
        return self.trip.measured and queue > max(STANDING * self.trip.least, LEAST_STANDING)

    def _seen(self) -> PathLoss:
        return self._losses.seen(self.target.value, self._settings.fill_above)

    def _set_within(self, row: str, reason: str) -> None:
        """Set the rate within a round. A large change leaves its packets without one pace (nan)."""
        before = self.rate
        self._set(row, reason)
        if not FAIR <= self.rate / before <= 1.0 / FAIR:
            self._paced = math.nan

    def _set(self, row: str, reason: str) -> None:
        if self._phase == "start-up":
            wanted = self._starting_rate
        else:
            wanted = self._bandwidth.estimate * self._level * self._gain
        least = LEAST_RATE_PACKETS * self._settings.datagram_bytes / self.trip.smoothed
        self.rate = max(min(wanted, self._granted), least)
        self._paced = max(self._paced, self.rate)  # nan stays
        self.decision = RateDecision(row, self.rate, reason)
