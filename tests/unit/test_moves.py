"""The cache's rules one by one, on orders that can be followed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from atoll.moves import Cache, Full, StepStatistics, UseOrder, cache, optimum
from atoll.moves.order import NEVER


def step(cache: Cache[str], uses: Iterable[str], void: Iterable[str] = ()) -> StepStatistics:
    """One step that uses these keys in turn; what is void at its end."""
    for key in uses:
        cache.handle_use(key)
    for key in void:
        cache.forget(key)
    return cache.handle_step_ended()


def brought(cache: Cache[str]) -> list[str]:
    """All that may be prefetched now."""
    found = []
    while decision := cache.poll_prefetch():
        found.append(decision.chunk)
    return found


def among(keys: str) -> Callable[[str], bool]:
    return lambda key: key in keys


# -- who leaves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "leaves", "reason"),
    [
        ("belady", "c", "used now; 'c' is needed again latest, 3 uses from now"),
        ("lru", "b", "used now; 'b' was used least recently"),
        ("fifo", "a", "used now; 'a' came first"),
    ],
)
def test_who_leaves_and_why(policy: cache.Policy, leaves: str, reason: str) -> None:
    made: Cache[str] = Cache(3, policy=policy)
    if policy == "belady":
        step(made, "abcadabc")
    for key in "abca":
        made.handle_use(key)
    decision = made.handle_use("d")
    assert [eviction.chunk for eviction in decision.evict] == [leaves]
    assert decision.reason == reason
    assert decision.place == made.place("d")
    assert made.place(leaves) is None


def test_what_no_step_uses_leaves_first_the_least_recently_used_of_it() -> None:
    made: Cache[str] = Cache(4)
    step(made, "abc")
    for key in "xabc":
        made.handle_use(key)
    assert made.handle_use("y").evict[0].chunk == "x"  # all the rest is needed again
    made = Cache(4)
    step(made, "wxab")
    step(made, "aba")  # of w and x there is nothing in the order now
    made.handle_use("w")
    decision = made.handle_use("c")
    assert decision.evict[0].chunk == "x"
    assert decision.reason == "used now; 'x' is not needed again"


def test_frozen_chunks_are_kept_where_trained_ones_are_void_at_the_end_of_a_step() -> None:
    """By its place in the order t, the first to be used again, would be kept for the next step, in vain."""
    made: Cache[str] = Cache(3)
    step(made, "ftgu", void="tu")
    step(made, "ftgu", void="tu")
    for _ in range(3):
        assert sorted(made.resident) == ["f", "g"]
        assert step(made, "ftgu", void="tu").moves_in == 2
    assert made.order is not None
    assert optimum(made.order, 3, steps=3, resident=["f", "g"]) == [2, 2, 2]


def test_what_is_void_by_the_end_of_a_step_may_change() -> None:
    made: Cache[str] = Cache(2)
    step(made, "abc", void="c")
    assert made.order is not None
    assert made.order.voids == {("c", 3)}
    assert step(made, "abc").unforeseen == 0
    assert made.order.voids == set()
    for key in "abc":
        made.handle_use(key, fresh=key == "b")
    made.handle_step_ended()
    assert made.order.fresh == {1}


# -- what is foreseen --------------------------------------------------------------------------------------


def test_statistics_of_a_step() -> None:
    made: Cache[str] = Cache(2, {"c": 2})
    made.handle_use("a", writes=True)
    made.handle_use("b", fresh=True)
    made.handle_use("a")
    decision = made.handle_use("c")
    assert sorted((each.chunk, each.write_back) for each in decision.evict) == [("a", True), ("b", True)]
    made.handle_use("c", writes=True)
    ended = made.handle_step_ended()
    assert ended == StepStatistics(
        uses=5, hits=2, moves_in=2, blocks_in=3, evictions=2, write_backs=2, blocks_out=2
    )
    assert ended.misses == 3


def test_an_unforeseen_use_is_served_and_the_order_recorded_again() -> None:
    made: Cache[str] = Cache(2)
    assert not step(made, "abcdefghij").planned
    ended = step(made, "abcdxefghij")
    assert (ended.planned, ended.unforeseen, ended.skipped) == (True, 1, 0)
    ended = step(made, "abcdxefghij")
    assert (ended.unforeseen, ended.skipped) == (0, 0)


def test_what_is_left_out_is_skipped_and_the_rest_is_as_foreseen() -> None:
    """An expert that gets no tokens."""
    made: Cache[str] = Cache(4)
    step(made, "abcdefghij")
    ended = step(made, "abcefghij")
    assert (ended.unforeseen, ended.skipped) == (0, 1)
    assert step(made, "abcefghij").skipped == 0


def test_a_step_without_uses_leaves_the_order_as_it_was() -> None:
    made: Cache[str] = Cache(2)
    step(made, "abc")
    made.handle_step_ended()
    assert step(made, "abc").unforeseen == 0
    assert not Cache[str](2).handle_step_ended().planned


def test_a_step_that_is_too_long_to_record_leaves_the_order_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "LONGEST", 4)
    made: Cache[str] = Cache(2)
    step(made, "abcd")
    ended = step(made, "abcdab")
    assert (ended.uses, ended.unforeseen) == (6, 0)
    assert made.order is not None
    assert made.order.uses == tuple("abcd")
    assert step(made, "abcd").unforeseen == 0


# -- ahead of the use --------------------------------------------------------------------------------------


def test_what_comes_next_is_brought_as_soon_as_who_leaves_for_it_has_been_used() -> None:
    made: Cache[str] = Cache(3)
    step(made, "abcdcba")
    assert sorted(made.resident) == ["a", "b", "c"]
    assert brought(made) == []  # for d, a will leave, and it is used before
    made.handle_use("a")
    decision = made.poll_prefetch()
    assert decision is not None
    assert (decision.chunk, decision.bring, [each.chunk for each in decision.evict]) == ("d", True, ["a"])
    assert decision.reason == "used 3 uses from now; 'a' is needed again latest, 6 uses from now"
    for key in "bcd":
        assert brought(made) == []
        assert made.handle_use(key).hit
    assert brought(made) == ["a"]  # in the place of d
    assert [made.handle_use(key).hit for key in "cba"] == [True] * 3
    ended = made.handle_step_ended()
    assert (ended.moves_in, ended.prefetched, ended.misses) == (2, 2, 0)


def test_of_those_not_needed_again_who_is_done_with_first_leaves_for_what_comes_next() -> None:
    made: Cache[str] = Cache(3)
    uses = "abcad"
    for _ in range(2):
        for key in uses:
            made.handle_use(key)
        for key in set(uses):
            made.forget(key)  # the optimizer steps them: none is worth keeping until the next step
        made.handle_step_ended()
    assert brought(made) == ["a", "b", "c"]
    made.handle_use("a")
    assert brought(made) == []
    made.handle_use("b")
    assert brought(made) == ["d"]  # in the place of b, and not of a, which came first and is still to be used
    assert all(made.handle_use(key).hit for key in "cad")


@pytest.mark.parametrize("as_foreseen", [True, False])
def test_what_is_brought_for_the_next_step_is_counted_there_if_that_comes(as_foreseen: bool) -> None:
    made: Cache[str] = Cache(3)
    for _ in range(2):
        for key in "abc":
            made.handle_use(key)
        made.forget("b")
        made.forget("c")
        if made.order is not None:
            assert brought(made) == ["b"]  # for the next step: d is there
        made.handle_use("d")
        if made.order is None:
            made.handle_step_ended()
    assert brought(made) == []  # at the end of a step it might be about to be void
    if not as_foreseen:
        made.handle_use("x")
    assert made.handle_step_ended().moves_in == (2 if as_foreseen else 4)
    assert made.statistics.moves_in == (1 if as_foreseen else 0)


def test_who_is_held_is_not_let_go_for_a_prefetch() -> None:
    made: Cache[str] = Cache(3)
    step(made, "abcabc" + "defdef")
    made.handle_use("a")
    resident = made.resident
    assert made.poll_prefetch(lambda key: True) is None
    assert made.resident == resident
    assert made.poll_prefetch() is not None


def test_what_is_prefetched_and_void_before_its_use_is_brought_again() -> None:
    made: Cache[str] = Cache(3)
    step(made, "abcdef")
    made.forget("d")
    made.forget("e")
    made.forget("f")
    assert brought(made) == ["a", "b", "c"]
    made.forget("b")
    assert brought(made) == ["b"]
    assert [made.handle_use(key).hit for key in "abc"] == [True] * 3


@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_prefetched_that_will_be_void_before_its_use(there: bool) -> None:
    made: Cache[str] = Cache(4)
    for key in "abc":
        made.handle_use(key)
    made.forget("b")
    step(made, "b")
    for key in "abc":
        assert brought(made) == []
        made.handle_use(key)
        if key == "b" and not there:
            made.forget("b")
    assert brought(made) == []
    made.forget("b")
    assert brought(made) == ["b"]


def test_an_unforeseen_use_lets_nobody_leave_that_was_brought_for_soon() -> None:
    made: Cache[str] = Cache(3)
    step(made, "abcdebcf")
    for key in made.resident:
        made.forget(key)
    made.handle_step_ended()
    assert brought(made) == ["a", "b", "c"]  # after these uses it is a that is needed latest
    assert made.handle_use("x").evict[0].chunk == "c"
    assert [made.handle_use(key).hit for key in "ab"] == [True, True]


def test_after_an_unforeseen_use_nothing_is_brought_ahead_until_the_order_is_followed_again() -> None:
    made: Cache[str] = Cache(2)
    order = "abc" * cache.TRUST
    step(made, order)
    assert brought(made) != []
    made.handle_use("x")
    for key in order[: cache.TRUST]:
        assert brought(made) == []
        made.handle_use(key)
    assert brought(made) != []


# -- chunks that take several blocks -----------------------------------------------------------------------


def test_small_chunks_lie_low_and_large_ones_high() -> None:
    made: Cache[str] = Cache(8, {"L": 3, "M": 2})
    for key in "aLbM":
        made.handle_use(key)
    assert [made.place(key) for key in "abLM"] == [0, 1, 5, 3]


def test_of_the_runs_for_a_large_chunk_the_one_that_is_missed_latest_is_cleared() -> None:
    made: Cache[str] = Cache(6, {"L": 3})
    step(made, "abcdefLfbdaec")
    for key in made.resident:
        made.forget(key)
    for place, key in enumerate("abcdef"):
        assert made.handle_use(key).place == place
    decision = made.handle_use("L")
    # The latest needed are c, e, a, d, from the last on: with d there are three in a row, and a stays.
    assert sorted(eviction.chunk for eviction in decision.evict) == ["c", "d", "e"]
    assert decision.place == 2
    assert decision.reason == "used now; 'd' is needed again latest, 3 uses from now"


def test_a_large_chunk_spares_who_lies_beside_it() -> None:
    """L goes first, and with it is more room than M needs."""
    made: Cache[str] = Cache(7, {"L": 3, "M": 2})
    for key in "Labcd":
        made.handle_use(key)
    decision = made.handle_use("M")
    assert [eviction.chunk for eviction in decision.evict] == ["L"]
    assert decision.place == 5


def test_a_use_that_cannot_be_served_changes_nothing_and_says_what_would_do() -> None:
    made: Cache[str] = Cache(4, {"L": 3})
    step(made, "abcdL")
    for key in "abcd":
        made.handle_use(key)
    with pytest.raises(Full) as full:
        made.handle_use("L", held=among("ab"))
    assert full.value.least_blocks == 5
    assert str(full.value) == "'L' needs 3 contiguous blocks, and 2 of 4 blocks are in use: 5 blocks would do"
    assert sorted(made.resident) == list("abcd")
    assert made.handle_use("L").hit is False
    ended = made.handle_step_ended()
    assert (ended.uses, ended.unforeseen, ended.skipped) == (5, 0, 0)


def test_room_in_pieces_is_no_room() -> None:
    made: Cache[str] = Cache(5, {"L": 3})
    for key in "abcde":
        made.handle_use(key)
    with pytest.raises(Full) as full:
        made.handle_use("L", held=among("c"))
    assert full.value.least_blocks == 6  # with one more at the end: d, e and that


def test_a_chunk_that_is_larger_than_the_cache() -> None:
    made: Cache[str] = Cache(2, {"L": 3})
    with pytest.raises(Full) as full:
        made.handle_use("L")
    assert full.value.least_blocks == 3


def test_sizes_may_come_later() -> None:
    sizes: dict[str, int] = {}
    made: Cache[str] = Cache(4, sizes)
    made.handle_use("a")
    sizes["state"] = 3
    made.handle_use("state")
    assert made.handle_use("b").evict != ()


# -- the order and the optimum -----------------------------------------------------------------------------


def test_when_what_a_key_holds_is_needed() -> None:
    order = UseOrder("abab", fresh={3}, voids={("a", 2), ("a", 4)})
    assert order.need_after("a", 0) == NEVER  # void before it is used again
    assert order.need_from("a", 2) == NEVER
    assert order.need_from("a", 2, voided=True) == 2
    assert order.need_after("a", 2) == NEVER
    assert order.need_after("b", 1) == NEVER  # overwritten
    assert order.need_after("b", 3) == 5
    assert order.need_after("c", 0) == NEVER
    assert order.next_in_step("a", 9) == 10
    assert order.next_in_step("a", 11) == NEVER


def test_the_optimum_of_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="'L' takes 3 blocks, and the cache has 2"):
        optimum(UseOrder("aL"), 2, {"L": 3})
    with pytest.raises(ValueError, match="3 resident blocks exceed a cache of 2"):
        optimum(UseOrder("abc"), 2, resident="abc")


def test_the_optimum_in_parts() -> None:
    """Of L two blocks may stay while a is used; a chunk of one piece is brought whole."""
    order = UseOrder("La")
    assert optimum(order, 3, {"L": 3}, steps=3) == [4, 2, 2]
    made: Cache[str] = Cache(3, {"L": 3})
    assert [step(made, "La").blocks_in for _ in range(3)] == [4, 4, 4]
