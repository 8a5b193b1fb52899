"""Properties of adaptive limits: between their bounds, above what is usual, and they follow what changes."""

from __future__ import annotations

import statistics

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.peers.pace import Limit

SECONDS = st.floats(1e-4, 100.0)


@settings(max_examples=60)
@given(st.lists(SECONDS, max_size=100), st.floats(1e-3, 1.0), st.floats(1.0, 50.0))
def test_a_limit_is_between_its_bounds_and_above_twice_the_median(
    measured: list[float], low: float, factor: float
) -> None:
    limit = Limit("an answer", low, low * factor)
    for each in measured:
        limit.note(each)
        assert low <= limit.seconds <= low * factor
    if len(measured) >= 4:
        usual = 2 * statistics.median(measured[-64:])
        assert limit.seconds >= min(usual * (1 - 1e-9), low * factor)


@settings(max_examples=60)
@given(st.floats(0.01, 1.0), st.floats(2.0, 10.0), st.integers(0, 100))
def test_a_limit_follows_a_network_that_becomes_slower_and_faster_again(
    usual: float, slower: float, before: int
) -> None:
    """What is cut off at the limit counts as having taken that long, and still the limit comes to rise."""
    limit = Limit("an answer", 1e-3, 1000.0)
    for _ in range(4 + before):
        limit.note(usual)
    for _ in range(64 * 6):
        limit.note(min(usual * slower, limit.seconds))
    assert limit.seconds >= 2 * usual * slower * (1 - 1e-9)
    for _ in range(64):
        limit.note(usual)
    assert limit.seconds <= 2.01 * usual


def test_nothing_is_cut_short_before_enough_was_measured() -> None:
    limit = Limit("an answer", 0.01, 5.0)
    for _ in range(3):
        limit.note(0.004)
    assert limit.seconds == 5.0
    assert limit.reason() == "an answer: 5.0 s, the most allowed, for only 3 of 4 were measured"


def test_a_limit_says_why() -> None:
    limit = Limit("an answer", 0.001, 5.0)
    for node in range(5):
        limit.note(0.004, node % 3)
    said = "an answer: 8.0 ms; the median of the latest 5, at 3 nodes, is 4.0 ms, the deviation 0.5 ms"
    assert limit.reason() == said


def test_a_limit_at_a_bound_says_so() -> None:
    least, most = Limit("an answer", 0.1, 5.0), Limit("an answer", 0.1, 0.2)
    for _ in range(5):
        least.note(0.004)
        most.note(1.0)
    assert least.reason().endswith("and 100.0 ms is the least allowed")
    assert most.reason().endswith("and 200.0 ms is the most allowed")
