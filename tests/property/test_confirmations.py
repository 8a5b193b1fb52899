"""The barrier by which members of a ring confirm: nobody passes before all have come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.train.group.confirmation import steps


@given(world=st.integers(1, 80))
def test_each_member_tells_whom_that_one_hears_and_none_twice(world: int) -> None:
    plans = [steps(rank, world) for rank in range(world)]
    assert len({len(plan) for plan in plans}) == 1
    for rank, plan in enumerate(plans):
        told = [other for step in plan for other in step.told]
        assert len(told) == len(set(told))
        assert rank not in told
        for number, step in enumerate(plan):
            for other in step.told:
                assert rank in plans[other][number].heard
        assert len(told) == sum(len(step.heard) for step in plan)


def test_few_steps_and_few_connections_are_enough() -> None:
    assert [len(steps(0, world)) for world in (1, 2, 4, 5, 16, 17, 64, 65)] == [0, 1, 1, 2, 2, 3, 3, 4]
    assert sum(len(step.told) for step in steps(0, 64)) == 9


@settings(max_examples=60)
@given(world=st.integers(2, 21), rounds=st.integers(1, 3), data=st.data())
def test_nobody_passes_before_all_have_come(world: int, rounds: int, data: st.DataObject) -> None:
    """Members take turns as they are drawn; bytes of a pair stay in order, as on a connection."""
    links: dict[tuple[int, int], deque[int]] = {}
    come, passed = [0] * world, [0] * world  # how many barriers each has come to, and has passed

    def member(rank: int) -> Iterator[bool]:
        """Gives whether it could move."""
        for number in range(rounds):
            come[rank] += 1
            for step in steps(rank, world):
                for other in step.told:
                    links.setdefault((rank, other), deque()).append(number)
                    yield True
                for other in step.heard:
                    while not links.get((other, rank)):
                        yield False
                    assert links[other, rank].popleft() == number
            passed[rank] += 1
            assert min(come) >= passed[rank]
            yield True

    running = {rank: member(rank) for rank in range(world)}
    order = data.draw(st.randoms(use_true_random=False))
    blocked: set[int] = set()
    while running:
        able = [rank for rank in running if rank not in blocked]
        assert able, "they wait for one another for ever"
        rank = order.choice(able)
        moved = next(running[rank], None)
        if moved is None:
            del running[rank]
        blocked = blocked | {rank} if moved is False else set()
    assert passed == [rounds] * world
