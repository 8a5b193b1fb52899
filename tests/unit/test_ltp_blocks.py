"""Blocks of a chunk and their importance: means, the exact count of high priority, and a derived share."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atoll.ltp.blocks import LEAST_SHARE, MOST_SHARE, Importance, block_count, by_block, mean_abs, share_of


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize(("elements", "block"), [(1, 1), (7, 3), (9, 3), (2, 334), (0, 5), (200_001, 334)])
def test_means_are_the_blocks_own(dtype: type, elements: int, block: int) -> None:
    values = np.random.default_rng(0).standard_normal(elements).astype(dtype)
    means = mean_abs(values, block)
    expected = [np.abs(values[at : at + block].astype(np.float64)).mean() for at in range(0, elements, block)]
    assert means.shape == (block_count(elements, block),)
    np.testing.assert_allclose(means, expected, rtol=1e-5 if dtype != np.float64 else 1e-12)


def test_a_half_precision_mean_does_not_overflow() -> None:
    assert mean_abs(np.full(10, 60000, np.float16), 4).tolist() == [60000.0] * 3


def test_views_write_through() -> None:
    values = np.arange(8.0)[::-1]  # not even contiguous
    full, rest = by_block(values, 3)
    full[1] = -1
    rest[:] = -2
    assert values.tolist() == [7, 6, 5, -1, -1, -1, -2, -2]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint8])
def test_what_cannot_be_reckoned_with_is_refused(dtype: type) -> None:
    with pytest.raises(TypeError, match="only float16, float32 and float64") as raised:
        mean_abs(np.zeros(4, dtype), 2)
    assert ("bfloat16" in str(raised.value)) == (dtype == np.uint16)


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, math.inf, math.nan]), min_size=1, max_size=40),
    st.floats(0, 1),
)
def test_as_many_blocks_are_high_as_asked(means: list[float], share: float) -> None:
    importance = Importance(len(means), 0.5)
    importance.update(means)
    high = importance.high(share)
    wrong = ~np.isfinite(means)
    assert high.sum() == max(share_of(share, len(means)), wrong.sum())
    assert high[wrong].all()
    ranks = np.where(wrong, np.inf, means)
    order = sorted(range(len(means)), key=lambda at: (-ranks[at], at))  # of equal ones the first
    assert set(np.flatnonzero(high)) == set(order[: high.sum()])


def test_a_share_is_rounded_up_and_only_where_it_must() -> None:
    assert [share_of(0.1, blocks) for blocks in (0, 1, 10, 11, 30)] == [0, 1, 1, 2, 3]
    assert share_of(0.0, 7) == 0
    assert share_of(1.0, 7) == 7
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            share_of(share, 7)


def test_means_are_smoothed_and_the_first_counts_in_full() -> None:
    importance = Importance(2, 0.75)
    importance.update([4.0, 0.0])
    assert importance.smoothed.tolist() == [4.0, 0.0]
    importance.update([0.0, 8.0])
    assert importance.smoothed.tolist() == [3.0, 2.0]
    assert importance.high(0.5).tolist() == [True, False]


def test_what_is_not_finite_is_high_once_and_spoils_no_past() -> None:
    importance = Importance(3, 0.5)
    importance.update([4.0, 2.0, math.nan])
    assert importance.high(0.3).tolist() == [False, False, True]
    assert importance.smoothed.tolist() == [4.0, 2.0, 0.0]
    importance.update([4.0, math.inf, 1.0])
    assert importance.high(0.3).tolist() == [False, True, False]
    importance.update([4.0, 2.0, 1.0])
    assert importance.high(0.3).tolist() == [True, False, False]
    assert importance.smoothed.tolist() == [4.0, 2.0, 1.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.05, 1))
@example([5e-324], 0.5)  # a product of them would be 0
@example([1.5e-323, 5e-324], 0.8)  # or too little
def test_a_derived_share_is_the_smallest_that_carries_enough(means: list[float], carried: float) -> None:
    importance = Importance(len(means), 0.0)
    importance.update(means)
    share, reason = importance.derived_share(carried, 0.0, 1.0)
    assert reason
    total = sum(means)
    if total > 0:
        chosen = importance.high(share)
        assert np.array(means)[chosen].sum() / total >= carried * (1 - 1e-9)
        fewer = sorted(means)[::-1][: chosen.sum() - 1]
        assert sum(fewer) / total < carried * (1 + 1e-9)


def test_a_derived_share_stays_within_its_bounds() -> None:
    importance = Importance(100, 0.0)
    assert importance.derived_share()[0] == LEAST_SHARE
    importance.update([100.0] + [0.0] * 99)
    share, reason = importance.derived_share()
    assert share == LEAST_SHARE
    assert "the least share" in reason
    importance.update([1.0] * 100)
    share, reason = importance.derived_share()
    assert share == MOST_SHARE
    assert "the most share" in reason
    importance.update([10.0] * 10 + [0.1] * 90)
    share, reason = importance.derived_share()
    assert share == 0.07
    assert reason.startswith("7 of 100 blocks carry")


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="smoothing"):
        Importance(3, 1.0)
    with pytest.raises(ValueError, match="for 3 blocks"):
        Importance(3).update([1.0, 2.0])
