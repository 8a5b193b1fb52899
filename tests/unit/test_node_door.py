"""The door at which a node's other devices ask for the optimizer's state: who is answered, and what the
others are told."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator

import pytest

from atoll.core.errors import AtollError, DeadlineError, RunError
from atoll.cpuside.door import Door, StateRequest
from atoll.exchange.hostmemory import make_file
from atoll.net.post import Post
from atoll.train.sync.peersdoor import ask_at
from atoll.wire.device import State, Waiting, Want, WantState


class Asking:
    """A device that asks, on a thread of its own."""

    def __init__(self, door: Door, least: int, timeout: float = 20.0) -> None:
        self.found: list[State | AtollError] = []
        self._thread = threading.Thread(target=self._ask, args=(door.name, least, timeout))
        self._thread.start()

    def _ask(self, name: str, least: int, timeout: float) -> None:
        file = make_file(8, "a test")
        try:
            self.found.append(ask_at(name, WantState(least=least), file, timeout, "worker 3", "the state"))
        except AtollError as error:
            self.found.append(error)
        finally:
            os.close(file)

    def ended(self) -> State | AtollError:
        self._thread.join(30.0)
        return self.found[0]


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.close()


def hear(door: Door, number: int) -> list[StateRequest]:
    asked: list[StateRequest] = []
    for _ in range(2000):
        asked += door.take()
        if len(asked) >= number:
            return sorted(asked)
        threading.Event().wait(0.01)
    raise AssertionError(f"{len(asked)} of {number} have asked")


def test_each_that_asks_is_answered_in_its_own_file(door: Door) -> None:
    devices = [Asking(door, least) for least in (5, 7)]
    first, second = hear(door, 2)
    assert (first.least, second.least) == (5, 7)
    for each, number in ((second, 7), (first, 5)):
        os.pwrite(each.file, bytes([number]), 0)
        os.close(each.file)
        each.answer(State(iteration=number, packed=1))
    assert [each.ended() for each in devices] == [State(iteration=5, packed=1), State(iteration=7, packed=1)]
    assert door.take() == []


def test_the_deadline_says_what_the_cpu_side_waits_for(door: Door) -> None:
    device = Asking(door, 5, timeout=1.0)
    (asked,) = hear(door, 1)
    asked.answer(Waiting(what="node 2, for its contribution of iteration 4"))
    error = device.ended()
    assert isinstance(error, DeadlineError)
    waited = r"worker 3 waited \d+\.\d s for the state; it waits for node 2, for its"
    assert re.match(waited, str(error)), error
    assert str(error).endswith("(deadline sync.timeout, 1 s)")
    os.close(asked.file)
    door.take()
    asked.answer(State(iteration=5, packed=0))  # nobody hears it, and it harms nobody


def test_a_cpu_side_that_is_gone_is_named() -> None:
    door = Door()
    device = Asking(door, 5)
    (asked,) = hear(door, 1)
    os.close(asked.file)
    door.close()
    for error in (device.ended(), Asking(door, 5).ended()):
        assert isinstance(error, RunError)
        assert str(error).startswith("worker 3 cannot have the state: the CPU side of its node, which its")


def test_who_says_anything_else_is_sent_away(door: Door) -> None:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(f"\0{door.name}")
    post = Post(link)
    post.send(Want(iteration=1, least=1))
    device = Asking(door, 2)
    (asked,) = hear(door, 1)
    os.close(asked.file)
    asked.answer(State(iteration=2, packed=0))
    assert isinstance(device.ended(), State)
    assert post.wait(20.0)
    post.close()
