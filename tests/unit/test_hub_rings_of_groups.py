"""The hub's rings of groups (hub/rings.py): each its own, and what becomes of one whose member moves on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.hub.decisions import Decisions
from atoll.hub.rings import Rings
from atoll.hub.turn import Turn
from atoll.store.members import Membership
from atoll.wire.messages import Reform, Reformed, Refused, RingNews, StoreAnswer, StoreCall


class Hub:
    """Rings of four workers, of incarnations 1 to 4 and ranks from 0."""

    def __init__(self) -> None:
        members = Membership(4, 10.0)
        for rank in range(4):
            members.handle_hello(0.0, "worker", rank)
        self.turn = Turn(lambda: 0.0)
        groups = SimpleNamespace(grouping_of={1: 5, 2: 5, 3: 6, 4: 6}.get, wants_links=lambda _: False)
        self.rings = Rings(members, Decisions(), self.turn, cast(Any, groups))
        for incarnation in range(1, 5):
            self.rings.beat(b"%d" % incarnation, incarnation)
        self.turn.clear()

    def taken(self) -> list[tuple[bytes, Any]]:
        self.rings.poll()  # members are told of what a turn has changed at its end
        sent = [(to, word.reason if isinstance(word, Refused) else word) for to, word in self.turn.answers]
        self.turn.clear()
        return sent


def reform(incarnation: int, group: int, number: int = 1) -> Reform:
    return Reform(incarnation=incarnation, number=number, group=group, rank=0, round=2, holds=False)


@pytest.fixture
def hub() -> Hub:
    return Hub()


def test_news_is_of_the_ring_and_the_grouping_that_are_a_workers_own(hub: Hub) -> None:
    hub.rings.beat(b"1", 1)
    assert hub.taken() == [(b"1", RingNews(group=0, grouping=5))]
    ring = hub.rings.form_group({1: 0, 2: 1})
    other = hub.rings.form_group({3: 2})
    hub.rings.tell(2)
    hub.rings.tell(3)
    assert hub.taken() == [
        (b"2", RingNews(group=ring, grouping=5)),
        (b"3", RingNews(group=other, grouping=6)),
    ]


def test_one_whose_member_moves_on_is_broken_and_goes_on_without_it(hub: Hub) -> None:
    ring = hub.rings.form_group({1: 0, 2: 1, 3: 2})
    call = StoreCall(run="r", incarnation=2, group=ring, number=1, operation="get", keys=["k"], seconds=60.0)
    hub.rings.handle(b"2", call)
    apart = hub.rings.form_group({1: 0})
    assert apart != ring
    sent = hub.taken()
    assert (b"2", StoreAnswer(number=1, missing=["k"])) in sent  # nobody waits for its key any more
    assert (b"3", RingNews(group=ring, broken=True, grouping=6)) in sent
    assert not [each for each in sent if each[0] == b"1"]
    hub.rings.handle(b"2", reform(2, ring))
    hub.rings.handle(b"3", reform(3, ring))
    answers = [message for _, message in hub.taken() if isinstance(message, Reformed)]
    assert [(each.workers, each.left, each.lost) for each in answers] == [([1, 2], [0], [])] * 2


def test_a_worker_that_is_in_no_group_has_no_ring_to_form_anew(hub: Hub) -> None:
    hub.rings.handle(b"1", reform(1, 1))
    assert hub.taken() == [(b"1", "incarnation 1 is in no group, and so in no ring")]


def test_a_ring_of_which_all_have_moved_on_leaves_nothing_behind(hub: Hub) -> None:
    hub.rings.form_group({1: 0, 2: 1})
    hub.rings.form_group({2: 1, 1: 0})
    other = Hub()
    other.rings.restore(0.0, hub.rings.state())
    assert other.rings.state() == hub.rings.state()
    hub.rings.left(1)
    hub.rings.left(2)
    assert other.rings.state() != hub.rings.state()
    hub.rings.handle(b"3", reform(3, 2))
    assert hub.taken()[-1] == (b"3", "incarnation 3 is in no group, and so in no ring")


def test_where_the_one_that_was_to_give_its_state_is_gone_the_next_one_keeps_its_own(hub: Hub) -> None:
    """They trained before they were a group."""
    ring = hub.rings.form_group({1: 0, 2: 1, 3: 2})
    hub.rings.left(1)
    for rank, incarnation in enumerate((2, 3), start=1):
        wish = Reform(
            incarnation=incarnation, number=1, group=ring, rank=rank, round=0, holds=False, fresh=True
        )
        hub.rings.handle(b"%d" % incarnation, wish)
    answers = [message for _, message in hub.taken() if isinstance(message, Reformed)]
    assert [(each.workers, each.newcomers, each.round, each.lost) for each in answers] == [
        ([1, 2], 1, 0, [0])
    ] * 2
