"""Probes above the estimate: the rate table's "up" at full rate. Source: docs/ltp-rates.md, "The rate table".

A probe is one round above the estimate. Its effect is known two rounds later. If the delivery rate grew, a
larger probe follows at once. If not, the probe has built a queue, which is paid back, and the next one waits.
The growth also shows the sender's share of the path, since other senders' share of a step is what still
arrives.
"""

from __future__ import annotations

import numpy as np

PROBE = 0.05  # of the path: a first probe leaves a queue of a twentieth of a round trip
MOST_PROBE = 0.25  # above the estimate: the largest step (BBR's gain of 1.25)
# Rounds between fruitless probes (BBR's cycle), by chance up to twice as many: flows that share a queue must
# not probe together, or none sees its own rate grow.
PROBE_ROUNDS = 8
ANSWER_ROUNDS = 2  # rounds until a probe's packets have arrived and been counted
GREW = 0.5  # of a probe's step: least growth of the delivery rate for the next probe to follow at once
PAY_BACK = 0.025  # below the estimate, for at most PROBE_ROUNDS: empties a queue too small to drain at once
LEAST_SHARE = 0.1  # of the path: the least share that a sender assumes for itself


class Probing:
    """The probes of one session. The caller counts rounds; rates in bytes per second."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._began = 0  # the round of the last probe
        self._wait = PROBE_ROUNDS
        self._step = PROBE
        self._before = 0.0  # estimate at the probe's start
        self._rising = False  # the last probe found more
        self.found = 0  # successful probes in a row
        self.asked = False  # a probe is under way
        self.pay_back = 0  # rounds of paying back that are left
        self.share = 1.0  # this sender's share of the path, estimated

    @property
    def gain_meanwhile(self) -> float:
        """Gain while a probe's effect is unknown: a follow-up probe keeps the rate up."""
        return 1.0 + self._step if self._rising else 1.0

    @property
    def gain_to_pay_back(self) -> float:
        """Gain while a queue is paid back: each sender drains its share."""
        return 1.0 - PAY_BACK * self.share

    def restart(self, now_round: int) -> None:
        """Count the wait for the first probe from this round."""
        self._began = now_round

    def may_begin(self, now_round: int) -> bool:
        return now_round >= self._began + (ANSWER_ROUNDS if self._rising else self._wait)

    def begin(self, now_round: int, estimate: float, greatest: bool) -> float:
        """Begin a probe; return its gain.

        A probe leaves its step times the sender's share of the path in the queue. Small shares can so take
        larger steps, which brings flows to equal shares.
        """
        follows = self._rising or greatest
        self._step = MOST_PROBE if follows else min(MOST_PROBE, PROBE / self.share)
        self._began, self._before, self.asked = now_round, estimate, True
        return 1.0 + self._step

    def end_round(self, now_round: int, rate: float, limited: bool) -> None:
        """Judge the probe if its answer is due.

        Args:
            rate: delivered in the round that ended.
            limited: the application limited that round.
        """
        if not self.asked or now_round < self._began + ANSWER_ROUNDS:
            return
        self.asked = False
        if limited:
            return
        grew = (rate / self._before - 1.0) / self._step
        self.share += (min(1.0, max(LEAST_SHARE, 1.0 - grew)) - self.share) / 2
        self._rising = grew >= GREW
        self.found = self.found + 1 if self._rising else 0
        if not self._rising:
            self.pay_back = PROBE_ROUNDS
            self._wait = int(self._rng.integers(PROBE_ROUNDS, 2 * PROBE_ROUNDS + 1))

    def stop(self) -> None:
        """Cancel probing for a stronger signal: loss, or a queue to drain."""
        self.asked, self._rising, self.pay_back, self.found = False, False, 0, 0
