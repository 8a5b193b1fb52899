"""The rules by which a receiver hands a transfer on: each row holds, and is missed where it is not there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.ltp.closing import RULES, TransferState, decide, least
from atoll.ltp.settings import LtpSettings

NOTHING = TransferState(
    highs=10,
    highs_there=0,
    lows=100,
    lows_there=0,
    passed=False,
    grace_over=False,
    deadline_over=False,
    early_said=False,
    need_over=False,
)
WHOLE = replace(NOTHING, highs_there=10)
SETTINGS = LtpSettings()
NEAR = LtpSettings(close_high=0.8)

CASES = [
    ("complete", replace(WHOLE, lows_there=100), SETTINGS),
    ("enough", replace(WHOLE, lows_there=97, passed=True, early_said=True), SETTINGS),
    ("enough", replace(WHOLE, lows_there=99, grace_over=True, early_said=True), SETTINGS),
    ("deadline", replace(WHOLE, lows_there=50, deadline_over=True), SETTINGS),
    ("deadline", replace(WHOLE, deadline_over=True), SETTINGS),
    ("early", replace(WHOLE, lows_there=97), SETTINGS),
    ("early", replace(NOTHING, highs_there=8, lows_there=100), NEAR),
    ("need", replace(NOTHING, highs_there=9, lows_there=100, need_over=True), SETTINGS),
]
WAITS = [
    (replace(WHOLE, lows_there=96, passed=True, grace_over=True), SETTINGS),  # not usable
    (replace(WHOLE, lows_there=97, early_said=True), SETTINGS),  # usable, but the rest may still come
    (replace(NOTHING, highs_there=9, lows_there=100, deadline_over=True, grace_over=True), SETTINGS),
    (replace(NOTHING, highs_there=9, lows_there=100), SETTINGS),
    (replace(NOTHING, highs_there=7, lows_there=100), NEAR),
    (replace(NOTHING, highs_there=8, lows_there=96), NEAR),
    (replace(NOTHING, highs_there=8, lows_there=100, early_said=True), NEAR),
    (NOTHING, SETTINGS),
]


@pytest.mark.parametrize(("name", "seen", "settings"), CASES)
def test_each_rule_holds_and_is_missed(name: str, seen: TransferState, settings: LtpSettings) -> None:
    verdict = decide(seen, settings)
    assert verdict.name == name
    assert verdict.reason
    without = tuple(rule for rule in RULES if rule.name != name)
    assert decide(seen, settings, without).name != name


@pytest.mark.parametrize(("seen", "settings"), WAITS)
def test_what_fits_no_rule_waits(seen: TransferState, settings: LtpSettings) -> None:
    assert decide(seen, settings).name == "wait"


def test_nothing_is_handed_on_without_every_high_block() -> None:
    seen = replace(
        NOTHING,
        highs_there=9,
        lows_there=100,
        passed=True,
        grace_over=True,
        deadline_over=True,
        need_over=True,
    )
    for settings in (SETTINGS, NEAR, LtpSettings(usable=0.0, close_high=0.0)):
        assert not decide(seen, settings).hands_on


def test_nothing_is_asked_for_once_every_high_block_is_there() -> None:
    assert decide(replace(WHOLE, lows_there=50, early_said=True, need_over=True), SETTINGS).name == "wait"


def test_the_reasons_say_which_half_of_a_rule_held() -> None:
    near = replace(WHOLE, lows_there=97, early_said=True)
    assert "the rest passed by" in decide(replace(near, passed=True), SETTINGS).reason
    assert "not come in its time" in decide(replace(near, grace_over=True), SETTINGS).reason
    assert decide(replace(near, lows_there=100), SETTINGS).reason == "every block there (110)"


def test_a_share_of_blocks_is_rounded_up() -> None:
    assert [least(0.97, 100), least(0.97, 96), least(1.0, 7), least(0.0, 7), least(0.5, 0)] == [
        97,
        94,
        7,
        0,
        0,
    ]
