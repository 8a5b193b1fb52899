"""When a receiver hands a transfer on, says Early, or asks for what it needs: the rules, as a table.

| row | seen | what is done |
| --- | --- | --- |
| complete | every block is there | handed on |
| enough | every high block, low ones >= `usable`, the rest passed by or its grace over | handed on |
| deadline | every high block, and the deadline for low ones is over | handed on |
| early | high ones, restorable ones too, >= `close_high`, and low ones >= `usable` | Early is said, once |
| need | a high block is missing for longer than the sender takes to see it | Need is said |
| wait | none of these | nothing, until the next datagram or the next of these times |

A transfer is never handed on while a high block is missing. Source: docs/ltp.md, "The receiver".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from atoll.ltp.settings import Settings
from atoll.wire.linkcontrol import How


@dataclass(frozen=True)
class Seen:
    """What a receiver has of a transfer. Restored blocks are there."""

    highs: int
    highs_there: int
    lows: int
    lows_there: int
    passed: bool  # every missing block was passed by later datagrams by more than the reordering that is seen
    grace_over: bool  # what is missing had its time, by the delivery rate
    deadline_over: bool  # the expected end of the transfer is past
    early_said: bool
    need_over: bool  # a missing high block should have come again by now

    @property
    def whole(self) -> bool:
        """Whether every high block is there."""
        return self.highs_there == self.highs

    def usable(self, share: float) -> bool:
        """Whether the low blocks that are there are as many as that share of them."""
        return self.lows_there >= least(share, self.lows)


@dataclass(frozen=True)
class Rule:
    """A row of the table."""

    name: str
    holds: Callable[[Seen, Settings], bool]
    reason: Callable[[Seen, Settings], str]


@dataclass(frozen=True)
class Verdict:
    """What is to be done, and why."""

    name: str
    reason: str

    @property
    def hands_on(self) -> bool:
        return self.name in ("complete", "enough", "deadline")

    @property
    def how(self) -> How:
        """By which rule it is handed on."""
        return cast(How, self.name)


def least(share: float, blocks: int) -> int:
    """The least count of blocks that is this share of them."""
    count = int(share * blocks)
    return count if count >= share * blocks - 1e-9 else count + 1


def _complete(seen: Seen, _: Settings) -> bool:
    return seen.whole and seen.lows_there == seen.lows


def _enough(seen: Seen, settings: Settings) -> bool:
    return seen.whole and seen.usable(settings.usable) and (seen.passed or seen.grace_over)


def _deadline(seen: Seen, _: Settings) -> bool:
    return seen.whole and seen.deadline_over


def _early(seen: Seen, settings: Settings) -> bool:
    near = seen.highs_there >= least(settings.close_high, seen.highs)
    return near and seen.usable(settings.usable) and not seen.early_said


def _need(seen: Seen, _: Settings) -> bool:
    return not seen.whole and seen.need_over


def _counts(seen: Seen) -> str:
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


def decide(seen: Seen, settings: Settings, rules: tuple[Rule, ...] = RULES) -> Verdict:
    """The first row that holds."""
    for rule in rules:
        if rule.holds(seen, settings):
            return Verdict(rule.name, rule.reason(seen, settings))
    return Verdict("wait", _counts(seen))
