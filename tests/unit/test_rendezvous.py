"""How rings meet, by example: who is in one, its keys, waits under a clock of our own, and bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.core.errors import UserError
from atoll.store.members import Membership
from atoll.store.rendezvous import VALUE_BYTES, Rendezvous
from atoll.wire.messages import (
    Gather,
    Gathered,
    StoreAnswer,
    StoreCall,
    WireError,
    decode_untrusted,
    encode,
)


def gather(incarnation: int, number: int = 1, seconds: float = 10.0) -> Gather:
    return Gather(incarnation=incarnation, number=number, seconds=seconds)


class Ring:
    """A ring of `world` workers; worker r is incarnation r + 1, and its peer is "r"."""

    def __init__(self, world: int = 2, **bounds: int) -> None:
        self.meeting = Rendezvous(world, **bounds)
        self.now = 0.0
        self._numbers = 0
        for rank in range(world):
            answers = self.meeting.handle_gather(self.now, str(rank), rank, gather(rank + 1))
        assert answers == [(str(rank), Gathered(group=1)) for rank in range(world)]

    def all(self, rank: int, operation: str, *keys: str, **fields: Any) -> list[tuple[Any, Any]]:
        """Every answer to a call."""
        self._numbers += 1
        fields = {"run": "r", "incarnation": rank + 1, "group": 1, "number": self._numbers, **fields}
        call = StoreCall(operation=operation, keys=list(keys), **fields)  # type: ignore[arg-type]
        answers = self.meeting.handle_call(self.now, str(rank), call)
        # As they arrive: an answer that is no message would help nobody.
        return [(peer, decode_untrusted(encode(answer))) for peer, answer in answers]

    def one(self, rank: int, operation: str, *keys: str, **fields: Any) -> StoreAnswer:
        """The caller's answer, where there is no other."""
        ((peer, answer),) = self.all(rank, operation, *keys, **fields)
        assert peer == str(rank)
        assert isinstance(answer, StoreAnswer)
        return answer


# -- who is in a ring -------------------------------------------------------------------------------------


def test_a_ring_is_formed_when_all_ranks_want_it_and_each_hears_its_number() -> None:
    meeting = Rendezvous(3)
    assert meeting.handle_gather(0.0, "c", 2, gather(7)) == []
    assert meeting.handle_gather(1.0, "a", 0, gather(8)) == []
    answers = meeting.handle_gather(2.0, "b", 1, gather(9))
    assert answers == [(peer, Gathered(group=1)) for peer in "abc"]
    assert meeting.next_deadline() is None


def test_a_ring_that_does_not_fill_says_who_is_missing_when_the_time_is_over() -> None:
    meeting = Rendezvous(4)
    meeting.handle_gather(0.0, "a", 0, gather(1, seconds=5.0))
    meeting.handle_gather(1.0, "c", 2, gather(2, seconds=9.0))
    assert meeting.next_deadline() == 5.0
    assert meeting.poll(4.9) == []
    assert meeting.poll(5.0) == [("a", Gathered(group=0, missing=[1, 3], there=2))]
    assert meeting.poll(10.0) == [("c", Gathered(group=0, missing=[0, 1, 3], there=1))]
    assert meeting.next_deadline() is None


def test_who_left_before_the_ring_was_formed_is_not_in_it() -> None:
    meeting = Rendezvous(2)
    meeting.handle_gather(0.0, "dead", 0, gather(1))
    meeting.handle_left(1)
    assert meeting.handle_gather(1.0, "b", 1, gather(2)) == []
    assert meeting.handle_gather(2.0, "new", 0, gather(3)) == [
        ("new", Gathered(group=1)),
        ("b", Gathered(group=1)),
    ]


