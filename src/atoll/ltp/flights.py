"""What a session has on its way, over all stripes: how much more may go, and when silence is too long.

Joins the records of what was sent, what Acks measure, and the rate. Source: docs/ltp.md, "What is on
its way".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from atoll.ltp.bodies import Items
from atoll.ltp.control import RateControl, RateSample
from atoll.ltp.metering import Meter
from atoll.ltp.sent import GRANULARITY, SentRecords, Told
from atoll.ltp.settings import Settings
from atoll.ltp.stripes import Poll, Stripes
from atoll.wire.datagrams import Acknowledgement

BURST_SECONDS = 0.002  # of the rate in one burst, at most
MOST_LATE = 0.01  # seconds of the rate that are caught up with after a timer came late, burst after burst
IDLE_SECONDS = 0.02  # without anything on its way, which a pause between bursts is not
LATEST_ACK = 0.025  # seconds by which an Ack may come late: the thread that makes it may (RFC 9000, 18.2)
LONGEST_TIMEOUT = 1.0  # seconds to which the probe timeout is doubled: a blackout's end is seen within them
PROBES = 2  # datagrams that a probe timeout sends past rate and window (RFC 9002, 6.2.4)
PROBE_SHARE = 1e-3  # of the estimated rate: while probes are no more than that, it is not doubled
TIMEOUT_VARIATIONS = 4  # (RFC 6298)
LOSS_MEMORY = (
    2**12
)  # datagrams: 1 % of loss is told to a sixth, and a short transfer knows of those before it
# Datagrams of a stripe that are sealed with one key: so many of so many bytes keep an attacker's advantage
# below 2^-57 (RFC 9001, 6.6 and B.1).
PHASE_DATAGRAMS, PHASE_BYTES = 2**28, 2**11
PHASE_LARGE_DATAGRAMS = 2**23  # of longer ones


class Flights:
    """Of one end."""

    def __init__(self, settings: Settings, stripes: int, rng: np.random.Generator, now: float) -> None:
        self.control = RateControl(settings, now, rng)
        self.stripes = [SentRecords() for _ in range(stripes)]
        self.phases = [KeyPhase(settings.datagram_bytes) for _ in range(stripes)]
        self.lost = 0  # datagrams
        self.burst_length = 1.0  # datagrams that are lost in a row
        self.loss = 0.0  # of the path, by the last LOSS_MEMORY datagrams or so
        self._told = 0.0  # of how many it is known
        self.timeouts = 0  # in a row
        self.probes = 0  # datagrams that may go past rate and window
        self._meter = Meter()
        self.timeout_at = math.inf  # when the other end has been silent for too long about what is on its way
        self._progress = now
        self._size = settings.datagram_bytes
        self._used = Stripes(stripes)

    @property
    def likely_loss(self) -> float:
        """Of the path; in doubt too much, for parity that is wanting costs a round trip."""
        varies = self.loss * (1.0 - self.loss) * max(2.0 * self.burst_length - 1.0, 1.0)
        return min(self.loss + math.sqrt(varies / max(self._told, 1.0)), 1.0)

    @property
    def bytes(self) -> int:
        """On their way, but for stripes that are not used."""
        if len(self.stripes) == 1:
            return self.stripes[0].in_flight
        return sum(sent.in_flight for stripe, sent in enumerate(self.stripes) if self.used(stripe))

    @property
    def burst(self) -> int:
        """Datagrams of one burst at the present rate."""
        second = self.control.rate / self._size
        return max(int(second * BURST_SECONDS), 1)

    @property
    def room(self) -> int:
        """Datagrams that may still go on their way."""
        return max((self.control.in_flight_limit - self.bytes) // self._size, self.probes)

    def add(self, now: float, stripe: int, transfer: int, items: Items, size: int) -> int:
        """Notes a burst that goes now; returns its first number."""
        idle = not self.bytes and now > max(sent.last_sent for sent in self.stripes) + IDLE_SECONDS
        first = self.stripes[stripe].add(now, transfer, items, size, self._meter.mark(idle))
        self._set_timeout()
        return first

    def phase(self, stripe: int) -> int:
        """The phase of the keys for the next datagram."""
        return self.phases[stripe].of(self.stripes[stripe])

    def key_asks(self, stripe: int) -> bool:
        """Whether a change of keys waits for an acknowledgement that nothing asks for."""
        return self.phases[stripe].asks(self.stripes[stripe])

    def handle_limited(self) -> None:
        """There is nothing to send though more could be."""
        self._meter.handle_limited(self.bytes)

    def handle_ack(self, now: float, ack: Acknowledgement) -> Heard:
        """Takes in an Ack."""
        sent, control = self.stripes[ack.of], self.control
        told = sent.handle_ack(now, ack)
        heard = Heard(told, after_silence=self.timeouts > 1)
        if told.acked_count:
            self.timeouts, self.probes, self._progress = 0, 0, now
            heard.back = self._used.handle_acked(now, ack.of)
        self._detect(now, sent, told)
        if told.rtt is not None:
            without = told.rtt - ack.delay  # which is the receiver's word, and may be wrong
            heard.rtt = without if without >= control.trip.least / 2 else told.rtt
        sample, ended = self._meter.handle_ack(ack, told, control.trip.least)
        heard.sample, heard.round_ended = sample, ended
        return heard

    def poll_lost(self, now: float) -> Iterator[Heard]:
        """What time alone says is lost."""
        for sent in self.stripes:
            if now >= sent.loss_at:
                told = Told()
                self._detect(now, sent, told)
                if told.lost_count:
                    yield Heard(told)

    def settle(self, now: float, heard: Heard, restored: int) -> None:
        """Tells the rate. `restored` of the lost ones can be restored."""
        told = heard.told
        counted = told.acked_count + told.lost_count
        if not counted:
            return
        if not heard.after_silence:  # what an outage has taken says nothing of the path
            self._told = min(self._told + counted, max(LOSS_MEMORY, counted))
            self.loss += (told.lost_count - self.loss * counted) / self._told
            if told.lost_count:
                self.burst_length += (told.lost_count / told.runs - self.burst_length) / 8
        self.control.handle_ack(
            now,
            rtt=heard.rtt,
            sample=heard.sample,
            acked=told.acked_count,
            lost=told.lost_count,
            restored=restored,
            in_flight=self.bytes,
            round_ended=heard.round_ended,
            runs=told.runs,
        )
        self._set_timeout()

    @property
    def loss_at(self) -> float:
        """When poll_lost may have something."""
        return min(sent.loss_at for sent in self.stripes)

    @property
    def waits_since(self) -> float:
        """Since when nothing of a stripe that is used was acknowledged, though something is on its way; else
        inf."""
        return min(
            (sent.waits_since for stripe, sent in enumerate(self.stripes) if self.used(stripe)),
            default=math.inf,
        )

    def used(self, stripe: int) -> bool:
        """Whether anything but questions goes over it."""
        return self._used.used(stripe)

    @property
    def stripes_at(self) -> float:
        """When poll_stripes may have something."""
        if len(self.stripes) == 1:
            return math.inf
        return self._used.deadline(self._waits, self._timeout)

    def poll_stripes(self, now: float) -> tuple[Poll, list[Told]]:
        """Which stripes are silent by now, which are to be asked, and what is lost with them: that says
        nothing of the other stripes' rate."""
        due = self._used.poll(now, self._waits, self._timeout)
        gone = [self.stripes[stripe].give_up() for stripe in due.questions if not self.used(stripe)]
        self.lost += sum(told.lost_count for told in gone)
        if gone:
            self._set_timeout()
        return due, gone

    @property
    def _waits(self) -> list[float]:
        return [sent.waits_since for sent in self.stripes]

    def handle_timeout(self, now: float) -> list[tuple[int, int, int]]:
        """It has been; returns stripe, transfer and item of what is longest on its way."""
        self.timeouts += 1
        self._progress = now
        self.probes = PROBES
        if self.timeouts > 1:  # one alone is a lost tail, and no sign of the path's rate
            self.control.handle_timeout(now)
        self._set_timeout()
        oldest = [
            (stripe, sent.oldest_in_flight()) for stripe, sent in enumerate(self.stripes) if self.used(stripe)
        ]
        return [(stripe, *found) for stripe, found in oldest if found is not None]

    def _set_timeout(self) -> None:
        if not self.bytes:
            self.timeout_at = math.inf
            return
        timeout = self._timeout
        last = max(self._progress, *(sent.last_sent for sent in self.stripes))
        rare = PROBES * self._size / (PROBE_SHARE * self.control.estimate)
        longest = max(min(rare, LONGEST_TIMEOUT), timeout)
        self.timeout_at = last + min(timeout * 2.0 ** min(self.timeouts, 16), longest)

    @property
    def _timeout(self) -> float:
        trip = self.control.trip
        return trip.smoothed + max(TIMEOUT_VARIATIONS * trip.variation, GRANULARITY) + LATEST_ACK

    def _detect(self, now: float, sent: SentRecords, told: Told) -> None:
        trip = self.control.trip
        sent.detect(now, trip.smoothed, TIMEOUT_VARIATIONS * trip.variation, self.burst, told)
        self.lost += told.lost_count


