"""How long silence is borne: `store/silence.py`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.store.silence import BEATS, DEVIATIONS, WINDOW, Patience

FLOOR, CEILING = 3.5, 10.0
gaps = st.floats(0, 1e6)
bounds = st.tuples(st.floats(0.01, 100), st.floats(0.01, 100))


def after(gaps: list[float], floor: float = FLOOR, ceiling: float = CEILING) -> float:
    patience = Patience(floor, ceiling)
    for gap in gaps:
        patience.note(gap)
    return patience.seconds


@given(st.lists(st.one_of(gaps, st.just(float("inf")))), bounds)
def test_within_floor_and_ceiling(gaps: list[float], bounds: tuple[float, float]) -> None:
    floor, ceiling = bounds
    assert min(floor, ceiling) <= after(gaps, floor, ceiling) <= ceiling


@given(
    st.lists(st.floats(0.9, 1.1), min_size=WINDOW // 2 + 1, max_size=WINDOW // 2 + 1),
    st.lists(gaps, max_size=WINDOW // 2 - 1),
    st.randoms(use_true_random=False),
)
def test_outliers_fewer_than_half_do_not_matter(usual: list[float], outliers: list[float], random) -> None:
    mixed = usual + outliers
    random.shuffle(mixed)
    # The median lies among the usual gaps, and more than half are no farther from it than those are apart.
    assert after(mixed, floor=0.1, ceiling=1e9) <= BEATS * 1.1 + DEVIATIONS * 0.2 + 1e-9
    assert after(mixed, floor=0.1, ceiling=1e9) >= BEATS * 0.9 - 1e-9


@given(st.lists(gaps, max_size=3 * WINDOW), st.floats(0.1, 4.0))
def test_a_new_rhythm_is_learnt(before: list[float], rhythm: float) -> None:
    """After a window of it, nothing of what was before is left; after more than half of one, hardly."""
    whole = after([*before, *[rhythm] * WINDOW], floor=0.01, ceiling=1e9)
    assert whole == pytest.approx(BEATS * rhythm)
    half = after([*before, *[rhythm] * (WINDOW // 2 + 1)], floor=0.01, ceiling=1e9)
    assert half == pytest.approx(BEATS * rhythm)


@given(st.lists(gaps, min_size=1, max_size=WINDOW), st.floats(0.01, 100))
def test_it_scales_with_its_unit(gaps: list[float], scale: float) -> None:
    scaled = after([gap * scale for gap in gaps], 1e-12 * scale, 1e12 * scale)
    assert scaled == pytest.approx(after(gaps, 1e-12, 1e12) * scale)


def test_what_the_hub_sees() -> None:
    assert Patience(FLOOR, CEILING).seconds == CEILING  # nothing is known: as patient as may be
    assert after([1.0]) == FLOOR
    assert after([1.0] * 50) == FLOOR  # a stop of 3 s is borne, a death is known within 3.5 s
    assert after([1.0] * 50 + [3.2] + [1.0]) == FLOOR
    assert after([2.5] * 40) == 5.0
    assert after([1.0, 5.0] * 40) == CEILING  # as irregular as that: as patient as may be
    assert Patience(FLOOR, 1.0).seconds == 1.0  # a person's word, below the floor
    assert after([0.1] * 9, FLOOR, 1.0) == 1.0


@pytest.mark.parametrize(("floor", "ceiling"), [(0, 1), (1, 0), (-1, 2), (float("nan"), 1)])
def test_bounds_that_are_none(floor: float, ceiling: float) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        Patience(floor, ceiling)


@pytest.mark.parametrize("gap", [-0.1, float("nan")])
def test_a_gap_that_is_none(gap: float) -> None:
    with pytest.raises(ValueError, match="a gap of"):
        Patience(FLOOR, CEILING).note(gap)
