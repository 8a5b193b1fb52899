"""Who of a shard's two processes is its primary: the cases that a person would think of."""

from __future__ import annotations

from atoll.store.members import Membership
from atoll.store.replicas import Half, Pair

P, S = Half(1, "p", "dir p"), Half(2, "s", "dir s")


def pair_of(*, synced: bool) -> Pair:
    pair = Pair()
    assert pair.come(P, 0, False) == "primary"
    assert pair.serve(1)
    assert pair.come(S, 0, False) == "standby"
    assert pair.sync(1, 2) if synced else not pair.sync(1, 3)
    return pair


def test_a_standby_in_sync_takes_the_primary_s_place_and_the_primary_comes_back_as_its_standby() -> None:
    pair = pair_of(synced=True)
    assert pair.promote() is None  # the primary lives
    assert pair.die(1)
    assert pair.promote() == S
    assert not pair.serves
    assert pair.serve(2)
    assert pair.come(Half(3, "p again", "dir p"), 0, True) == "standby"
    assert not pair.synced
    assert pair.refusal(1)  # one that only stood still
    assert pair.refusal(3)


def test_a_standby_that_is_not_in_sync_does_not() -> None:
    pair = pair_of(synced=False)
    pair.die(1)
    assert pair.promote() is None
    assert pair.come(Half(3, "other", "dir other"), 0, True) == "third"
    assert pair.come(Half(4, "p again", "dir p"), 0, True) == "primary"
    assert pair.standby == S


def test_a_word_about_a_standby_that_is_gone_counts_for_nobody_else() -> None:
    pair = pair_of(synced=True)
    pair.die(2)
    pair.come(Half(3, "new", ""), 0, False)
    assert not pair.sync(1, 2)
    assert not pair.synced
    pair.die(1)
    assert pair.promote() is None


def test_when_both_are_dead_either_comes_back_from_its_directory() -> None:
    for first in (P, S):
        pair = pair_of(synced=True)
        pair.die(1)
        pair.die(2)
        again = Half(5, "again", first.token)
        assert pair.role_for(first.token, 0, False) == "standby"  # it has lost what was in it
        assert pair.come(again, 0, True) == "primary"


def test_when_the_successor_dies_too_only_its_own_directory_goes_on() -> None:
    pair = pair_of(synced=True)
    pair.die(1)
    pair.promote()
    pair.die(2)
    assert pair.come(Half(3, "p again", "dir p"), 0, True) == "standby"
    assert pair.promote() is None
    assert pair.come(Half(4, "s again", "dir s"), 0, True) == "primary"


def test_the_addresses_are_told_once_each_shard_has_had_a_standby_in_sync() -> None:
    members = Membership(1, 10.0, 1, None, 0.25, 2)
    one = members.handle_half(0.0, 0, "here", life="p")
    pair = members.pairs[0]
    pair.serve(one.incarnation)
    assert members.shard_addresses() is None
    other = members.handle_half(0.0, 0, "there", life="s")
    assert members.handle_half(1.0, 0, "here", life="p") == members.handle_half(1.0, 0, "here", life="p")
    assert members.handle_half(1.0, 0, "elsewhere", life="third").waits
    pair.sync(one.incarnation, other.incarnation)
    assert members.shard_addresses() == ["here"]
    members.handle_shard_goodbye(one.incarnation)
    pair.promote()
    assert members.shard_addresses() is None  # until it knows
    pair.serve(other.incarnation)
    assert members.shard_addresses() == ["there"]
    assert "knows nothing of" in members.handle_half(2.0, 0, "x", life="z", before=99).refused


def test_what_is_missing_is_said_with_the_command_that_would_bring_it() -> None:
    assert Membership(1, 10.0, 2, None, 0.25, 1).missing_shards()[1] == (
        "shard 1 is not there: start `atoll server --shard 1`"
    )
    members = Membership(1, 10.0, 1, None, 0.25, 2)
    assert members.missing_shards() == ["shard 0 is not there: start `atoll server --shard 0` twice"]
    one = members.handle_half(0.0, 0, "here", life="p")
    pair = members.pairs[0]
    pair.serve(one.incarnation)
    assert members.missing_shards() == [
        "shard 0 has one of its two processes: start `atoll server --shard 0` once more"
    ]
    other = members.handle_half(0.0, 0, "there", life="s")
    assert members.missing_shards() == ["shard 0 has a standby that is not in sync yet"]
    pair.sync(one.incarnation, other.incarnation)
    assert members.missing_shards() == []
    pair.die(one.incarnation)
    pair.promote()
    pair.die(other.incarnation)
    (words,) = members.missing_shards()
    assert words.startswith("shard 0 has no primary")
    assert "start the one that served last again" in words
