"""Loss of a path: recent loss, the path's own loss, and burst length, counted in packets.

Source: docs/ltp-rates.md, "What is measured". The rate table asks for the loss over the last few round trips.
The path's own loss (radio, a bad line) occurs at any rate; it is proven when half of the rate did not lessen
the loss while no queue stood.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, TypeAlias

from atoll.ltp.rates import PathLoss, deviation, surely_above

Verdict: TypeAlias = Literal["", "own", "lessened"]

LOSS_ROUNDS = 4  # round trips of the recent loss
BASE_PACKETS = 1000  # least packets of a span
BASE_SPANS = 32  # spans whose least loss is the base: they cover several probes
BASE_SURE = 2.0  # standard deviations by which the least of so many spans lies below their mean by chance
SURE_SPANS = 8  # spans from which the base may exceed FIRST_BASE: some were sent below the path's rate
FIRST_BASE = 0.03
MOST_BASE = 0.2  # most loss that counts as the path's own
SAME = 0.7  # share of the loss at full rate: half of the rate that leaves so much did not lessen it
MOST_BURST = 16.0  # packets lost in a row as one event: more is an overflow, or an outage
TRIAL_PACKETS = 4000  # packets after which the trial at half of the rate is decided
BURST_KEPT = 0.9  # weight of earlier bursts at each round with loss


class Losses:
    """Packets that arrived and were lost, by round trip."""

    def __init__(self) -> None:
        self.acked = self.lost = 0  # packets of the current round
        self.quiet_rounds = 0
        self.base = 0.0  # least loss of a span: an estimate of the path's own loss
        self._rounds: deque[tuple[int, int]] = deque(maxlen=LOSS_ROUNDS)
        self._spans: deque[tuple[int, int]] = deque(maxlen=BASE_SPANS)  # (lost, counted)
        self._span_acked = self._span_lost = 0
        self._runs = 0
        self._bursts = [0.0, 0.0]  # packets lost, and runs of them
        self._trial: _Trial | None = None
        self.own = 0.0  # proven part of `base`: half of the rate did not lessen it

    def take(self, acked: int, lost: int, runs: int | None = None) -> None:
        """Count packets. `runs`: runs of consecutive lost packets; by default each was lost alone."""
        self.acked += acked
        self.lost += lost
        self._runs += lost if runs is None else runs
        if lost:
            self.quiet_rounds = 0

    def end_round(self, free: bool = True) -> tuple[int, int]:
        """End the round; return its (acked, lost).

        `free`: no queue stood in the round, so its loss bursts are the path's own and no overflow's.
        """
        ended = self.acked, self.lost
        counted = self.acked + self.lost
        if self.lost and free:
            self._bursts = [
                BURST_KEPT * known + new
                for known, new in zip(self._bursts, (self.lost, self._runs), strict=True)
            ]
        if counted:
            self._rounds.append(ended)
            self._span_acked += self.acked
            self._span_lost += self.lost
            self._end_span()
            if not self.lost:
                self.quiet_rounds += 1
        self.acked = self.lost = self._runs = 0
        return ended

    def _end_span(self) -> None:
        counted = self._span_acked + self._span_lost
        if counted >= BASE_PACKETS:
            self._spans.append((self._span_lost, counted))
            share = self._span_lost / counted
            self._span_acked = self._span_lost = 0
        elif not self._spans:
            share = self._span_lost / counted
        else:
            return
        if self._spans:
            share = min(
                lost / of + BASE_SURE * deviation(lost / of, of, self.burst) for lost, of in self._spans
            )
        most = MOST_BASE if len(self._spans) >= SURE_SPANS else max(FIRST_BASE, self.own)
        self.base = min(most, share)
        self.own = min(self.own, self.base)

    @property
    def burst(self) -> float:
        """Mean number of packets lost in a row."""
        lost, runs = self._bursts
        return min(max(lost / runs, 1.0), MOST_BURST) if runs else 1.0

    def recent(self) -> tuple[int, int]:
        """Return (lost, counted) of the last few round trips."""
        lost = sum(each[1] for each in self._rounds) + self.lost
        return lost, lost + sum(each[0] for each in self._rounds) + self.acked

    @property
    def share(self) -> float:
        lost, counted = self.recent()
        return lost / counted if counted else 0.0

    def seen(self, target: float, fill_above: float) -> PathLoss:
        """Return the input of the rate table."""
        lost, counted = self.recent()
        return PathLoss(lost, counted, self.quiet_rounds, target, fill_above, self.own, self.burst)

    def forget(self) -> None:
        """Forget the recent loss, because the rate was changed for it."""
        self._rounds.clear()
        self.acked = self.lost = self.quiet_rounds = self._runs = 0

    def beyond_own(self, lost: int, counted: int) -> bool:
        """Return True if a round lost more than the path's own loss."""
        return lost > 0 and (not self.own or surely_above(lost, counted, self.own, self.burst))

    # The trial: is the loss the path's own?

    def begin_trial(self) -> None:
        """Start a trial: the rate was halved for the loss of the last few rounds."""
        lost, counted = self.recent()
        self._trial = _Trial(lost / counted) if counted else None

    def stop_trial(self) -> None:
        self._trial = None

    def try_round(self, acked: int, lost: int, fill_above: float) -> Verdict:
        """Count a round at half of the rate without a queue; return the verdict, "" while it may be
        chance."""
        trial = self._trial
        if trial is None:
            return ""
        trial.lost += lost
        trial.counted += acked + lost
        share = trial.lost / max(trial.counted, 1)
        sure = trial.counted and surely_above(trial.lost, trial.counted, fill_above, self.burst)
        if not sure and trial.counted < TRIAL_PACKETS:
            return ""
        self._trial = None
        if share < SAME * trial.before or share > MOST_BASE:
            return "lessened"
        self._spans.clear()
        self._spans.append((trial.lost, trial.counted))
        self._span_acked = self._span_lost = 0
        self.base = self.own = share
        return "own"


class _Trial:
    def __init__(self, before: float) -> None:
        self.before = before
        self.lost = self.counted = 0
