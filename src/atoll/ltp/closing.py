"""Rules by which a receiver hands a transfer on, sends Early, or sends Need, as a table.

| row | condition | action |
| --- | --- | --- |
| complete | every block is there | hand on |
| enough | every high block, low ones >= `usable`, the rest passed by or its grace over | hand on |
| deadline | every high block, and the deadline for low ones is over | hand on |
| early | high ones, restorable ones too, >= `close_high`, and low ones >= `usable` | send Early, once |
| need | a high block is missing for longer than the sender takes to notice | send Need |
| wait | none of these | nothing until the next datagram or deadline |

No transfer is handed on while a high block is missing. Source: docs/ltp.md, "The receiver".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from atoll.ltp.settings import LtpSettings
from atoll.wire.linkcontrol import How


@dataclass(frozen=True)
class TransferState:
    """State of a transfer at its receiver. Restored blocks count as there."""

    highs: int
    highs_there: int
    lows: int
    lows_there: int
    passed: bool  # later datagrams passed every missing block by more than the measured reordering
    grace_over: bool  # the missing blocks had time to arrive, by the delivery rate
    deadline_over: bool  # the transfer's expected end is past
    early_said: bool
    need_over: bool  # a missing high block should have been resent by now

    @property
    def whole(self) -> bool:
        """True if every high block is there."""
        return self.highs_there == self.highs

    def usable(self, share: float) -> bool:
        """Return True if at least `share` of the low blocks is there."""
        return self.lows_there >= least(share, self.lows)


@dataclass(frozen=True)
class Rule:
    """A row of the table."""

    name: str
    holds: Callable[[TransferState, LtpSettings], bool]
    reason: Callable[[TransferState, LtpSettings], str]


@dataclass(frozen=True)
class Verdict:
    """The rule that holds, and why."""

    name: str
    reason: str

    @property
    def hands_on(self) -> bool:
        return self.name in ("complete", "enough", "deadline")

    @property
    def how(self) -> How:
        """The rule by which the transfer is handed on."""
        return cast(How, self.name)


def least(share: float, blocks: int) -> int:
    """Return the smallest number of blocks that is at least `share` of them."""
    count = int(share * blocks)
    return count if count >= share * blocks - 1e-9 else count + 1


def _complete(seen: TransferState, _: LtpSettings) -> bool:
    return seen.whole and seen.lows_there == seen.lows


def _enough(seen: TransferState, settings: LtpSettings) -> bool:
    return seen.whole and seen.usable(settings.usable) and (seen.passed or seen.grace_over)


def _deadline(seen: TransferState, _: LtpSettings) -> bool:
    return seen.whole and seen.deadline_over


def _early(seen: TransferState, settings: LtpSettings) -> bool:
    near = seen.highs_there >= least(settings.close_high, seen.highs)
    return near and seen.usable(settings.usable) and not seen.early_said


def _need(seen: TransferState, _: LtpSettings) -> bool:
    return not seen.whole and seen.need_over


def _counts(seen: TransferState) -> str:
    return f"{seen.highs_there} of {seen.highs} high and {seen.lows_there} of {seen.lows} low blocks there"


RULES: tuple[Rule, ...] = (
    Rule("complete", _complete, lambda seen, _: f"every block there ({seen.highs + seen.lows})"),
    Rule(
        "enough",
        _enough,
        lambda seen, settings: (
            f"{_counts(seen)}, usable from {settings.usable:.3g} on, the rest "
            + ("passed by" if seen.passed else "not come in its time")
        ),
    ),
    Rule("deadline", _deadline, lambda seen, _: f"{_counts(seen)}, and the deadline for low ones is over"),
    Rule(
        "early",
        _early,
        lambda seen, settings: f"{_counts(seen)}: enough from {settings.close_high:.3g} of the high ones on",
    ),
    Rule("need", _need, lambda seen, _: f"{_counts(seen)}: high ones were passed by and did not come again"),
)


def decide(seen: TransferState, settings: LtpSettings, rules: tuple[Rule, ...] = RULES) -> Verdict:
    """Return the first row that holds."""
    for rule in rules:
        if rule.holds(seen, settings):
            return Verdict(rule.name, rule.reason(seen, settings))
    return Verdict("wait", _counts(seen))
