"""Properties of runs: whatever is cut, joined or left out, each position stays where it is, once."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.train.data.runs import (
    SampleRange,
    cut,
    items_of,
    joined,
    kept,
    merged,
    positions,
    singles,
    ticks_of,
    without,
)

# Runs as they come: they may be empty, overlap, and stand in any order.
ANY = st.lists(
    st.builds(
        lambda epoch, start, size: (epoch, start, start + size),
        st.integers(0, 3),
        st.integers(0, 9),
        st.integers(0, 6),
    ),
    max_size=8,
)


@given(ANY, st.integers(0, 60))
def test_a_cut_gives_the_first_and_the_rest(runs: list[SampleRange], count: int) -> None:
    first, rest = cut(runs, count)
    assert items_of(first) == items_of(runs)[:count]
    assert items_of(rest) == items_of(runs)[count:]
    assert all(start < stop for _, start, stop in (*first, *rest))


@given(ANY)
def test_merged_runs_have_each_position_once_in_order_and_are_as_few_as_can_be(
    runs: list[SampleRange],
) -> None:
    found = merged(runs)
    assert items_of(found) == sorted(set(items_of(runs)))
    assert merged(found) == found
    assert merged(singles(items_of(runs))) == [run for run in found if run[1] < run[2]]
    for one, other in pairwise(found):
        assert one[0] < other[0] or one[2] < other[1], "they could be one"


@given(ANY)
def test_joined_runs_have_the_same_positions(runs: list[SampleRange]) -> None:
    assert set(items_of(joined(runs))) == set(items_of(runs))
    apart = merged(runs)
    pieces = [piece for run in apart for part in cut([run], 2) for piece in part]
    assert [run for run in joined(pieces) if run[1] < run[2]] == [run for run in apart if run[1] < run[2]]


@given(ANY)
def test_what_fills_batches_up_is_never_joined(runs: list[SampleRange]) -> None:
    below = [(-1 - epoch, start, stop) for epoch, start, stop in runs]
    assert joined(below) == below


@given(ANY, ANY)
def test_what_is_without_others_has_none_of_theirs(runs: list[SampleRange], parts: list[SampleRange]) -> None:
    found, gone = without(runs, parts), set(items_of(parts))
    assert items_of(found) == [item for item in items_of(runs) if item not in gone]
    assert all(start < stop for _, start, stop in found)


@given(ANY, st.data())
def test_what_is_kept_are_the_positions_that_are_to_be(runs: list[SampleRange], data: st.DataObject) -> None:
    total = positions(runs)
    keep = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    found = list(kept(runs, torch.tensor(keep, dtype=torch.bool)))
    assert items_of(found) == [item for item, here in zip(items_of(runs), keep, strict=True) if here]
    assert all(start < stop for _, start, stop in found)
    assert positions(found) == sum(keep)


@given(st.integers(0, 1000), st.integers(1, 50), st.booleans())
def test_ticks_take_all_or_whole_batches_alone(count: int, batch: int, drop_last: bool) -> None:
    ticks = ticks_of(count, batch, drop_last=drop_last)
    assert (ticks * batch <= count < (ticks + 1) * batch) if drop_last else 0 <= ticks * batch - count < batch
