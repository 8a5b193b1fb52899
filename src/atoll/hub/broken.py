"""Workers whose connections have broken, here and at their log.

A process that is killed has its connections closed by the system: both sides know at once. One that stands
still keeps them, and so does one behind a link that is cut. So a worker whose connections to the hub and to
the shard that keeps its log have both gone, and that makes none anew, is dead without more patience
(`store/members.py`: `broken_seconds`). One of the two alone may be a link's fault.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.net.endpoint import Server
from atoll.store.members import Membership
from atoll.wire.messages import Looked, Ping, encode

_SILENT_BEATS = 1.5  # heartbeats: who is silent for longer has its connection looked at
_ASK_SECONDS = 0.2  # between questions to the log

_PING = encode(Ping())


class BrokenLinks:
    """Looks after workers that have missed a heartbeat; `ask(rank, incarnation)` sends the log a Look."""

    def __init__(self, members: Membership, server: Server, ask: Callable[[int, int], None]) -> None:
        self._members, self._server, self._ask = members, server, ask
        self._beats: dict[int, bytes] = {}  # incarnation -> whose connection its heartbeats come over
        self._asked: dict[int, float] = {}  # incarnation -> when the log was asked last

    def beat(self, peer: bytes, incarnation: int) -> None:
        """A heartbeat has come."""
        self._beats[incarnation] = peer
        self._asked.pop(incarnation, None)

    def poll(self, now: float) -> None:
        """Ask the log about those whose connection to the hub is no more."""
        if not self._members.shards:
            return  # a ring's members tell of each other
        for rank, incarnation in self._members.live().items():
            if self._members.silence(now, incarnation) < _SILENT_BEATS * self._members.heartbeat:
                continue
            peer = self._beats.get(incarnation)
            due = now >= self._asked.get(incarnation, -_ASK_SECONDS) + _ASK_SECONDS
            if peer is not None and due and self._server.offer(peer, _PING) == "gone":
                self._asked[incarnation] = now
                self._ask(rank, incarnation)

    def looked(self, message: Looked) -> None:
        """The log's answer."""
        if message.incarnation in self._asked and self._members.rank_of(message.incarnation) is not None:
            self._members.handle_broken(message.incarnation, message.lost)

    def left(self, incarnation: int) -> None:
        """A member has left or died."""
        self._beats.pop(incarnation, None)
        self._asked.pop(incarnation, None)
