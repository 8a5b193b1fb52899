"""What a node lacks, and when it asks for it."""

from __future__ import annotations

from atoll.peers.fetching import Fetching
from atoll.peers.pace import Limit
from atoll.wire.peers import Key
from atoll.wire.peerviews import Life

NODE, OTHER = Life(1, 1), Life(2, 1)
LIMIT = 1.0


def key(number: int, life: Life = NODE) -> Key:
    return Key("iterations", number, life)


def fetching(*missing: Key) -> Fetching:
    made = Fetching(Limit("a contribution's way", LIMIT, LIMIT, start=LIMIT))
    made.update(0.0, missing)
    return made


def test_what_has_not_come_in_its_time_is_asked_of_each_in_turn() -> None:
    it = fetching(key(5))
    assert it.poll(0.9, lambda _: [1, 3]) == {}
    assert it.poll(LIMIT, lambda _: [1, 3]) == {1: [key(5)]}
    assert it.deadline == 2 * LIMIT
    assert it.poll(2 * LIMIT, lambda _: [1, 3]) == {3: [key(5)]}


def test_what_is_behind_others_of_its_node_on_a_slow_link_is_not_asked_for() -> None:
    """Three that take 0.8 s each, all noticed at once: the last comes after 2.4 s and was never asked for."""
    it = fetching(key(5), key(6), key(7))
    for number, now in ((5, 0.8), (6, 1.6), (7, 2.4)):
        assert it.poll(now, lambda _: [1]) == {}
        it.handle_arrived(now, key(number))
    assert it.asked == 0


def test_what_comes_in_pieces_holds_back_what_is_behind_it_and_nothing_else() -> None:
    it = fetching(key(5), key(6), key(4), key(6, OTHER))
    it.handle_arriving(0.9, key(5))
    assert it.poll(LIMIT, lambda _: [1]) == {1: [key(4), key(6, OTHER)]}
    assert it.deadline == 0.9 + LIMIT


def test_when_nothing_comes_any_more_it_is_asked_for() -> None:
    it = fetching(key(5), key(6))
    it.handle_arrived(0.8, key(5))
    assert it.poll(1.7, lambda _: [1]) == {}
    assert it.poll(1.8, lambda _: [1]) == {1: [key(6)]}
