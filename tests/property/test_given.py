"""What a loader was given, and how much of it backwards have reached: as if counted from the beginning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.train.data.given import GivenBatches

STEPS = st.lists(
    st.tuples(st.sampled_from(["give", "give", "count", "again"]), st.integers(0, 5)), max_size=40
)


def used_of(sizes: list[int], consumed: int, fill: int) -> int:
    """How many whole batches so many samples are; a fill is `fill`."""
    used = 0
    while used < len(sizes) and consumed >= (sizes[used] or fill):
        consumed -= sizes[used] or fill
        used += 1
    return used


@given(STEPS, st.lists(st.integers(0, 4), max_size=4), st.integers(1, 3), st.data())
def test_batches_are_used_in_the_order_in_which_they_were_given(
    steps: list[tuple[str, int]], before: list[int], fill: int, data: st.DataObject
) -> None:
    batches, sizes = GivenBatches(lambda: fill), list(before)
    first = data.draw(st.integers(0, len(before)))
    batches.begin(before, first)
    consumed = sum(size or fill for size in before[:first])
    for what, number in steps:
        if what == "count":
            at = used_of(sizes, consumed, fill)
            weighs = float(number) if at >= len(sizes) or sizes[at] else 0.0
            assert batches.count(number, len(sizes)) == weighs
            consumed += number
        else:
            place = len(sizes) if what == "give" else min(number, len(sizes))
            assert batches.give(number, place) == (number or fill)
            sizes = [*sizes[:place], number]
        used = used_of(sizes, consumed, fill)
        assert batches.consumed == consumed
        assert [batches.used(given) for given in range(len(sizes) + 1)] == [
            min(used, given) for given in range(len(sizes) + 1)
        ]
        assert batches.next_sizes(len(sizes)) == (
            {float(sizes[used] or fill)} if used < len(sizes) else set()
        )
    count = used_of(sizes, consumed, fill)
    batches.use_up(count)
    assert batches.sizes() == sizes[count:]
    assert batches.used(len(batches)) == 0
