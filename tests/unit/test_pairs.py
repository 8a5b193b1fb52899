"""Who of a shard's two processes is its primary: the cases that a person would think of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from atoll.hub.book import Book
from atoll.hub.decisions import Decisions
from atoll.hub.pairs import Pairs
from atoll.hub.records import Died
from atoll.hub.turn import Turn
from atoll.store.members import Membership
from atoll.store.replicas import Half, Pair
from atoll.wire.messages import VERSION, Hello

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
    one = members.shards.admit_half(0.0, 0, "here", life="p")
    pair = members.shards.pairs[0]
    pair.serve(one.incarnation)
    assert members.shards.addresses() is None
    other = members.shards.admit_half(0.0, 0, "there", life="s")
    assert members.shards.admit_half(1.0, 0, "here", life="p") == members.shards.admit_half(
        1.0, 0, "here", life="p"
    )
    assert members.shards.admit_half(1.0, 0, "elsewhere", life="third").waits
    pair.sync(one.incarnation, other.incarnation)
    assert members.shards.addresses() == ["here"]
    members.shards.leave(one.incarnation)
    pair.promote()
    assert members.shards.addresses() is None  # until it knows
    pair.serve(other.incarnation)
    assert members.shards.addresses() == ["there"]
    assert "knows nothing of" in members.shards.admit_half(2.0, 0, "x", life="z", before=99).refused


def test_what_is_missing_is_said_with_the_command_that_would_bring_it() -> None:
    assert Membership(1, 10.0, 2, None, 0.25, 1).shards.missing()[1] == (
        "shard 1 is not there: start `atoll server --shard 1`"
    )
    members = Membership(1, 10.0, 1, None, 0.25, 2)
    assert members.shards.missing() == ["shard 0 is not there: start `atoll server --shard 0` twice"]
    one = members.shards.admit_half(0.0, 0, "here", life="p")
    pair = members.shards.pairs[0]
    pair.serve(one.incarnation)
    assert members.shards.missing() == [
        "shard 0 has one of its two processes: start `atoll server --shard 0` once more"
    ]
    other = members.shards.admit_half(0.0, 0, "there", life="s")
    assert members.shards.missing() == ["shard 0 has a standby that is not in sync yet"]
    pair.sync(one.incarnation, other.incarnation)
    assert members.shards.missing() == []
    pair.die(one.incarnation)
    pair.promote()
    pair.die(other.incarnation)
    (words,) = members.shards.missing()
    assert words.startswith("shard 0 has no primary")
    assert "start the one that served last again" in words


class Hub:
    """What Pairs needs of a hub; a connection is named after who comes over it, and `gone` are no more."""

    def __init__(self) -> None:
        self.now, self.gone = 0.0, set[bytes]()
        self.book = Book(Membership(1, 10.0, 1, heartbeat=0.25, replicas=2))
        self.owners: dict[int, bytes] = {}
        self.buried: list[int] = []
        self.turn = Turn(lambda: self.now)
        connections = SimpleNamespace(
            welcome=lambda peer, _role, incarnation: self.owners.update({incarnation: peer}),
            of=self.owners.get,
            is_gone=lambda incarnation: self.owners.get(incarnation) in self.gone,
            has_lost=lambda peer: peer in self.gone,
        )
        self.pairs = Pairs(self.book, cast(Any, connections), self.bury, Decisions(), self.turn)

    def come(self, name: str) -> None:
        hello = Hello(version=VERSION, run="", role="shard", shard=0, address=name, token=name, life=name)
        self.pairs.handle_hello(name.encode(), hello)

    def bury(self, incarnation: int, _reason: str) -> None:
        self.book.die(Died(at=self.now, incarnation=incarnation))
        self.buried.append(incarnation)

    def beat(self) -> None:
        """All who are there and connected give a sign of life."""
        for incarnation, peer in self.owners.items():
            if peer not in self.gone:
                self.book.members.roll.hear(self.now, incarnation)

    def there(self) -> list[str]:
        pair = self.book.members.shards.pairs[0]
        return [self.book.members.shards.half_at(half.incarnation) for half in pair.halves()]


def test_a_third_that_was_killed_while_it_waited_does_not_get_a_place() -> None:
    hub = Hub()
    for name in ("first", "second", "third"):
        hub.come(name)
    assert hub.there() == ["first", "second"]
    hub.gone = {b"second", b"third"}
    hub.now = 1.0
    hub.pairs.poll()
    # The second's lost connection is no evidence by itself, where nobody is there for its place.
    assert hub.there() == ["first", "second"]
    assert hub.buried == []
    hub.come("fourth")
    hub.pairs.poll()
    assert hub.there() == ["first", "fourth"]


def test_a_third_gets_the_place_of_one_that_is_gone_and_of_one_that_left() -> None:
    for left in (False, True):
        hub = Hub()
        for name in ("first", "second", "third"):
            hub.come(name)
        hub.now = 1.0
        hub.pairs.poll()
        assert hub.there() == ["first", "second"]
        if left:
            hub.bury(2, "it has left")
        else:
            hub.gone = {b"second"}
        hub.pairs.poll()
        assert hub.there() == ["first", "third"]


def test_a_third_that_is_gone_is_not_told_that_both_live() -> None:
    hub = Hub()
    for name in ("first", "second", "third"):
        hub.come(name)
    hub.gone = {b"third"}
    hub.now = 1.0
    hub.beat()
    hub.pairs.poll()  # a refusal would fail the test
    assert hub.there() == ["first", "second"]
