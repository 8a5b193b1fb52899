"""The target loss rate: synthetic paths whose optimum is known, and paths that do not tell."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.ltp.target import HISTORY, LEAST_HISTORY, Target

SAFE, MOST = 0.01, 0.03
RTT = 0.04


def feed(target: Target, losses, throughput, delay, *, noise: float = 0.0, seed: int = 1) -> Target:
    rng = np.random.default_rng(seed)
    for loss in losses:
        target.handle_observation(
            float(loss),
            throughput(loss) * (1 + noise * rng.standard_normal()),
            delay(loss) * (1 + noise * rng.standard_normal()),
            RTT,
        )
    return target


def losses(low: float, high: float, count: int = 64, seed: int = 2):
    return np.random.default_rng(seed).uniform(low, high, count)


@pytest.mark.parametrize("optimum", [0.004, 0.01, 0.018, 0.025])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_parabola_s_optimum_is_found(optimum, noise):
    """Throughput is a parabola whose top is at `optimum`, delay is flat: so the score's is there too."""
    target = Target(MOST if optimum < 0.015 else 0.0, MOST)
    feed(target, losses(0, 0.03), lambda p: 1e8 * (1 - 1500 * (p - optimum) ** 2), lambda p: RTT, noise=noise)
    assert target.choice.fitted, target.choice.reason
    assert target.choice.value == pytest.approx(optimum, abs=0.0005 if not noise else 0.003)


def test_a_line_over_a_line_has_its_optimum_at_an_end():
    """Throughput rises slowly with loss, delay quickly: the least loss serves best."""
    target = feed(Target(SAFE, MOST), losses(0, 0.03), lambda p: 1e8 * (1 + p), lambda p: RTT * (1 + 30 * p))
    assert target.choice.fitted
    assert target.choice.value == pytest.approx(losses(0, 0.03).min(), abs=0.004)
    target = feed(Target(SAFE, MOST), losses(0, 0.03), lambda p: 1e8 * (1 + 30 * p), lambda p: RTT * (1 + p))
    assert target.choice.fitted
    assert target.choice.value == pytest.approx(np.quantile(losses(0, 0.03), 0.9), abs=0.001)


def test_a_quotient_s_optimum_is_found():
    """Throughput 1 + 60 p, delay 1 + 1000 p^2 (times constants): the derivative is 0 at p = 0.0190."""
    target = feed(
        Target(0.001, MOST), losses(0, 0.03), lambda p: 1e8 * (1 + 60 * p), lambda p: RTT * (1 + 1000 * p * p)
    )
    optimum = (-1 + np.sqrt(1 + 60**2 / 1000)) / 60
    assert target.choice.value == pytest.approx(optimum, abs=0.002)


def test_it_never_passes_the_fill_threshold():
    target = feed(Target(SAFE, MOST), losses(0, 0.2), lambda p: 1e8 * (1 + 30 * p), lambda p: RTT)
    assert target.choice.fitted
    assert target.choice.value == MOST
    assert Target(0.05, MOST).choice.value == MOST
    target = feed(Target(SAFE, MOST), losses(0.04, 0.2), lambda p: 1e8 * (1 + 30 * p), lambda p: RTT)
    assert (target.choice.value, target.choice.fitted) == (SAFE, False)
    assert "above 3.00% all the time" in target.choice.reason


def stays(target: Target, why: str) -> None:
    assert (target.choice.value, target.choice.fitted) == (SAFE, False)
    assert target.choice.reason.startswith("the safe value: ")
    assert why in target.choice.reason


def test_too_few_observations_or_too_narrow_a_range_leave_the_safe_value():
    def throughput(p):
        return 1e8 * (1 + 30 * p)

    target = Target(SAFE, MOST)
    stays(target, "nothing was seen")
    stays(feed(target, losses(0, 0.03, LEAST_HISTORY - 1), throughput, lambda p: RTT), "nothing was seen")
    stays(feed(Target(SAFE, MOST), losses(0.01, 0.014), throughput, lambda p: RTT), "too narrow a range")
    stays(feed(Target(SAFE, MOST), np.zeros(64), throughput, lambda p: RTT), "too narrow a range")


def test_outliers_leave_the_safe_value():
    rng = np.random.default_rng(3)

    def throughput(p):
        return 1e8 * (1 + 30 * p) * (0.2 if rng.uniform() < 0.15 else 1 + 0.01 * rng.standard_normal())

    stays(feed(Target(SAFE, MOST), losses(0, 0.03), throughput, lambda p: RTT), "outliers")


def test_a_path_that_does_not_depend_on_loss_leaves_the_safe_value():
    target = feed(Target(SAFE, MOST), losses(0, 0.03), lambda p: 1e8, lambda p: RTT, noise=0.05)
    stays(target, "no other loss rate serves clearly better")


def test_a_changed_path_begins_anew():
    target = feed(Target(SAFE, MOST), losses(0, 0.03), lambda p: 1e8 * (1 + 30 * p), lambda p: RTT)
    assert target.choice.fitted
    target.handle_observation(0.01, 1e8, 0.1, RTT * 1.2)  # within what hosts' jitter does
    assert target.choice.fitted
    target.handle_observation(0.01, 1e8, 0.1, RTT * 2)
    stays(target, "the path has changed: the least round trip changed")
    feed(target, losses(0, 0.03), lambda p: 1e8 * (1 + 30 * p), lambda p: RTT)
    target.handle_path_change("another address")
    stays(target, "another address")


def test_nonsense_is_not_taken_and_the_history_is_bounded():
    target = Target(SAFE, MOST)
    for _ in range(100):
        target.handle_observation(2.0, 1e8, RTT, RTT)
        target.handle_observation(0.01, 0.0, RTT, RTT)
    stays(target, "nothing was seen")
    feed(target, losses(0, 0.03, 2 * HISTORY), lambda p: 1e8 * (1 + 30 * p), lambda p: RTT)
    assert len(target._history) == HISTORY
