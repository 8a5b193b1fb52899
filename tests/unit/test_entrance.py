"""Shard 0 as the mailbox of workers that come late: who is asked, who is answered, and how often."""

from __future__ import annotations

from typing import Any

from atoll.server.entrance import Entrance
from atoll.wire.messages import GiveState, WantState


class Peers:
    """What was sent to whom; a peer is named by worker and incarnation."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, Any, Any]] = []

    def worker(self, worker: int, incarnation: int) -> tuple[int, int]:
        return worker, incarnation

    def send(self, peer: Any, message: Any, payload: Any = None) -> None:
        self.sent.append((peer, message, payload))

    def take(self) -> list[tuple[Any, Any, Any]]:
        sent, self.sent = self.sent, []
        return sent


def made() -> tuple[Peers, Entrance]:
    peers = Peers()
    return peers, Entrance(peers)  # type: ignore[arg-type]


GIVEN = GiveState(worker=5, life=50, meeting=3, members=[1, 2, 5])


def test_the_lowest_living_worker_is_asked_and_what_it_gives_is_passed_on() -> None:
    peers, entrance = made()
    entrance.want(5, 50, 7)
    live = {1: 10, 2: 20, 5: 50}
    entrance.look(live, 3)
    assert peers.take() == [((1, 10), WantState(iteration=7, worker=5, life=50), None)]
    entrance.look(live, 3)
    assert peers.take() == []  # once
    state = memoryview(b"state")
    entrance.give(GIVEN, state)
    assert peers.take() == [((5, 50), GIVEN, state)]
    entrance.give(GIVEN, state)
    assert peers.take() == []  # given twice: the first counts


def test_when_the_one_who_was_asked_dies_the_next_is_asked() -> None:
    peers, entrance = made()
    entrance.want(5, 50, 7)
    entrance.look({1: 10, 2: 20, 5: 50}, 3)
    entrance.look({1: 11, 2: 20, 5: 50}, 3)  # it lives again, as another, which knows of nothing
    entrance.look({2: 20, 5: 50}, 3)
    assert [peer for peer, _, _ in peers.take()] == [(1, 10), (1, 11), (2, 20)]


def test_where_nobody_is_left_the_newcomer_is_told_so() -> None:
    peers, entrance = made()
    entrance.want(5, 50, 7)
    entrance.want(6, 60, 7)  # nor can one newcomer give what it has not got
    entrance.look({5: 50, 6: 60}, 3)
    assert peers.take()[0] == ((5, 50), GiveState(worker=5, life=50, meeting=3), None)
    entrance.give(GIVEN, memoryview(b"late"))
    assert ((5, 50), GIVEN) not in [(peer, message) for peer, message, _ in peers.take()]


def test_a_newcomer_that_dies_is_forgotten() -> None:
    peers, entrance = made()
    entrance.want(5, 50, 7)
    entrance.look({1: 10}, 3)
    entrance.give(GIVEN, memoryview(b"state"))
    assert peers.take() == []


def test_one_who_was_asked_and_has_a_new_connection_is_asked_again() -> None:
    peers, entrance = made()
    entrance.want(5, 50, 7)
    live = {1: 10, 2: 20, 5: 50}
    entrance.look(live, 3)
    entrance.ask_again(2, 20)
    entrance.look(live, 3)
    assert len(peers.take()) == 1
    entrance.ask_again(1, 10)
    entrance.look(live, 3)
    assert peers.take() == [((1, 10), WantState(iteration=7, worker=5, life=50), None)]
