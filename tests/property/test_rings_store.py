"""Properties of the rings' store, for any order of calls, deadlines and deaths: against a plain dict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import UserError
from atoll.store.rendezvous import Rendezvous
from atoll.wire.messages import Gather, Gathered, StoreAnswer, StoreCall

WORLD = 3
KEYS = ["a", "b", "c"]
MOST_BYTES = 24

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["set", "append", "delete", "add", "get", "wait", "time", "again", "leave"]),
        st.integers(0, WORLD - 1),
        st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
        st.integers(0, 4),  # a value's length, an amount, a span of time
    ),
    max_size=60,
)


@dataclass
class Model:
    """The store as it should be, and the waits that have no answer yet."""

    keys: dict[str, bytes] = field(default_factory=dict)
    waits: dict[int, tuple[str, set[str], float]] = field(
        default_factory=dict
    )  # number -> how, what for, until

    def bytes_held(self) -> int:
        return sum(len(key) + len(value) for key, value in self.keys.items())

    def change(self, operation: str, key: str, value: bytes) -> dict[str, bytes]:
        after = dict(self.keys)
        if operation == "delete":
            after.pop(key, None)
        elif operation == "append":
            after[key] = after.get(key, b"") + value
        else:
            after[key] = value
        return after


class Run:
    """Gives calls to the store and to the model, and compares."""

    def __init__(self) -> None:
        self.now, self.number, self.model = 0.0, 0, Model()
        self.meeting = Rendezvous(WORLD, total_bytes=MOST_BYTES)
        self.wishes, self.group = [0] * WORLD, 0
        self.incarnations = list(range(1, WORLD + 1))
        self.gather(range(WORLD))

    def gather(self, ranks: Any) -> None:
        for rank in ranks:
            self.wishes[rank] += 1
            wish = Gather(incarnation=self.incarnations[rank], number=self.wishes[rank], seconds=1.0)
            answers = self.meeting.handle_gather(self.now, -1, rank, wish)
        self.group += 1
        assert [answer for _, answer in answers] == [Gathered(group=self.group)] * WORLD
        self.model = Model()

    def call(self, operation: str, rank: int, keys: list[str], size: int) -> None:
        self.number += 1
        values = [b"7" * size] if operation in ("set", "append") else []
        call = StoreCall(
            run="r",
            incarnation=self.incarnations[rank],
            group=self.group,
            number=self.number,
            operation=operation,  # type: ignore[arg-type]
            keys=keys if operation == "wait" else keys[:1],
            values=values,
            amount=size,
            seconds=float(size),
        )
        if operation in ("get", "wait"):
            self.wait(call)
        else:
            self.change(call)

    def wait(self, call: StoreCall) -> None:
        answers = self.meeting.handle_call(self.now, call.number, call)
        missing = set(call.keys) - self.model.keys.keys()
        if missing:
            assert answers == []
            self.model.waits[call.number] = (call.operation, missing, self.now + call.seconds)
        else:
            value = self.model.keys[call.keys[0]] if call.operation == "get" else b""
            assert answers == [(call.number, StoreAnswer(value=value))]

    def change(self, call: StoreCall) -> None:
        key, there = call.keys[0], self.model.keys.get(call.keys[0], b"")
        if call.operation == "add":
            value = b"%d" % (int(there or b"0") + call.amount)
        else:
            value = call.values[0] if call.values else b""
        after = Model(self.model.change(call.operation, key, value))
        if call.operation != "delete" and after.bytes_held() > MOST_BYTES:
            self.refused(call)
            return
        first = self.meeting.handle_call(self.now, call.number, call)
        came = key in after.keys and key not in self.model.keys
        self.model.keys = after.keys
        assert first[0][0] == call.number
        self.answered(dict(first[1:]), key if came else None)
        if call.operation != "set":  # sent once more, it changes nothing
            assert self.meeting.handle_call(self.now, call.number, call) == first[:1]

    def refused(self, call: StoreCall) -> None:
        with pytest.raises(UserError, match="more than"):
            self.meeting.handle_call(self.now, call.number, call)

    def answered(self, answers: dict[Any, Any], came: str | None) -> None:
        """Exactly those who waited for nothing else are answered."""
        due = {}
        for number, (operation, missing, _) in list(self.model.waits.items()):
            missing.discard(came or "")
            if not missing:
                del self.model.waits[number]
                due[number] = operation
        assert answers.keys() == due.keys()
        assert all(
            answer.value == (self.model.keys[came or ""] if due[number] == "get" else b"")
            for number, answer in answers.items()
        )

    def pass_time(self, span: float) -> None:
        self.now += span
        over = {number for number, (_, _, until) in self.model.waits.items() if until <= self.now}
        deadline = self.meeting.next_deadline()
        assert deadline is None or deadline <= min(
            (until for _, _, until in self.model.waits.values()), default=deadline
        )
        answers = dict(self.meeting.poll(self.now))
        assert answers.keys() == over
        for number in over:
            assert set(answers[number].missing) == self.model.waits.pop(number)[1]

    def leave(self, rank: int) -> None:
        """A worker dies and another one comes in its place; all form a new ring."""
        self.meeting.handle_left(self.incarnations[rank])
        self.incarnations[rank] = max(self.incarnations) + 1
        self.wishes[rank] = 0
        self.gather(range(WORLD))


@given(ACTIONS)
def test_the_store_is_a_dict_whose_waits_are_answered_once(actions: list[Any]) -> None:
    run = Run()
    for action, rank, keys, size in actions:
        if action == "time":
            run.pass_time(float(size))
        elif action == "again":
            run.gather(range(WORLD))
        elif action == "leave":
            run.leave(rank)
        else:
            run.call(action, rank, keys, size)
        assert run.meeting.keys_held == len(run.model.keys)
        assert run.meeting.bytes_held == run.model.bytes_held()
        assert run.meeting.waiting == len(run.model.waits)
    for rank in range(WORLD):
        run.meeting.handle_left(run.incarnations[rank])
    assert (run.meeting.keys_held, run.meeting.bytes_held, run.meeting.waiting) == (0, 0, 0)
    assert run.meeting.poll(run.now + 1000.0) == []
