"""What a loader was given, and how much of it backwards have reached: as if counted from the beginning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.train.data.given import GivenBatches

STEPS = st.lists(
    st.tuples(st.sampled_from(["give", "give", "count", "again"]), st.integers(0, 5)), max_size=40
)


def used_of(sizes: list[int], consumed: int) -> int:
    """How many whole batches so many samples are; a fill is one."""
    used = 0
    while used < len(sizes) and consumed >= max(1, sizes[used]):
        consumed -= max(1, sizes[used])
        used += 1
    return used


@given(STEPS, st.lists(st.integers(0, 4), max_size=4), st.data())
def test_batches_are_used_in_the_order_in_which_they_were_given(
    steps: list[tuple[str, int]], before: list[int], data: st.DataObject
) -> None:
    batches, sizes = GivenBatches(), list(before)
    first = data.draw(st.integers(0, len(before)))
    batches.begin(before, first)
    consumed = sum(max(1, size) for size in before[:first])
    for what, number in steps:
        if what == "count":
            at = used_of(sizes, consumed)
            weighs = float(number) if at >= len(sizes) or sizes[at] else 0.0
            assert batches.count(number, len(sizes)) == weighs
            consumed += number
        else:
            place = len(sizes) if what == "give" else min(number, len(sizes))
            batches.give(number, place)
            sizes = [*sizes[:place], number]
        used = used_of(sizes, consumed)
        assert batches.consumed == consumed
        assert [batches.used(given) for given in range(len(sizes) + 1)] == [
            min(used, given) for given in range(len(sizes) + 1)
        ]
        assert batches.next_sizes(len(sizes)) == (
            {float(max(1, sizes[used]))} if used < len(sizes) else set()
        )
    count = used_of(sizes, consumed)
    batches.use_up(count)
    assert batches.sizes() == sizes[count:]
    assert batches.used(len(batches)) == 0
