"""Payloads that are made as they leave: how many at once, in which order, and anew where they were lost."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from atoll.net.endpoint import Received, Server, poll
from atoll.net.returning import MOST_UNDER_WAY, Made, ReturningLinks
from atoll.wire.messages import Hello, PullState, Push, Ready, Welcome, decode_untrusted, encode

SOON = 30.0  # seconds
COUNT, NUMBERS = 12, 2**19  # payloads, and what is in each: 4 MiB
HELLO = Hello(version=0, run="r", role="worker", worker=0)


class Ends:
    """A worker's connections to two servers of this test's, and what each has got of it."""

    def __init__(self) -> None:
        self.doors = [self.server(shard) for shard in range(2)]
        self.got: list[list[Received]] = [[], []]
        self.made: list[int] = []
        self.links = ReturningLinks(
            [door.address for door in self.doors],
            None,
            hello=HELLO,
            limit=2**26,
            name=lambda index: f"shard {index}",
            ends=lambda index: f"shard {index} is gone for good",
            where=lambda: [door.address for door in self.doors],
            is_it=lambda index, welcome: welcome.shard == index,
        )

    @staticmethod
    def server(shard: int) -> Server:
        return Server("tcp://127.0.0.1:0", None, limit=2**26, name=f"shard {shard}")

    def send(self, shard: int, number: int) -> None:
        def make() -> memoryview:
            self.made.append(number)
            return np.full(NUMBERS, number, dtype=np.int64).data

        push = Push(incarnation=1, iteration=0, chunk=number, chunks_in_all=COUNT, present=b"\1")
        self.links.send(shard, push, Made(make), until="answer")

    def look_until(self, done: Callable[[], bool], *shards: int) -> None:
        """Let the worker and these servers go on."""
        limit = time.monotonic() + SOON
        while not done():
            assert time.monotonic() < limit
            self.links.pump()
            ready = poll(self.links.clients, 0.001)
            if not ready:
                self.links.check()
            self.links.take(ready, self._handle)
            for shard in shards:
                while (each := self.doors[shard].receive(0)) is not None:
                    if isinstance(decode_untrusted(each.header), Hello):
                        welcome = Welcome(run="r", shard=shard, comes_back=True)
                        self.doors[shard].send(each.peer, encode(welcome))
                    else:
                        self.got[shard].append(each)

    def _handle(self, index: int, header: bytes, _payload: memoryview | None) -> None:
        message = decode_untrusted(header)
        assert isinstance(message, Welcome)
        self.links.handle_welcome(index, message)

    def close(self) -> None:
        self.links.close()
        for door in self.doors:
            door.close()


def numbers(got: list[Received]) -> list[int]:
    """Of the payloads, each of which is whole."""
    found = []
    for each in got:
        if each.payload is not None:
            values = np.frombuffer(each.payload, dtype=np.int64)
            assert len(values) == NUMBERS
            assert (values == values[0]).all()
            found.append(int(values[0]))
    return found


def test_payloads_are_made_as_they_leave_and_again_for_a_server_that_was_lost() -> None:
    ends = Ends()
    try:
        ends.look_until(lambda: not ends.links.strangers, 0, 1)
        for number in range(COUNT):
            ends.send(number % 2, number)
        ends.links.send(0, PullState(incarnation=1), until="answer")  # behind those with payloads
        ends.links.send(1, Ready(digest="x"))
        assert ends.links.is_behind
        assert MOST_UNDER_WAY <= len(ends.made) < COUNT // 2  # the system takes some itself
        ends.look_until(lambda: [len(got) for got in ends.got] == [COUNT // 2 + 1] * 2, 0, 1)
        assert not ends.links.is_behind
        assert sorted(ends.made) == list(range(COUNT))
        assert abs(ends.made.index(0) - ends.made.index(1)) == 1  # connections take turns
        for shard, got in enumerate(ends.got):
            assert numbers(got) == list(range(shard, COUNT, 2))
            assert got[-1].payload is None

        ends.links.answered("answer", 0)
        for shard in range(2):
            ends.doors[shard].close()
            ends.doors[shard] = ends.server(shard)
            ends.got[shard].clear()
        ends.made.clear()
        ends.look_until(lambda: len(ends.got[1]) == COUNT // 2 and not ends.links.strangers, 0, 1)
        assert ends.got[0] == []  # it had answered
        assert numbers(ends.got[1]) == ends.made == list(range(1, COUNT, 2))
        assert ends.links.come_back == 2
    finally:
        ends.close()


def test_what_is_answered_before_it_leaves_is_not_made() -> None:
    ends = Ends()
    try:
        for number in range(COUNT):
            ends.send(0, number)
        made = len(ends.made)
        assert MOST_UNDER_WAY <= made < COUNT // 2  # the system takes some itself
        ends.links.answered("answer")
        assert not ends.links.is_behind
        ends.look_until(lambda: not ends.links.strangers, 0, 1)
        assert len(ends.made) == made
    finally:
        ends.close()