@dataclass
class Heard:
    """What an Ack, or the time, tells."""

    told: Told
    rtt: float | None = None
    sample: RateSample | None = None
    round_ended: bool = False
    after_silence: bool = False  # several timeouts were before it
    back: bool = False  # the stripe, which was silent, is used again


class KeyPhase:
    """Of a stripe's keys, in this end's direction."""

    def __init__(self, datagram_bytes: int) -> None:
        self.wanted = False
        self._most = PHASE_DATAGRAMS if datagram_bytes <= PHASE_BYTES else PHASE_LARGE_DATAGRAMS
        self._phase = 0
        self._since = 0  # the number of its first datagram
        self._asked = False  # that the other end acknowledge the present phase

    def of(self, sent: SentRecords) -> int:
        """The phase of the next datagram. It changes only once the other end has acknowledged one of the
        present phase, for receivers hold one phase ahead and no more."""
        if self._due(sent) and sent.largest_acked >= self._since:
            self._phase, self._since = (self._phase + 1) & 0xFF, sent.next
            self.wanted = self._asked = False
        return self._phase

    def asks(self, sent: SentRecords) -> bool:
        """Whether something is to go that asks for an acknowledgement: on a stripe with nothing but Acks the
        change would wait for ever."""
        waits = self._due(sent) and sent.largest_acked < self._since <= sent.next - 1
        return waits and not sent.in_flight and not self._asked

    def handle_asked(self) -> None:
        """It goes, and again until it is acknowledged."""
        self._asked = True

    def _due(self, sent: SentRecords) -> bool:
        return self.wanted or sent.next - self._since >= self._most
