"""The replay window: each number is taken once, at its edges, over its wrap and its jumps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from atoll.ltp.replay import WINDOW_BITS, ReplayWindow


def numbers(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def take(window: ReplayWindow, *values: int) -> list[bool]:
    """As the engine does where all seals are good."""
    fresh = window.fresh(numbers(*values))
    taken = window.mark(numbers(*values))
    assert not (taken & ~fresh).any()
    return taken.tolist()


def test_a_number_is_taken_once() -> None:
    window = ReplayWindow()
    assert window.highest == -1
    assert take(window, 0, 1, 2) == [True] * 3
    assert take(window, 2, 3, 0, 1) == [False, True, False, False]
    assert window.fresh(numbers(3, 4)).tolist() == [False, True]
    assert window.highest == 3


def test_of_two_in_one_burst_the_first_is_taken() -> None:
    window = ReplayWindow(64)
    assert take(window, 5, 5, 7, 5, 7, 6) == [True, False, True, False, False, True]
    assert take(window, 5, 6, 7) == [False] * 3


def test_a_forgery_before_the_genuine_one_takes_nothing_from_it() -> None:
    window = ReplayWindow(64)
    burst = numbers(9, 9)
    assert window.fresh(burst).tolist() == [True, True]
    good = np.array([False, True])  # as the seals say
    assert window.mark(burst[good]).tolist() == [True]
    assert not window.fresh(burst).any()


def test_a_forgery_moves_nothing() -> None:
    window = ReplayWindow(64)
    take(window, 10)
    window.fresh(numbers(2**61))
    window.mark(numbers())
    assert window.highest == 10
    assert take(window, 9) == [True]


def test_the_edge() -> None:
    window = ReplayWindow()
    take(window, WINDOW_BITS + 10)
    assert window.fresh(numbers(10, 11, 12)).tolist() == [False, True, True]
    assert take(window, 11) == [True]
    assert take(window, 11) == [False]
    assert take(window, WINDOW_BITS + 11) == [True]
    assert window.fresh(numbers(11, 12)).tolist() == [False, True]


def test_an_early_window_has_nothing_below_zero() -> None:
    window = ReplayWindow(64)
    assert take(window, 63, 0) == [True, True]
    assert take(window, 64, 0, 1) == [True, False, True]


@pytest.mark.parametrize("jump", [1, 31, 32, 33, 63, 64, 65, 2**40])
def test_a_jump_forgets_what_it_leaves_and_keeps_the_rest(jump: int) -> None:
    window = ReplayWindow(64)
    before = numbers(*range(100, 164, 3))
    window.mark(before)
    top = int(before[-1])
    take(window, top + jump)
    for number in range(top + jump - 70, top + jump + 2):
        expected = number > top + jump - 64 and number not in before and number != top + jump
        assert window.fresh(numbers(number)).tolist() == [expected], number


def test_a_burst_that_jumps_past_its_own_start() -> None:
    window = ReplayWindow(64)
    assert take(window, 1, 2, 2**40) == [True, True, True]  # each was fresh when the burst came
    assert take(window, 1, 2, 2**40, 2**40 - 1, 2**40 - 64) == [False, False, False, True, False]


@pytest.mark.parametrize("bits", [64, 1000, WINDOW_BITS])
def test_it_is_as_a_set_of_numbers(bits: int) -> None:
    rng = np.random.default_rng(bits)
    window, seen, highest = ReplayWindow(bits), set[int](), -1
    at = 0
    for _ in range(400):
        at += int(
            rng.choice([1, 7, bits // 3, bits - 1, bits, 3 * bits], p=[0.5, 0.3, 0.1, 0.05, 0.03, 0.02])
        )
        burst = at + rng.integers(-bits - 3, 40, size=int(rng.integers(1, 80)))
        burst = burst[burst >= 0].astype(np.uint64)
        expected = []
        for number in burst.tolist():
            expected.append(number not in seen and number > highest - bits)
            seen.add(number)
        unseen = window.fresh(burst)
        assert window.mark(burst).tolist() == expected
        assert (unseen | ~np.array(expected, bool)).all()
        highest = max([highest, *burst.tolist()])
        # What is old is refused, whether it came or not.
        seen.update(range(max(highest - bits - 50, 0), max(highest - bits + 1, 0)))
    assert window.highest == highest
