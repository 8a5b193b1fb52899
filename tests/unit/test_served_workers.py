"""Who is the first among workers of a parameter server, as members come and go."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from atoll.train.api.place import Place
from atoll.train.members.attendance import Attendance
from atoll.train.members.entering import ServedEntrance
from atoll.train.members.logmeeting import MEETING, LogMeeting
from atoll.train.members.workers import Workers
from atoll.train.sync.servedmodels import ServedModels
from atoll.wire.messages import Committed, Meet, Met, WantState


def of_rank(rank: int, site: str = "", *, elastic: bool = False) -> tuple[Workers, ServedEntrance, list[int]]:
    hello = SimpleNamespace(site=site)
    shards: Any = SimpleNamespace(
        late=False, hello=hello, incarnation=1, on=lambda *_: None, send=mock.Mock()
    )
    attendance = Attendance(Place(rank, 3), late=False)
    workers = Workers(LogMeeting(attendance, shards, ServedModels()))
    counts: list[int] = []
    state = mock.Mock()
    entrance = ServedEntrance(
        shards, attendance, workers, state, lambda: None, lambda: 0, counts.append, elastic=elastic
    )
    return workers, entrance, counts


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_first_of_those_who_live_is_the_first(rank: int) -> None:
    workers, entrance, counts = of_rank(rank)
    assert workers.is_first == (rank == 0)
    entrance.told(Committed(iteration=3, workers=[1, 2]))  # worker 0 was lost
    assert workers.is_first == (rank == 1)
    entrance.told(Committed(iteration=4))  # an answer that was asked for again tells nothing of it
    assert workers.is_first == (rank == 1)
    entrance.told(Committed(iteration=5, workers=[0, 1, 2]))  # it is back
    assert workers.is_first == (rank == 0)
    assert counts == [2, 0, 3]


class AnswersTwice:
    """Shards that answer each Meet, and once more with the next, as after a connection that broke."""

    incarnation = 1

    def __init__(self, *workers: int) -> None:
        self.workers, self.sent = list(workers), list[int]()

    def on(self, _kind: type, handler: Callable[..., None]) -> None:
        self.handle = handler

    def send(self, _shard: int, message: Meet, _payload: memoryview, until: str) -> None:
        assert until == MEETING
        self.sent.append(message.number)

    def answered(self, until: str) -> None:
        assert until == MEETING

    def answer(self, number: int) -> None:
        sizes = [1] * len(self.workers)
        payload = memoryview(bytes(range(len(sizes))))
        self.handle(0, Met(number=number, workers=self.workers, sizes=sizes), payload)

    def wait(self, done: Callable[[], bool], *_: object) -> None:
        for number in self.sent[-2:]:
            self.answer(number)
        assert done()


def test_an_answer_that_comes_twice_says_nothing_of_who_is_there() -> None:
    shards: Any = AnswersTwice(4, 5)
    attendance = Attendance(Place(0, 3), late=False, grouped=True)
    meeting = LogMeeting(attendance, shards, ServedModels())
    stand = meeting.standing_for("reduce")
    for number in range(3):
        assert meeting.meet(b"", number, "reduce", stand) == ([4, 5], [b"\0", b"\1"])
        shards.answer(number)
        assert attendance.ranks == [0, 1, 2]  # of the workers, and not the groups' numbers
        assert len(meeting._met) <= 2  # answers that nobody waits for do not pile up
    shards.workers = [1, 2]
    attendance.number = 3
    assert meeting.gather_bytes(b"", "reduce") == [b"\0", b"\1"]
    assert attendance.ranks == [1, 2]


@pytest.mark.parametrize("grouped", [False, True])
def test_workers_deal_anew_where_other_workers_have_made_an_iteration(grouped: bool) -> None:
    """Whether they contribute by themselves, or as groups, whose numbers say nothing of who is there."""
    _, entrance, counts = of_rank(0, elastic=True)
    state: Any = entrance._state
    state.places = lambda: "place 0"
    entrance.begin()

    def word(iteration: int, *made: int, entering: tuple[int, ...] = ()) -> Committed:
        named = {"workers": [8, 9], "members": list(made)} if grouped else {"workers": list(made)}
        return Committed(iteration=iteration, entering=list(entering), **named)

    entrance.told(word(0, 0, 1, 2))
    assert not state.deal_anew.called
    there = {0: "place 0", 2: "place 2"}
    with mock.patch.object(Workers, "gather", return_value=list(there.values())):
        entrance._attendance.ranks = list(there)
        entrance.told(word(1, 0, 2, entering=(1,)))
    state.deal_anew.assert_called_once_with(["place 0", None, "place 2"], 0, 3, [1])
    entrance.told(word(2, 0, 1, 2))
    assert state.deal_anew.call_count == 1
    assert counts == [3, 2, 3]


def test_at_a_site_its_own_workers_are_not_all() -> None:
    workers, entrance, _ = of_rank(2, site="paris")
    entrance.told(Committed(iteration=3, workers=[2]))
    assert not workers.is_first


def test_a_newcomer_is_given_nothing_where_gradients_are_added_to_those_before() -> None:
    """Which it would lack. It learns why, and the worker goes on."""
    _, entrance, _ = of_rank(0, elastic=True)
    state, send = entrance._state.capture, entrance._shards.send  # type: ignore[attr-defined]
    state.return_value = b"state"
    want = WantState(iteration=4, worker=2, life=9)
    entrance.boundary(4, begins=False)
    entrance._handle_want(0, want, None)
    (_, give, payload), _ = send.call_args
    assert (give.worker, give.life) == (2, 9)
    assert "go on with gradients of an earlier backward" in give.refused
    assert bytes(payload) == b""
    entrance.over()
    entrance._handle_want(0, want, None)
    entrance.boundary(5, begins=True)
    (_, give, payload), _ = send.call_args
    assert give.refused == ""
    assert bytes(payload) == b"state"
    assert send.call_count == 2
