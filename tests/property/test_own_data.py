"""Loops over workers' own data of any lengths end together, and give each batch once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.train.data.moredata import MoreData
from atoll.train.data.owndata import OwnData

lengths = st.lists(st.integers(1, 12), min_size=1, max_size=6)


@given(lengths, st.data())
def test_loops_end_together_and_give_each_batch_once(lengths: list[int], data: st.DataObject) -> None:
    """Workers in step; after each batch an iteration may tell the answer, else all workers ask."""
    made = 0  # batches that every loop has given

    def ask(_own: bool) -> bool:
        return any(length > made for length in lengths)

    told = [MoreData() for _ in lengths]
    loops = [
        OwnData(more, ask=ask, unsent=lambda: False, check=lambda: None, together=True).epoch(range(length))
        for more, length in zip(told, lengths, strict=True)
    ]
    seen: list[list[int]] = [[] for _ in lengths]
    weighs: list[list[int]] = [[] for _ in lengths]  # the batches that count
    while True:
        given_now = [next(loop, None) for loop in loops]
        if None in given_now:
            assert set(given_now) == {None}
            break
        for worker, batch in enumerate(given_now):
            assert batch is not None
            seen[worker].append(batch)
            if not told[worker].repeats:
                weighs[worker].append(batch)
        made += 1
        assert [more.has_more for more in told] == [length > made for length in lengths]
        if data.draw(st.booleans()):
            answer = any(more.has_more for more in told)
            for more in told:
                more.hear(answer)
    assert made == max(lengths)
    for worker, length in enumerate(lengths):
        assert weighs[worker] == list(range(length))
        assert seen[worker] == [*range(length), *[length - 1] * (max(lengths) - length)]
    assert not any(more.has_more or more.repeats for more in told)


@given(lengths)
def test_an_iteration_that_tells_spares_the_call(lengths: list[int]) -> None:
    asked: list[int] = []
    told = [MoreData() for _ in lengths]

    def ask_of(worker: int):  # type: ignore[no-untyped-def]
        def ask(_own: bool) -> bool:
            asked.append(worker)
            return True

        return ask

    loops = [
        OwnData(more, ask=ask_of(worker), unsent=lambda: False, check=lambda: None, together=True).epoch(
            range(length)
        )
        for worker, (more, length) in enumerate(zip(told, lengths, strict=True))
    ]
    while None not in [next(loop, None) for loop in loops]:
        answer = any(more.has_more for more in told)
        for more in told:
            more.hear(answer)
    assert asked == list(range(len(lengths)))  # once, as the epoch begins
