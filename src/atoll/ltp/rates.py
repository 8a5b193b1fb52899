"""The rate table: what the path's loss means for the rate. Source: docs/ltp-rates.md,
"The rate table".

The rows exclude each other: each says all of what it needs, so that a row left out leaves a hole and not
another row's answer. What "up" and "halved" come to, and what stands above the table (a queue, a grant), is
`atoll.ltp.control`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Action: TypeAlias = Literal["up", "held", "halved"]

QUIET_ROUNDS = 4  # "several" round trips without loss in a row: as many as the loss is taken over
# Standard deviations that a loss must lie above a share to count as above it: it is asked every round trip,
# and by chance a path that loses just that share would be above three in one of a few hundred.
SURE = 4.0
LEAST_LOST = 3  # lost packets of which a rate of loss is spoken at all


@dataclass(frozen=True)
class Seen:
    """The path's loss over the last few round trips, in packets, repaired ones counted as lost."""

    lost: int
    counted: int  # that came or were lost
    quiet_rounds: int  # without a loss, in a row
    target: float
    fill_above: float
    own: float = 0.0  # what the path is known to lose at any rate: it says nothing of the rate
    burst: float = 1.0  # packets lost in a row, at the mean

    @property
    def loss(self) -> float:
        """Beyond the path's own."""
        return max(0.0, self.lost / self.counted - self.own) if self.counted else 0.0

    @property
    def above_fill(self) -> bool:
        return surely_above(self.lost, self.counted, self.own + self.fill_above, self.burst)


@dataclass(frozen=True)
class Row:
    """One row: when it holds, what it does to the rate, and why."""

    seen: str
    action: Action
    holds: Callable[[Seen], bool]
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


def decide(seen: Seen, table: Sequence[Row] = TABLE) -> Row:
    """The row that holds. Raises LookupError where none does: the table has a hole."""
    for row in table:
        if row.holds(seen):
            return row
    raise LookupError(f"no row of the rate table holds for {seen}")


def surely_above(lost: int, counted: int, share: float, burst: float = 1.0) -> bool:
    """Whether so many lost mean a rate of loss above `share`, and not chance (a score test of `SURE`).

    Without it a path that loses exactly the fill threshold at random would be halved every other time, and a
    few packets on their way would be halved for one of them.
    """
    return lost >= LEAST_LOST and lost / counted > share + SURE * deviation(share, counted, burst)


def deviation(share: float, counted: int, burst: float) -> float:
    """The standard deviation of the share that is lost of so many packets, where `share` is lost at the mean,
    in bursts of so many (a Gilbert chain: of so many packets a burst is one event)."""
    correlated = max(2.0 * burst * (1.0 - share) - 1.0, 1.0)
    return math.sqrt(share * (1.0 - share) * correlated / counted)
