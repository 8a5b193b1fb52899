"""Datagrams in flight over all stripes: room for more, losses, and probe timeouts.

Joins the records of sent datagrams, the measurements from Acks, and the rate. Source: docs/ltp.md, "What is
on its way".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from atoll.ltp.bodies import Items
from atoll.ltp.control import RateControl, RateSample
from atoll.ltp.metering import Meter
from atoll.ltp.sent import GRANULARITY, SentRecords, SettledDatagrams
from atoll.ltp.settings import LtpSettings
from atoll.ltp.stripes import Poll, Stripes
from atoll.wire.datagrams import Acknowledgement

BURST_SECONDS = 0.002  # of the rate in one burst, at most
MOST_LATE = 0.01  # seconds of the rate that may be caught up with after a late timer
IDLE_SECONDS = 0.02  # with nothing in flight: longer than a pause between bursts
LATEST_ACK = 0.025  # seconds that the receiver's thread may delay an Ack (RFC 9000, 18.2)
LONGEST_TIMEOUT = 1.0  # seconds, the longest probe timeout: bounds how late a blackout's end is noticed
PROBES = 2  # datagrams that a probe timeout sends past rate and window (RFC 9002, 6.2.4)
PROBE_SHARE = 1e-3  # of the estimated rate: the timeout is not doubled beyond probes of this share
TIMEOUT_VARIATIONS = 4  # (RFC 6298)
# Datagrams: measures 1 % of loss to a sixth, and lets a short transfer use the ones before it.
LOSS_MEMORY = 2**12
# Datagrams of a stripe sealed with one key, up to PHASE_BYTES long: an attacker's advantage stays below 2^-57
# (RFC 9001, 6.6 and B.1).
PHASE_DATAGRAMS, PHASE_BYTES = 2**28, 2**11
PHASE_LARGE_DATAGRAMS = 2**23  # for longer datagrams


class Flights:
    """The datagrams in flight of one end."""

    def __init__(self, settings: LtpSettings, stripes: int, rng: np.random.Generator, now: float) -> None:
        self.control = RateControl(settings, now, rng)
        self.stripes = [SentRecords() for _ in range(stripes)]
        self.phases = [KeyPhase(settings.datagram_bytes) for _ in range(stripes)]
        self.lost = 0  # datagrams
        self.burst_length = 1.0  # mean datagrams lost in a row
        self.loss = 0.0  # of the path, by the last LOSS_MEMORY datagrams or so
        self._loss_datagrams = 0.0  # datagrams behind `loss`
        self.timeouts = 0  # in a row
        self.probes = 0  # datagrams that may go past rate and window
        self._meter = Meter()
        self.timeout_at = math.inf  # time of the next probe timeout
        self._progress = now
        self._size = settings.datagram_bytes
        self._used = Stripes(stripes)

    @property
    def likely_loss(self) -> float:
        """Loss of the path plus a standard deviation: missing parity costs a round trip."""
        varies = self.loss * (1.0 - self.loss) * max(2.0 * self.burst_length - 1.0, 1.0)
        return min(self.loss + math.sqrt(varies / max(self._loss_datagrams, 1.0)), 1.0)

    @property
    def bytes(self) -> int:
        """Bytes in flight on the stripes in use."""
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
        """Datagrams that may still be sent."""
        return max((self.control.in_flight_limit - self.bytes) // self._size, self.probes)

    def add(self, now: float, stripe: int, transfer: int, items: Items, size: int) -> int:
        """Record a burst that is sent now; return its first number."""
        idle = not self.bytes and now > max(sent.last_sent for sent in self.stripes) + IDLE_SECONDS
        first = self.stripes[stripe].add(now, transfer, items, size, self._meter.mark(idle))
        self._set_timeout()
        return first

    def phase(self, stripe: int) -> int:
        """Return the key phase of the next datagram."""
        return self.phases[stripe].of(self.stripes[stripe])

    def key_asks(self, stripe: int) -> bool:
        """Return True if a change of keys waits for an acknowledgement that no datagram asks for."""
        return self.phases[stripe].asks(self.stripes[stripe])

    def handle_limited(self) -> None:
        """Note that there is too little to send for the rate."""
        self._meter.handle_limited(self.bytes)

    def handle_ack(self, now: float, ack: Acknowledgement) -> Heard:
        """Take in an Ack."""
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
        """Yield the losses that follow from time alone."""
        for sent in self.stripes:
            if now >= sent.loss_at:
                told = SettledDatagrams()
                self._detect(now, sent, told)
                if told.lost_count:
                    yield Heard(told)

    def settle(self, now: float, heard: Heard) -> None:
        """Report acknowledged and lost datagrams to the rate control."""
        told = heard.told
        counted = told.acked_count + told.lost_count
        if not counted:
            return
        if not heard.after_silence:  # losses of an outage say nothing of the path
            self._loss_datagrams = min(self._loss_datagrams + counted, max(LOSS_MEMORY, counted))
            self.loss += (told.lost_count - self.loss * counted) / self._loss_datagrams
            if told.lost_count:
                self.burst_length += (told.lost_count / told.runs - self.burst_length) / 8
        self.control.handle_ack(
            now,
            rtt=heard.rtt,
            sample=heard.sample,
            acked=told.acked_count,
            lost=told.lost_count,
            in_flight=self.bytes,
            round_ended=heard.round_ended,
            runs=told.runs,
        )
        self._set_timeout()

    @property
    def loss_at(self) -> float:
        """Time at which `poll_lost` may yield something."""
        return min(sent.loss_at for sent in self.stripes)

    @property
    def waits_since(self) -> float:
        """Earliest time since which a used stripe with datagrams in flight had no acknowledgement; else
        inf."""
        return min(
            (sent.waits_since for stripe, sent in enumerate(self.stripes) if self.used(stripe)),
            default=math.inf,
        )

    def used(self, stripe: int) -> bool:
        """Return True if the stripe carries more than questions."""
        return self._used.used(stripe)

    @property
    def stripes_at(self) -> float:
        """Time at which `poll_stripes` may have something."""
        if len(self.stripes) == 1:
            return math.inf
        return self._used.deadline(self._waits, self._timeout)

    def poll_stripes(self, now: float) -> tuple[Poll, list[SettledDatagrams]]:
        """Return the stripes to question or to stop using, and the datagrams lost with silent ones.

        These losses say nothing of the other stripes' rate.
        """
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
        """Handle a probe timeout; return (stripe, transfer, item) of each stripe's oldest datagram in
        flight."""
        self.timeouts += 1
        self._progress = now
        self.probes = PROBES
        if self.timeouts > 1:  # a single one is a lost tail, and says nothing of the path's rate
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

    def _detect(self, now: float, sent: SentRecords, told: SettledDatagrams) -> None:
        trip = self.control.trip
        sent.detect(now, trip.smoothed, TIMEOUT_VARIATIONS * trip.variation, self.burst, told)
        self.lost += told.lost_count


@dataclass
class Heard:
    """Effects of an Ack, or of passing time."""

    told: SettledDatagrams
    rtt: float | None = None
    sample: RateSample | None = None
    round_ended: bool = False
    after_silence: bool = False  # several timeouts preceded it
    back: bool = False  # a silent stripe is back in use


class KeyPhase:
    """Key phase of one stripe in this end's direction."""

    def __init__(self, datagram_bytes: int) -> None:
        self.wanted = False
        self._most = PHASE_DATAGRAMS if datagram_bytes <= PHASE_BYTES else PHASE_LARGE_DATAGRAMS
        self._phase = 0
        self._since = 0  # number of the phase's first datagram
        self._asked = False  # a datagram that asks for the acknowledgement was sent

    def of(self, sent: SentRecords) -> int:
        """Return the phase of the next datagram.

        The phase changes only after the other end acknowledged a datagram of the present one: receivers keep
        one phase ahead and no more.
        """
        if self._due(sent) and sent.largest_acked >= self._since:
            self._phase, self._since = (self._phase + 1) & 0xFF, sent.next
            self.wanted = self._asked = False
        return self._phase

    def asks(self, sent: SentRecords) -> bool:
        """Return True if a Ping must go out so that keys can change.

        A stripe that carries only Acks would never be acknowledged.
        """
        waits = self._due(sent) and sent.largest_acked < self._since <= sent.next - 1
        return waits and not sent.in_flight and not self._asked

    def handle_asked(self) -> None:
        """Note that the Ping was sent; the outbox resends it until it is acknowledged."""
        self._asked = True

    def _due(self, sent: SentRecords) -> bool:
        return self.wanted or sent.next - self._since >= self._most
