"""The rate table: how a path's loss changes the rate. Source: docs/ltp-rates.md, "The rate table".

The rows exclude each other: each states its whole condition, so a missing row leaves a hole and no wrong
answer. `atoll.ltp.control` defines the size of "up" and "halved", and the conditions that precede the table
(a queue, a grant).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Action: TypeAlias = Literal["up", "held", "halved"]

QUIET_ROUNDS = 4  # "several" round trips without loss in a row: those of the recent loss
# Standard deviations by which a loss must exceed a share to count as above it. The test runs every round
# trip; by chance a path that loses just that share exceeds three in one of a few hundred.
SURE = 4.0
LEAST_LOST = 3  # lost packets for a rate of loss


@dataclass(frozen=True)
class PathLoss:
    """The path's loss over the last few round trips, in packets; restored ones count as lost."""

    lost: int
    counted: int  # arrived or lost
    quiet_rounds: int  # rounds without loss, in a row
    target: float
    fill_above: float
    own: float = 0.0  # the path's own loss, which does not depend on the rate
    burst: float = 1.0  # mean packets lost in a row

    @property
    def loss(self) -> float:
        """Loss beyond the path's own."""
        return max(0.0, self.lost / self.counted - self.own) if self.counted else 0.0

    @property
    def above_fill(self) -> bool:
        return surely_above(self.lost, self.counted, self.own + self.fill_above, self.burst)


@dataclass(frozen=True)
class Row:
    """A row: its condition, its effect on the rate, and why."""

    seen: str
    action: Action
    holds: Callable[[PathLoss], bool]
    reason: str


TABLE: tuple[Row, ...] = (
    Row(
        "no loss for several round trips in a row",
        "up",
        lambda seen: not seen.lost and seen.quiet_rounds >= QUIET_ROUNDS,
        "nothing shows that the path is full",
    ),
    Row(
        "no loss, not yet for so long",
        "held",
        lambda seen: not seen.lost and seen.quiet_rounds < QUIET_ROUNDS,
        "what the last change of the rate did is not yet known",
    ),
    Row(
        "loss, at or below the target",
        "up",
        lambda seen: seen.lost > 0 and seen.loss <= seen.target and not seen.above_fill,
        "so much loss serves: it costs less than the rate it comes with",
    ),
    Row(
        "loss above the target, up to the fill threshold",
        "held",
        lambda seen: seen.loss > seen.target and not seen.above_fill,
        "more loss would not serve, and this much is still borne",
    ),
    Row(
        "loss above the fill threshold",
        "halved",
        lambda seen: seen.above_fill,
        "more is lost than can be borne",
    ),
)


def decide(seen: PathLoss, table: Sequence[Row] = TABLE) -> Row:
    """Return the row that holds. Raises LookupError if none does: the table has a hole."""
    for row in table:
        if row.holds(seen):
            return row
    raise LookupError(f"no row of the rate table holds for {seen}")


def surely_above(lost: int, counted: int, share: float, burst: float = 1.0) -> bool:
    """Return True if the loss rate is above `share`, beyond chance (a score test of `SURE`).

    A plain comparison would halve the rate every other time on a path that loses exactly the fill threshold,
    and for a single lost packet of a few.
    """
    return lost >= LEAST_LOST and lost / counted > share + SURE * deviation(share, counted, burst)


def deviation(share: float, counted: int, burst: float) -> float:
    """Return the standard deviation of the lost share of `counted` packets.

    `share` is the mean loss, in bursts of `burst` packets (a Gilbert chain: a burst is one event).
    """
    correlated = max(2.0 * burst * (1.0 - share) - 1.0, 1.0)
    return math.sqrt(share * (1.0 - share) * correlated / counted)
