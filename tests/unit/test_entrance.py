"""Shard 0 as the mailbox of workers that come late: who is asked, who is answered, how often, and that its
state is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from atoll.server.entrance import Entrance
from atoll.server.logkeeper import KeeperState, LogKeeper
from atoll.server.sitelog import SiteLog
from atoll.wire.messages import Fence, GiveState, WantState, WorkerStand
from support.setups import SETUP


class Peers:
    """What was sent to whom; a peer is named by worker and incarnation."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, Any, Any]] = []

    hub = "hub"

    def worker(self, worker: int, incarnation: int) -> tuple[int, int]:
        return worker, incarnation

    def send(self, peer: Any, message: Any, payload: Any = None) -> None:
        self.sent.append((peer, message, payload))

    def take(self) -> list[tuple[Any, Any, Any]]:
        sent, self.sent = self.sent, []
        return sent


class Above(list[Any]):
    """What the global log is asked and given."""

    ask = list.append

    def give(self, give: GiveState, payload: memoryview | None) -> None:
        self.append((give, payload))

    def meet(self, number: int, what: str, part: bytes, stand: WorkerStand | None) -> None:
        self.append((number, what, part, stand))

    differ = list.append


def made() -> tuple[Peers, Entrance]:
    peers = Peers()
    return peers, Entrance(peers, {})  # type: ignore[arg-type]


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


# -- what a journal's image, or a standby that begins, has to know ----------------------------------------

Event = Callable[[Any], object]


def join(worker: int, life: int) -> Event:
    return lambda keeper: keeper.handle_join(worker, life)


def arrive(worker: int, life: int) -> Event:
    return lambda keeper: keeper.handle_arrive(worker, life)


def want(worker: int, life: int) -> Event:
    return lambda keeper: keeper.handle_want(worker, life, WantState(iteration=7))


def give(worker: int, life: int, meeting: int) -> Event:
    given = GiveState(worker=worker, life=life, meeting=meeting, members=[0, worker])
    return lambda keeper: keeper.handle_give(given, None)


def fence(worker: int, life: int) -> Event:
    return lambda keeper: keeper.handle_fence(Fence(worker=worker, incarnation=life))


def want_from_above() -> Event:
    return lambda keeper: keeper.handle_want_from_above(WantState(iteration=7, worker=1, life=90))


def given_from_above(meeting: int) -> Event:
    given = GiveState(worker=1, life=90, meeting=meeting, members=[0, 1])
    return lambda keeper: keeper.handle_given_from_above(given, None)


BEGUN: list[Event] = [join(0, 1), join(1, 2), lambda keeper: keeper.set_up(SETUP, [0])]
# A newcomer that was given its state lost its connection, and asks again: the next to give it binds it anew.
ASKED_AGAIN = [arrive(2, 3), want(2, 3), give(2, 3, 5), join(2, 3), want(2, 3), give(2, 3, 7)]
# Worker 2 has been asked to give, and wants something itself then: it still gives what it was asked for.
ASKED_TO_GIVE = [
    arrive(2, 3),
    fence(0, 1),
    fence(1, 2),
    arrive(3, 4),
    want(3, 4),
    want(2, 3),
    give(3, 4, 5),
    arrive(4, 5),
    want(2, 3),
    give(2, 3, 6),
]
ALONE = [fence(0, 1), fence(1, 2)]
FROM_ABOVE = [*ALONE, arrive(0, 3), want(0, 3), arrive(1, 4), want(1, 4), given_from_above(6), want(1, 4)]
TO_ABOVE = [
    want_from_above(),
    arrive(2, 3),
    want(2, 3),
    lambda keeper: keeper.handle_give(GiveState(worker=1, life=90, meeting=4, members=[0]), None),
    give(2, 3, 5),
]


def keeper() -> LogKeeper:
    return LogKeeper(2, cast(Any, Peers()), lambda _sequence, _entry: None)


def site_log() -> SiteLog:
    return SiteLog(2, cast(Any, Peers()), lambda _sequence, _entry: None, Above())


@pytest.mark.parametrize(
    ("made", "events"),
    [
        (keeper, ASKED_AGAIN),
        (keeper, ASKED_TO_GIVE),
        (site_log, ASKED_AGAIN),
        (site_log, ASKED_TO_GIVE),
        (site_log, FROM_ABOVE),
        (site_log, [*FROM_ABOVE[:-2], want(0, 3), given_from_above(6), given_from_above(7)]),
        (site_log, TO_ABOVE),
    ],
    ids=["again", "giver", "site again", "site giver", "from above", "from above again", "to above"],
)
def test_a_log_that_goes_on_from_an_image_at_any_point_comes_to_the_same_state(
    made: Callable[[], LogKeeper], events: list[Event]
) -> None:
    for cut in range(len(events) + 1):
        one, other = made(), made()
        for event in [*BEGUN, *events[:cut]]:
            event(one)
        raw = msgspec.msgpack.encode(one.state)
        other.restore(msgspec.msgpack.decode(raw, type=KeeperState), {}, None)
        assert other.state == one.state, f"taken before event {cut}"
        for event in events[cut:]:
            event(one)
            event(other)
            assert other.state == one.state, f"taken before event {cut}"
