"""Rules whose removal no other test of their module sees: each was found by removing it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.ltp.closing import Seen as Came
from atoll.ltp.closing import decide as close
from atoll.ltp.filling import LastValues
from atoll.ltp.rates import Seen, decide
from atoll.ltp.settings import Settings
from atoll.ltp.target import Target

WHOLE = Came(
    highs=10,
    highs_there=10,
    lows=100,
    lows_there=97,
    passed=True,
    grace_over=False,
    deadline_over=False,
    early_said=True,
    need_over=False,
)
RTT = 0.04


# -- the rate table ----------------------------------------------------------------------------------------


def test_loss_above_the_fill_threshold_is_halved_whatever_the_target() -> None:
    """A target above the threshold does not make the row of small losses hold beside that of large ones."""
    row = decide(Seen(lost=300, counted=1000, quiet_rounds=0, target=0.5, fill_above=0.03))
    assert row.action == "halved"


def test_of_nothing_nothing_is_lost() -> None:
    assert Seen(lost=0, counted=0, quiet_rounds=0, target=0.01, fill_above=0.03).loss == 0.0


# -- early close -------------------------------------------------------------------------------------------


def test_nothing_is_asked_for_once_every_high_block_is_there() -> None:
    assert close(replace(WHOLE, lows_there=50, passed=False, need_over=True), Settings()).name == "wait"


def test_the_reasons_say_which_half_of_a_rule_held() -> None:
    assert "the rest passed by" in close(WHOLE, Settings()).reason
    assert "not come in its time" in close(replace(WHOLE, passed=False, grace_over=True), Settings()).reason
    assert close(replace(WHOLE, lows_there=100), Settings()).reason == "every block there (110)"


# -- filling -----------------------------------------------------------------------------------------------


def test_last_values_of_another_length_are_forgotten() -> None:
    last = LastValues()
    last.keep(0, np.ones(6, np.float32), np.ones(3, bool), 2)
    last.keep(0, np.full(4, 5, np.float32), np.array([True, False]), 2)
    assert last.of(0) is not None
    np.testing.assert_array_equal(last.of(0), [5, 5, 0, 0])


# -- the target's safe value -------------------------------------------------------------------------------


def observed(losses: np.ndarray, throughput: np.ndarray, delay: np.ndarray) -> Target:
    target = Target(0.01, 0.03)
    for loss, rate, late in zip(losses, throughput, delay, strict=True):
        target.handle_observation(float(loss), float(rate), float(late), RTT)
    return target


SPREAD = np.random.default_rng(2).uniform(0.0, 0.03, 64)


@pytest.mark.parametrize("which", ["throughput", "delay"])
def test_a_fit_that_is_not_positive_leaves_the_safe_value(which: str) -> None:
    """What falls to nothing early is below nothing in the middle of the parabola through it."""
    falls, flat = np.exp(-400 * SPREAD), np.ones(len(SPREAD))
    target = observed(SPREAD, 1e8 * (falls if which == "throughput" else flat),
                      RTT * (falls if which == "delay" else flat))  # fmt: skip
    assert target.choice.value == 0.01
    assert "not positive" in target.choice.reason


def test_two_rates_of_loss_alone_can_be_fitted() -> None:
    """A parabola through two points is none: the ridge keeps its coefficients small, and the line is taken."""
    losses = np.tile([0.0, 0.02], 32)
    target = observed(losses, 1e8 * (1 + 10 * losses), np.full(64, RTT))
    assert target.choice.fitted
    assert target.choice.value == pytest.approx(0.02, abs=1e-4)


def test_a_line_is_taken_where_a_parabola_explains_no_more() -> None:
    """With noise on a line, a parabola bends: its top would be inside of the range, the line's is its end."""
    ends = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        noise = 1 + 0.02 * rng.standard_normal(64)
        target = observed(SPREAD, 1e8 * (1 + 8 * SPREAD) * noise, np.full(64, RTT))
        ends.append(target.choice.fitted and target.choice.value >= np.quantile(SPREAD, 0.9) - 1e-9)
    assert sum(ends) >= 15


def test_a_path_that_changes_by_small_steps_is_another_in_the_end() -> None:
    """The least round trip of all is what the next one is compared with, not the one before."""
    target = observed(SPREAD, 1e8 * (1 + 30 * SPREAD), np.full(64, RTT))
    assert target.choice.fitted
    for step in (1.1, 1.2, 1.3):
        target.handle_observation(0.01, 1e8, RTT, RTT * step)
    assert "the path has changed" in target.choice.reason


@pytest.mark.parametrize(
    ("loss", "throughput", "delay"), [(-0.01, 1e8, RTT), (1.01, 1e8, RTT), (0.01, -1.0, RTT), (0.01, 1e8, 0.0)]
)
def test_each_sort_of_nonsense_is_not_taken(loss: float, throughput: float, delay: float) -> None:
    target = Target(0.01, 0.03)
    for _ in range(100):
        target.handle_observation(loss, throughput, delay, RTT)
    assert target.choice.reason == "the safe value: nothing was seen yet"
