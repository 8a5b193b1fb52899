"""Bearing and filling: each row of the decision table, and what it does to arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from atoll.ltp.filling import How, LastValues, apply, choose_filling
from atoll.ltp.settings import Fill

BLOCK = 3
VALUES = np.arange(1.0, 12.0, dtype=np.float32)  # 4 blocks, the last of 2
OLD = -VALUES
PRESENT = np.array([True, False, True, False])
HIGH = np.array([True, False, False, False])


@pytest.mark.parametrize(
    ("lost", "fill", "has_last", "how", "said"),
    [
        (0, "zero", True, "none", "every block"),
        (0, "rescale", True, "none", "every block"),
        (3, "zero", True, "borne", "3 of 100 low-priority blocks lost, at most 0.03"),
        (3, "last", True, "borne", "borne"),
        (3, "rescale", True, "borne", "borne"),
        (4, "zero", True, "zero", "more than 0.03"),
        (4, "last", True, "last", "last values"),
        (4, "last", False, "zero", "never before"),
        (4, "rescale", True, "rescaled", "times 1.042"),
        (100, "rescale", True, "zero", "none to rescale"),
        (100, "last", True, "last", "last values"),
    ],
)
def test_each_row_of_the_table(lost: int, fill: Fill, has_last: bool, how: How, said: str) -> None:
    chosen = choose_filling(lost, 100, fill=fill, fill_above=0.03, has_last=has_last)
    assert chosen.how == how
    assert said in chosen.reason
    assert chosen.counts == (how in ("zero", "last", "rescaled"))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("borne", [1, 2, 3, 0, 0, 0, 7, 8, 9, 0, 0]),
        ("zero", [1, 2, 3, 0, 0, 0, 7, 8, 9, 0, 0]),
        ("last", [1, 2, 3, -4, -5, -6, 7, 8, 9, -10, -11]),
        ("rescaled", [1, 2, 3, 0, 0, 0, 21, 24, 27, 0, 0]),  # one of three low-priority blocks is there
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_what_takes_the_lost_blocks_places(how: How, expected: list[float], dtype: type) -> None:
    values = VALUES.astype(dtype)
    values[3:6] = np.nan  # new memory may hold anything
    values[9:] = np.nan
    apply(how, values, PRESENT, HIGH, BLOCK, OLD.astype(dtype))
    assert values.tolist() == expected
    assert values.dtype == dtype


def test_nothing_lost_leaves_all_as_it_is() -> None:
    values = VALUES.copy()
    apply("none", values, np.ones(4, bool), HIGH, BLOCK)
    np.testing.assert_array_equal(values, VALUES)


def test_the_short_block_is_rescaled_too() -> None:
    values = VALUES.copy()
    apply("rescaled", values, np.array([True, True, False, True]), HIGH, BLOCK)
    assert values.tolist() == [1, 2, 3, 6, 7.5, 9, 0, 0, 0, 15, 16.5]


def test_rescaling_is_unbiased() -> None:
    """Over all ways to lose so many low-priority blocks, each element's mean is its value."""
    values = np.random.default_rng(0).standard_normal(17)
    high = np.array([False, True, False, False, True, False])
    low = np.flatnonzero(~high)
    for lost in range(len(low)):
        total, ways = np.zeros(17), 0
        for gone in itertools.combinations(low, lost):
            present = np.ones(6, bool)
            present[list(gone)] = False
            received = values.copy()
            apply("rescaled", received, present, high, 3)
            total += received
            ways += 1
        np.testing.assert_allclose(total / ways, values, rtol=1e-12)


def test_bytes_can_be_filled_and_bfloat16_not_rescaled() -> None:
    halves = np.arange(11, dtype=np.uint16)
    apply("zero", halves, PRESENT, HIGH, BLOCK)
    assert halves.tolist() == [0, 1, 2, 0, 0, 0, 6, 7, 8, 0, 0]
    with pytest.raises(TypeError, match="make it float32 first"):
        apply("rescaled", halves, PRESENT, HIGH, BLOCK)


@pytest.mark.parametrize("last", [None, OLD[:-1], OLD.astype(np.float64)])
def test_last_values_that_do_not_fit_are_refused(last: np.ndarray | None) -> None:
    with pytest.raises(ValueError, match="same length and type"):
        apply("last", VALUES.copy(), PRESENT, HIGH, BLOCK, last)


def test_last_values_are_those_that_came() -> None:
    kept = LastValues()
    assert kept.of(7) is None
    kept.keep(7, VALUES, PRESENT, BLOCK)
    assert kept.of(7).tolist() == [1, 2, 3, 0, 0, 0, 7, 8, 9, 0, 0]  # type: ignore[union-attr]
    kept.keep(7, 2 * VALUES, ~PRESENT, BLOCK)
    assert kept.of(7).tolist() == [1, 2, 3, 8, 10, 12, 7, 8, 9, 20, 22]  # type: ignore[union-attr]
    assert kept.of(8) is None
    kept.keep(7, np.ones(11), PRESENT, BLOCK)  # another type: anew
    assert kept.of(7).tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0]  # type: ignore[union-attr]
    kept.forget()
    assert kept.of(7) is None


def test_last_values_take_no_more_than_their_bytes() -> None:
    kept = LastValues(2.5 * VALUES.nbytes)
    for chunk in range(4):
        kept.keep(chunk, VALUES, PRESENT, BLOCK)
    assert [kept.of(chunk) is not None for chunk in range(4)] == [True, True, False, False]
    kept.keep(0, np.ones(3 * len(VALUES), dtype=VALUES.dtype), np.ones(12, bool), BLOCK)
    assert kept.of(0) is None
    kept.keep(3, VALUES, PRESENT, BLOCK)
    assert kept.of(3) is not None


def test_last_values_are_a_copy() -> None:
    kept, values = LastValues(), VALUES.copy()
    kept.keep(7, values, np.ones(4, bool), BLOCK)
    values[:] = 0
    np.testing.assert_array_equal(kept.of(7), VALUES)