def test_a_wish_that_is_sent_twice_is_answered_twice_and_counted_once() -> None:
    meeting = Rendezvous(2)
    meeting.handle_gather(0.0, "old connection", 0, gather(1))
    assert meeting.handle_gather(0.0, "a", 0, gather(1)) == []
    formed = meeting.handle_gather(0.0, "b", 1, gather(2))
    assert formed == [("a", Gathered(group=1)), ("b", Gathered(group=1))]
    assert meeting.handle_gather(1.0, "newest", 0, gather(1)) == [("newest", Gathered(group=1))]
    assert meeting.state.formed == 1


def test_a_ring_made_again_by_the_same_workers_has_keys_of_its_own_and_the_old_ones_go() -> None:
    ring = Ring(2)
    ring.one(0, "set", "where", values=[b"there"])
    assert ring.meeting.handle_gather(1.0, "0", 0, gather(1, number=2)) == []
    assert ring.one(1, "check", "where").count == 1  # until the new one is formed, the old one stands
    assert ring.meeting.handle_gather(1.0, "1", 1, gather(2, number=2))[0][1] == Gathered(group=2)
    with pytest.raises(UserError, match="ring 1 is not incarnation 1's, or is no more"):
        ring.one(0, "check", "where")
    assert ring.one(0, "check", "where", group=2).count == 0
    assert (ring.meeting.keys_held, ring.meeting.bytes_held) == (0, 0)


def test_a_rings_keys_go_with_its_last_member() -> None:
    ring = Ring(2)
    ring.one(0, "set", "where", values=[b"there"])
    ring.meeting.handle_left(1)
    assert ring.one(1, "get", "where").value == b"there"
    ring.meeting.handle_left(2)
    assert (ring.meeting.keys_held, ring.meeting.bytes_held) == (0, 0)
    with pytest.raises(UserError, match="no more"):
        ring.one(1, "get", "where")


def test_only_members_have_a_rings_keys() -> None:
    ring = Ring(2)
    with pytest.raises(UserError, match="ring 1 is not incarnation 3's"):
        ring.all(2, "num_keys")
    with pytest.raises(UserError, match="worker 2 is in no ring: the run's are of 2 workers"):
        ring.meeting.handle_gather(0.0, "2", 2, gather(3))


# -- the keys ---------------------------------------------------------------------------------------------


def test_each_operation() -> None:
    ring = Ring()
    assert ring.one(0, "check", "a").count == 0
    ring.one(0, "set", "a", values=[b"x"])
    assert ring.one(1, "get", "a").value == b"x"
    ring.one(0, "append", "a", values=[b"yz"])
    assert ring.one(1, "get", "a").value == b"xyz"
    assert ring.one(0, "add", "n", amount=5).count == 5
    assert ring.one(1, "add", "n", amount=-7).count == -2
    assert ring.one(1, "get", "n").value == b"-2"
    assert ring.one(1, "num_keys").count == 2
    assert ring.one(1, "wait", "a", "n") == StoreAnswer()
    assert ring.one(1, "delete", "a").count == 1
    assert ring.one(1, "delete", "a").count == 0
    assert ring.one(0, "check", "a", "n").count == 0
    assert ring.one(0, "check", "n").count == 1


@pytest.mark.parametrize(
    ("there", "expected", "desired", "given", "held"),
    [
        (None, b"", b"new", b"new", b"new"),
        (None, b"old", b"new", b"old", None),
        (b"old", b"old", b"new", b"new", b"new"),
        (b"other", b"old", b"new", b"other", b"other"),
    ],
)
def test_compare_set(there: bytes | None, expected: bytes, desired: bytes, given: bytes, held: Any) -> None:
    ring = Ring()
    if there is not None:
        ring.one(0, "set", "k", values=[there])
    assert ring.one(0, "compare_set", "k", values=[expected, desired]).value == given
    assert ring.one(0, "check", "k").count == (held is not None)
    if held is not None:
        assert ring.one(0, "get", "k").value == held


