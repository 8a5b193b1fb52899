"""Probes for more: "up", when the rate is at the estimate already. Source:
docs/ltp-rates.md, "The rate table".

A probe is one round above the estimate. What it did is known two rounds later: if the delivery rate grew
with it, the next one follows at once and is greater; if not, it has built a queue, which is paid back, and
the next one waits. By how much the rate grew tells the sender's share of the path: of a step up, others'
share is what arrives.
"""

from __future__ import annotations

import numpy as np

PROBE = 0.05  # of the path: the queue that a first probe leaves is a twentieth of a round trip
MOST_PROBE = 0.25  # above the estimate: the probing gain, which "up" never passes (BBR's 1.25)
PROBE_ROUNDS = 8  # from a probe that found nothing to the next (BBR's cycle), and by chance up to twice as
# many: flows that see the same queue would else probe together, and then none sees its own rate grow
ANSWER_ROUNDS = 2  # until a probe's packets have come and been counted
GREW = 0.5  # of a probe's step, by which the delivery rate must have grown for the next to follow at once
PAY_BACK = 0.025  # below the estimate, for at most PROBE_ROUNDS, to empty a queue too small to drain at once
LEAST_SHARE = 0.1  # of the path, that a sender takes for its own


class Probing:
    """One session's. Rounds are counted by the caller; rates in bytes per second."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._began = 0  # the round of the last probe
        self._wait = PROBE_ROUNDS
        self._step = PROBE
        self._before = 0.0  # the estimate when it began
        self._rising = False  # the last probe found more
        self.found = 0  # probes in a row that did
        self.asked = False  # a probe is under way
        self.pay_back = 0  # rounds left
        self.share = 1.0  # of the path

    @property
    def gain_meanwhile(self) -> float:
        """While a probe is under way: one that follows another stays up."""
        return 1.0 + self._step if self._rising else 1.0

    @property
    def gain_to_pay_back(self) -> float:
        """Each pays for its share of the queue."""
        return 1.0 - PAY_BACK * self.share

    def restart(self, now_round: int) -> None:
        """The path has just come to be known."""
        self._began = now_round

    def may_begin(self, now_round: int) -> bool:
        return now_round >= self._began + (ANSWER_ROUNDS if self._rising else self._wait)

    def begin(self, now_round: int, estimate: float, greatest: bool) -> float:
        """The gain to probe by. What a probe leaves in the queue is its step times the sender's share of the
        path: so small shares take greater steps, by which flows come to equal shares."""
        follows = self._rising or greatest
        self._step = MOST_PROBE if follows else min(MOST_PROBE, PROBE / self.share)
        self._began, self._before, self.asked = now_round, estimate, True
        return 1.0 + self._step

    def end_round(self, now_round: int, rate: float, limited: bool) -> None:
        """`rate`: delivered in the round that ended; `limited`: by the application."""
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
        """Something stronger happened: loss, or a queue to be drained."""
        self.asked, self._rising, self.pay_back, self.found = False, False, 0, 0
