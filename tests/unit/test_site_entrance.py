"""Late workers of a site where nobody lives, and those whom other sites ask for their state."""

from __future__ import annotations

from typing import Any

from test_entrance import Above, Peers

from atoll.server.entrance import Entrance
from atoll.store.log import CommitLog
from atoll.wire.messages import GiveState, WantState


def made() -> tuple[Peers, Entrance, list[Any]]:
    peers, above = Peers(), Above()
    return peers, Entrance(peers, {}, above), above  # type: ignore[arg-type]


def test_where_nobody_lives_another_site_is_asked_once_for_all_who_come() -> None:
    peers, entrance, above = made()
    entrance.want(5, 50, 7)
    entrance.want(6, 60, 7)
    for _ in range(2):
        entrance.look({5: 50, 6: 60}, 3)
    assert above == [7, 7]
    assert peers.take() == []
    entrance.want(5, 50, 7)  # its connection was lost: what was asked may be, too
    entrance.look({5: 50, 6: 60}, 3)
    assert above == [7, 7, 7]
    state = memoryview(b"state")
    given = entrance.given_from_above(GiveState(worker=1, life=9, meeting=4, members=[2, 1]), state, 3)
    assert given == [
        GiveState(worker=5, life=50, meeting=4, members=[2, 5]),
        GiveState(worker=6, life=60, meeting=4, members=[2, 6]),
    ]
    assert peers.take() == [((5, 50), given[0], state), ((6, 60), given[1], state)]
    assert entrance.given_from_above(GiveState(worker=1, life=9, meeting=4, members=[2, 1]), state, 3) == []


def test_where_nobody_lives_anywhere_the_newcomer_is_told_so() -> None:
    peers, entrance, above = made()
    entrance.want(5, 50, 7)
    entrance.look({5: 50}, 3)
    assert above == [7]
    entrance.given_from_above(GiveState(worker=1, life=9, meeting=0), None, 3)
    assert peers.take() == [((5, 50), GiveState(worker=5, life=50, meeting=3), None)]


def test_another_site_is_given_what_a_living_worker_gives_or_told_that_there_is_none() -> None:
    peers, entrance, above = made()
    entrance.want(1, 9, 7, outside=True)
    live = {0: 10, 2: 20}
    entrance.look(live, 3)
    assert peers.take() == [((0, 10), WantState(iteration=7, worker=1, life=9), None)]
    del live[0]
    entrance.look(live, 3)
    assert peers.take() == [((2, 20), WantState(iteration=7, worker=1, life=9), None)]
    give, state = GiveState(worker=1, life=9, meeting=3, members=[2, 1]), memoryview(b"state")
    assert entrance.give(give, state)
    assert above == [(give, state)]
    assert not entrance.give(give, state)
    entrance.want(1, 9, 8, outside=True)
    entrance.look({}, 3)
    assert above[1:] == [(GiveState(worker=1, life=9, meeting=3), None)]
    assert peers.take() == []


def test_meetings_that_are_over_elsewhere_are_skipped_unless_somebody_is_there() -> None:
    log = CommitLog.begin("asp", 0, 1, 1)
    log.handle_join(0, 1)
    log.meetings.skip_to(4)
    assert log.meetings.next == 4
    log.meetings.skip_to(2)
    assert log.meetings.next == 4
    log.handle_join(1, 2)
    log.handle_entered(1, 2, 4)
    log.handle_meet(0, 1, 4, "here", 1)
    log.meetings.skip_to(6)
    assert log.meetings.next == 4