@pytest.mark.parametrize(
    ("operation", "fields", "counts"),
    [
        ("add", {"amount": 3}, [3, 3, 6]),
        ("append", {"values": [b"ab"]}, [2, 2, 4]),
        ("delete", {}, [1, 1, 0]),
    ],
)
def test_what_is_sent_twice_counts_once(operation: str, fields: dict[str, Any], counts: list[int]) -> None:
    ring = Ring()
    if operation == "delete":
        ring.one(1, "set", "k", values=[b"x"])
    first, again = (ring.one(0, operation, "k", number=100, **fields).count for _ in range(2))
    assert [first, again, ring.one(0, operation, "k", number=101, **fields).count] == counts
    # Another worker's call of the same number is another call.
    assert ring.one(1, "add", "other", number=100, amount=1).count == 1


@pytest.mark.parametrize(
    ("operation", "keys", "values", "said"),
    [
        ("set", ["a"], [], "it takes 1 keys and 1 values"),
        ("set", ["a", "b"], [b"x"], "set of 2 keys"),
        ("get", [], [], "get of 0 keys"),
        ("wait", [], [], "it takes some keys"),
        ("compare_set", ["a"], [b"x"], "and 2 values"),
        ("num_keys", ["a"], [], "it takes 0 keys"),
    ],
)
def test_calls_of_the_wrong_shape_are_refused(
    operation: str, keys: list[str], values: list[bytes], said: str
) -> None:
    ring = Ring()
    with pytest.raises(UserError, match=said):
        ring.all(0, operation, *keys, values=values)


def test_only_numbers_are_added_to_and_only_up_to_64_bits() -> None:
    ring = Ring()
    ring.one(0, "set", "word", values=[b"seven"])
    with pytest.raises(UserError, match="'word' holds no whole number"):
        ring.one(0, "add", "word", amount=1)
    ring.one(0, "set", "n", values=[b"%d" % (2**63 - 2)])
    assert ring.one(0, "add", "n", amount=1).count == 2**63 - 1
    with pytest.raises(UserError, match="does not fit into 64 bits"):
        ring.one(0, "add", "n", amount=1)
    assert ring.one(0, "get", "n").value == b"%d" % (2**63 - 1)


# -- waits ------------------------------------------------------------------------------------------------


def test_who_waits_is_answered_with_the_last_of_its_keys() -> None:
    ring = Ring(3)
    assert ring.all(0, "wait", "a", "b", seconds=10.0) == []
    assert ring.all(1, "get", "b", seconds=10.0) == []
    assert ring.all(2, "set", "a", values=[b"1"]) == [("2", StoreAnswer())]
    assert ring.all(2, "set", "b", values=[b"2"]) == [
        ("2", StoreAnswer()),
        ("0", StoreAnswer()),
        ("1", StoreAnswer(value=b"2")),
    ]
    assert ring.meeting.waiting == 0
    assert ring.meeting.poll(100.0) == []  # nobody is answered twice


@pytest.mark.parametrize(
    ("operation", "fields"),
    [("add", {"amount": 1}), ("append", {"values": [b"x"]}), ("compare_set", {"values": [b"", b"x"]})],
)
def test_every_way_to_make_a_key_wakes(operation: str, fields: dict[str, Any]) -> None:
    ring = Ring()
    assert ring.all(0, "wait", "k", seconds=1.0) == []
    assert [peer for peer, _ in ring.all(1, operation, "k", **fields)] == ["1", "0"]


def test_who_waited_for_too_long_is_told_what_is_missing() -> None:
    ring = Ring(2)
    ring.one(0, "set", "a", values=[b"1"])
    ring.now = 5.0
    assert ring.all(0, "wait", "c", "a", "b", seconds=2.0) == []
    assert ring.all(1, "get", "z", seconds=0.5) == []
    assert ring.meeting.next_deadline() == 5.5
    assert ring.meeting.poll(5.4) == []
    assert ring.meeting.poll(5.5) == [("1", StoreAnswer(missing=["z"]))]
    assert ring.meeting.next_deadline() == 7.0
    assert ring.meeting.poll(7.0) == [("0", StoreAnswer(missing=["b", "c"]))]
    assert ring.meeting.waiting == 0


