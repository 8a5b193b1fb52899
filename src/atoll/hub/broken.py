"""Workers whose connections have broken, here and at their log.

A process that is killed has its connections closed by the system: both sides know at once. One that stands
still keeps them, and so does one behind a link that is cut. So a worker whose connections to the hub and to
the shard that keeps its log have both gone, and that makes none anew, is dead without more patience
(`store/roll.py`: `broken_seconds`). One of the two alone may be a link's fault.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from atoll.net.endpoint import Server
from atoll.store.members import Membership
from atoll.wire.messages import Looked, Ping, encode

_SILENT_BEATS = 1.5  # heartbeats: who is silent for longer has its connection looked at
_ASK_SECONDS = 0.2  # between questions to the log

_PING = encode(Ping())


class BrokenLinks:
    """Looks after workers that have missed a heartbeat."""

    def __init__(self, members: Membership, server: Server) -> None:
        self._members, self._server = members, server
        # Incarnation -> whose connection its heartbeats come over; who was heard last is the last.
        self._beats: OrderedDict[int, bytes] = OrderedDict()
        self._silent: dict[int, bytes] = {}  # those of them that have missed a heartbeat
        self._next: list[tuple[float, int]] = []  # a heap: when to look at each of the silent again
        self._asked: set[int] = set()  # incarnations that the log was asked about

    def beat(self, peer: bytes, incarnation: int) -> None:
        """A heartbeat has come."""
        if not self._members.shards.count:
            return
        self._beats[incarnation] = peer
        self._beats.move_to_end(incarnation)
        if self._silent.pop(incarnation, None) is not None:
            self._asked.discard(incarnation)

    def hear(self, incarnation: int) -> None:
        """A heartbeat has come through the member's launcher: it has the connection that it had."""
        peer = self._beats.get(incarnation) or self._silent.get(incarnation)
        if peer is not None:
            self.beat(peer, incarnation)

    def poll(self, now: float) -> Iterator[tuple[int, int]]:
        """(rank, incarnation) of those whose connection to the hub is no more: the log is to be asked for
        theirs. Only who is silent costs time, and a ring's members, which tell of each other, cost none."""
        self._find_silent(now)
        while self._next and self._next[0][0] <= now:
            _, incarnation = heapq.heappop(self._next)
            peer, rank = self._silent.get(incarnation), self._members.workers.rank_of(incarnation)
            if peer is None or rank is None:
                self._silent.pop(incarnation, None)
                continue  # it was heard again, is no more, or is no worker
            if self._server.offer(peer, _PING) == "gone":
                self._asked.add(incarnation)
                yield rank, incarnation
            heapq.heappush(self._next, (now + _ASK_SECONDS, incarnation))

    def _find_silent(self, now: float) -> None:
        while self._beats:
            incarnation = next(iter(self._beats))
            silence = self._members.roll.silence_of(now, incarnation)
            if silence is not None and silence < _SILENT_BEATS * self._members.roll.heartbeat:
                return  # whoever comes after was heard later
            peer = self._beats.pop(incarnation)
            if silence is not None:
                self._silent[incarnation] = peer
                heapq.heappush(self._next, (now, incarnation))

    def looked(self, message: Looked) -> None:
        """The log's answer."""
        if (
            message.incarnation in self._asked
            and self._members.workers.rank_of(message.incarnation) is not None
        ):
            self._members.roll.note_broken(message.incarnation, message.lost)

    def left(self, incarnation: int) -> None:
        """A member has left or died."""
        self._beats.pop(incarnation, None)
        self._silent.pop(incarnation, None)
        self._asked.discard(incarnation)
