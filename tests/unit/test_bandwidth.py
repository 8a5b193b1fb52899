"""What is measured of the path: round trips, losses, and the estimate of its rate."""

from __future__ import annotations

import math

import pytest

from atoll.ltp.bandwidth import (
    MIN_RTT_SECONDS,
    RATE_ROUNDS,
    Bandwidth,
    RateSample,
    Round,
    RoundTrip,
)


def test_round_trips_are_smoothed_as_rfc_6298_says():
    trip = RoundTrip()
    trip.take(0.0, 0.100)
    assert (trip.smoothed, trip.variation) == (0.100, 0.050)
    trip.take(0.1, 0.140)
    assert trip.smoothed == pytest.approx(0.105)
    assert trip.variation == pytest.approx(0.0475)


def test_the_least_round_trip_is_that_of_the_last_ten_seconds():
    trip = RoundTrip()
    for now, rtt in [(0.0, 0.05), (1.0, 0.04), (2.0, 0.06), (3.0, 0.045), (11.0, 0.07)]:
        trip.take(now, rtt)
    assert trip.least == 0.04
    assert trip.age(11.0) == 10.0
    trip.take(1.0 + MIN_RTT_SECONDS + 0.1, 0.08)
    assert trip.least == 0.045
    trip.take(30.0, 0.08)
    assert trip.least == 0.08


def test_what_came_is_corrected_to_no_more_than_was_sent():
    """A round that loses less than the path does at any rate, by chance, has not found more."""
    bandwidth = Bandwidth(1.0)
    bandwidth.take(RateSample(100, 1.0, False, 1.0))
    assert bandwidth.end_round(0.1, loss=0.0)[0] == 100.0
    bandwidth.take(RateSample(90, 1.0, False, 1.0))
    rate, sent, _ = bandwidth.end_round(0.1, loss=0.1)
    assert (rate, sent) == (pytest.approx(100.0), pytest.approx(100.0))
    bandwidth.take(RateSample(60, 1.0, False, 1.0))
    rate, sent, _ = bandwidth.end_round(0.1, loss=0.4)
    assert (rate, sent) == (pytest.approx(60.0 / 0.9), pytest.approx(100.0)), "what was lost was sent as well"


def test_what_the_path_loses_in_bursts_is_missing_by_chance():
    """A round of 1,000 packets on a path that loses 10 % in bursts of 8: 5 % more is nothing."""
    short = round_of(95.0, lost=140)
    assert not short.path_was_limit(100.0, 0.1, 0.04, burst=8.0)
    assert short.path_was_limit(100.0, 0.1, 0.04, burst=1.0)


def round_of(
    rate: float, *, sent: float = 100.0, limited: bool = False, lost: int = 0, queue: float = 0.0
) -> Round:
    return Round(rate, sent, limited, acked=1000 - lost, lost=lost, queue=queue)


def measured(estimate: float = 100.0) -> Bandwidth:
    bandwidth = Bandwidth(1.0)
    bandwidth.raise_to(estimate)
    return bandwidth


def measure(bandwidth: Bandwidth, round_: Round, rounds: int = 1, anew: bool = False) -> float:
    for _ in range(rounds):
        bandwidth.measure(round_, base=0.0, min_rtt=0.04, anew=anew)
    return bandwidth.estimate


def test_a_round_s_rate_is_the_median_of_its_last_third_corrected_for_the_path_s_own_loss():
    bandwidth = Bandwidth(1.0)
    for delivered in (10, 10, 10, 20, 20, 20, 30, 90, 31):
        bandwidth.take(RateSample(delivered, 1.0, False))
    assert bandwidth.end_round(0.0) == (31.0, math.inf, False)
    bandwidth.take(RateSample(90, 1.0, False))
    assert bandwidth.end_round(0.1) == (pytest.approx(100.0), math.inf, False)
    assert bandwidth.end_round(0.0) == (0.0, math.inf, True)
    bandwidth.take(RateSample(50, 1.0, True))
    bandwidth.take(RateSample(0, 1.0, False))
    bandwidth.take(RateSample(50, 0.0, False))
    assert bandwidth.end_round(0.0) == (50.0, math.inf, True)
    bandwidth.take(RateSample(50, 1.0, False, 0.5))
    assert bandwidth.end_round(0.0) == (50.0, 100.0, False)


def test_a_greater_rate_raises_the_estimate_at_once_whoever_limited_it():
    assert measure(measured(), round_of(120.0)) == 120.0
    assert measure(measured(), round_of(120.0, limited=True)) == 120.0


@pytest.mark.parametrize(
    "round_",
    [
        round_of(60.0, limited=True),
        round_of(99.0),
        round_of(50.0, sent=50.0),
        round_of(41.0, sent=50.0),  # the path's own loss, where less is sent than the estimate says
        round_of(50.0, sent=50.0, queue=0.02),  # all came, beside another's queue
        round_of(50.0, sent=math.nan, lost=40),  # sent by two rates, or held up
    ],
    ids=[
        "application",
        "all came",
        "half sent",
        "half sent, some lost",
        "half sent beside a queue",
        "unknown",
    ],
)
def test_what_the_path_did_not_limit_does_not_lower_it(round_):
    assert measure(measured(), round_, 50) == 100.0


@pytest.mark.parametrize(
    "round_",
    [
        round_of(70.0),
        round_of(90.0, lost=100),
        round_of(98.5, queue=0.02),
        round_of(98.5, lost=40),
        round_of(35.0, sent=50.0),
        round_of(60.0, sent=50.0, queue=0.02),
    ],
    ids=["much less came", "less came", "a queue", "loss", "half sent, much less came", "half sent, queued"],
)
def test_what_the_path_limited_lowers_it_after_ten_rounds_or_at_once_when_it_is_taken_anew(round_):
    assert measure(measured(), round_, RATE_ROUNDS - 1) == 100.0
    bandwidth = measured()
    measure(bandwidth, round_, 1)
    assert measure(bandwidth, round_, RATE_ROUNDS) == round_.rate
    at_once = measure(measured(), round_, 1, anew=True)
    assert at_once == (100.0 if round_.lost else round_.rate), "a little more loss may be the path's own"


def test_one_good_round_among_bad_ones_keeps_the_estimate():
    bandwidth = measured()
    for _ in range(10):
        measure(bandwidth, round_of(80.0), RATE_ROUNDS - 1)
        measure(bandwidth, round_of(99.0))
    assert bandwidth.estimate == 100.0
