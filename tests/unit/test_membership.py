"""The hub's members by example: ranks, incarnations, silence and deaths."""

from __future__ import annotations

from atoll.store.members import Membership


def test_ranks_are_given_and_come_back_with_higher_incarnations() -> None:
    members = Membership(2, patience=5.0)
    first = members.handle_hello(0.0, "worker")
    assert (first.worker, first.incarnation) == (0, 1)
    assert members.handle_hello(0.0, "worker", wish=0).refused == "rank 0 is taken: its worker lives"
    assert members.handle_hello(1.0, "worker", wish=3).worker == 3
    assert members.handle_hello(1.0, "worker").worker == 1
    assert members.roll.next_deadline() == 5.0
    assert members.roll.hear(4.0, 1, iteration=7)
    assert members.roll.poll_deaths(5.9) == []
    one, three = members.roll.poll_deaths(6.0)
    assert (one[0], three[0]) == (3, 2)
    assert "worker 1 was silent for 5.0 s" in one[1]
    assert [members.workers.leave(incarnation) for incarnation in (3, 2)] == [1, 3]
    assert members.roll.poll_deaths(6.0) == []
    assert not members.roll.hear(6.0, 3)
    assert members.workers.live() == {0: 1}
    assert members.workers.members[0].iteration == 7
    assert members.workers.leave(1) == 0
    assert members.workers.leave(1) is None
    assert members.handle_hello(7.0, "worker", wish=0).incarnation == 4
    assert members.handle_hello(7.0, "worker", wish=10**9).refused
    assert members.workers.rank_of(4) == 0


def beaten(members: Membership, incarnation: int, until: float, every: float = 0.1) -> float:
    """A member that was heard regularly; when it was heard last."""
    now = 0.0
    while now + every <= until:
        now += every
        assert members.roll.hear(now, incarnation)
    return now


def test_who_was_heard_regularly_is_given_less_patience_and_never_less_than_a_stop_of_3_s() -> None:
    members = Membership(2, patience=60.0, heartbeat=0.1)
    for _ in range(2):
        members.handle_hello(0.0, "worker")
    last = beaten(members, 1, 5.0)
    assert members.roll.poll_deaths(last + 3.4) == []
    ((incarnation, reason),) = members.roll.poll_deaths(last + 3.6)
    assert incarnation == 1
    assert "worker 0 was silent for 3.6 s, and 3.5 s are borne" in reason
    assert dict(members.roll.poll_deaths(60.0)).keys() == {1, 2}  # of the other one nothing was known


def test_what_is_always_borne_can_be_more_than_that() -> None:
    members = Membership(1, patience=60.0, heartbeat=0.1, least=30.0)
    members.handle_hello(0.0, "worker")
    last = beaten(members, 1, 5.0)
    assert members.roll.poll_deaths(last + 29.9) == []
    assert members.roll.poll_deaths(last + 30.1)


def test_slow_heartbeats_are_borne() -> None:
    """A hub with a long patience asks for few: three of them may be missing at least."""
    members = Membership(1, patience=600.0, heartbeat=20.0)
    members.handle_hello(0.0, "worker")
    last = beaten(members, 1, 400.0, every=20.0)
    assert members.roll.poll_deaths(last + 59.0) == []
    assert members.roll.poll_deaths(last + 61.0)


def test_a_suspect_that_is_silent_for_two_heartbeats_is_dead() -> None:
    members = Membership(2, patience=60.0, heartbeat=1.0)
    for _ in range(2):
        members.handle_hello(0.0, "worker")
    assert not members.roll.suspect(1.0, 99)  # nobody
    assert not members.roll.suspect(1.0, 1)
    assert members.roll.next_deadline() == 2.0
    members.roll.hear(1.5, 1)  # it lives: the suspicion was wrong
    assert members.roll.poll_deaths(4.0) == []
    assert members.roll.suspect(4.0, 1)
    ((incarnation, reason),) = members.roll.poll_deaths(4.0)
    assert incarnation == 1
    assert "another member has lost touch with it" in reason


def test_who_has_no_connection_any_more_is_given_a_second_to_come_back() -> None:
    members = Membership(2, patience=60.0, heartbeat=0.25)
    members.handle_hello(0.0, "worker")
    members.roll.note_broken(99, True)  # nobody
    members.roll.note_broken(1, True)
    assert members.roll.next_deadline() == 1.5
    assert members.roll.hear(1.4, 1)  # over another connection
    assert members.roll.poll_deaths(4.0) == []
    members.roll.note_broken(1, True)
    members.roll.note_broken(1, False)
    assert members.roll.poll_deaths(4.0) == []
    members.roll.note_broken(1, True)
    ((incarnation, reason),) = members.roll.poll_deaths(4.0)
    assert incarnation == 1
    assert "was silent for 2.6 s, and its connections are broken" in reason


def test_after_the_callers_own_absence_silence_is_counted_anew() -> None:
    members = Membership(1, patience=5.0)
    members.handle_hello(0.0, "worker", token="a")
    members.roll.suspect(1.0, 1)
    other = Membership(1, patience=5.0)
    other.restore(100.0, members.state())
    for each in (members, other):
        each.roll.hear_all(100.0)
        assert each.roll.poll_deaths(104.9) == []
        assert [incarnation for incarnation, _ in each.roll.poll_deaths(105.0)] == [1]
        assert each.handle_hello(101.0, "worker", token="a").incarnation == 1  # its answer was lost
        assert each.handle_hello(101.0, "worker", token="b").incarnation == 2


def test_shards_are_known_by_index() -> None:
    members = Membership(1, patience=5.0, shards=2)
    one = members.handle_hello(0.0, "shard", shard=1, address="tcp://a:1")
    assert not one.refused
    assert members.shards.addresses() is None
    assert "at tcp://a:1" in members.handle_hello(0.0, "shard", shard=1, address="tcp://b:1").refused
    assert members.handle_hello(1.0, "shard", shard=1, address="tcp://a:1").incarnation == one.incarnation
    assert members.handle_hello(1.0, "shard", shard=2, address="tcp://a:2").refused
    assert members.handle_hello(1.0, "shard", shard=0).refused
    assert members.handle_hello(1.0, "king").refused
    zero = members.handle_hello(2.0, "shard", shard=0, address="tcp://a:0")
    assert members.shards.addresses() == ["tcp://a:0", "tcp://a:1"]
    members.roll.hear(6.0, zero.incarnation)
    assert [incarnation for incarnation, _ in members.roll.poll_deaths(6.0)] == [one.incarnation]
    assert members.shards.leave(one.incarnation) == 1
    assert members.shards.addresses() is None
    assert members.shards.live() == [0]
    assert members.shards.leave(one.incarnation) is None
    assert members.shards.leave(zero.incarnation) == 0
    assert members.shards.live() == []