def test_the_waits_of_a_worker_that_died_go_with_it() -> None:
    ring = Ring(2)
    assert ring.all(0, "wait", "a", "b", seconds=10.0) == []
    assert ring.all(1, "wait", "a", seconds=10.0) == []
    ring.meeting.handle_left(1)
    assert ring.meeting.waiting == 1
    assert [peer for peer, _ in ring.all(1, "set", "a", values=[b"1"])] == ["1", "1"]
    assert ring.meeting.poll(100.0) == []


# -- bounds -----------------------------------------------------------------------------------------------


def test_keys_bytes_values_and_waits_are_bounded_and_a_refusal_changes_nothing() -> None:
    ring = Ring(2, keys=2, total_bytes=20, waiters=1)
    ring.one(0, "set", "a", values=[b"123456789"])
    with pytest.raises(UserError, match="the hub would keep more than the 20 bytes"):
        ring.one(0, "set", "b", values=[b"12345678901"])
    with pytest.raises(UserError, match="more than the 20 bytes"):
        ring.one(0, "append", "a", values=[b"12345678901"])
    ring.one(0, "set", "b", values=[b"1"])
    with pytest.raises(UserError, match="key 'c': the hub keeps 2 keys"):
        ring.one(0, "set", "c", values=[b""])
    assert (ring.meeting.keys_held, ring.meeting.bytes_held) == (2, 12)
    ring.one(0, "delete", "b")
    ring.one(0, "set", "c", values=[b""])
    assert ring.all(0, "wait", "x", seconds=1.0) == []
    with pytest.raises(UserError, match="1 calls wait for keys already"):
        ring.all(1, "wait", "x", seconds=1.0)


def test_a_value_grows_no_further_than_one_may_be() -> None:
    ring = Ring()
    ring.one(0, "set", "a", values=[bytes(VALUE_BYTES)])
    with pytest.raises(UserError, match=f"'a': {VALUE_BYTES + 1} bytes, where {VALUE_BYTES} are the most"):
        ring.one(0, "append", "a", values=[b"x"])
    assert len(ring.one(0, "get", "a").value) == VALUE_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"keys": ["k" * 1025]},
        {"values": [bytes(2**20 + 1)]},
        {"keys": ["k"] * 4097},
        {"values": [b""] * 3},
        {"amount": 2**62 + 1},
        {"operation": "drop"},
        {"seconds": -1.0},
    ],
)
def test_messages_beyond_their_bounds_are_none(change: dict[str, Any]) -> None:
    fields = {"run": "r", "incarnation": 1, "group": 1, "number": 1, "operation": "wait", "keys": ["a"]}
    assert decode_untrusted(encode(StoreCall(**fields))) == StoreCall(**fields)  # type: ignore[arg-type]
    with pytest.raises(WireError):
        decode_untrusted(msgspec.msgpack.encode({"m": "StoreCall", **fields, **change}))


# -- ranks of a run without shards ------------------------------------------------------------------------


def test_a_ring_has_as_many_ranks_as_workers() -> None:
    members = Membership(2, 10.0, shards=0)
    assert [members.handle_hello(0.0, "worker").worker for _ in range(2)] == [0, 1]
    assert members.workers.must_wait(-1)
    assert members.workers.must_wait(1)
    assert "a ring of 2 workers, and all of them are there" in members.handle_hello(0.0, "worker").refused
    assert "there is no rank 2" in members.handle_hello(0.0, "worker", 2).refused
    assert "has no shards" in members.handle_hello(0.0, "shard", shard=0, address="tcp://a:1").refused
    members.workers.leave(1)
    assert not members.workers.must_wait(-1)
    assert members.handle_hello(0.0, "worker").worker == 0


def test_with_shards_any_number_of_workers_may_come() -> None:
    members = Membership(1, 10.0, shards=1)
    assert [members.handle_hello(0.0, "worker").worker for _ in range(3)] == [0, 1, 2]
    assert not members.workers.must_wait(-1)
    assert members.workers.must_wait(2)
