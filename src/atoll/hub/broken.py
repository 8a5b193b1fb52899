"""Detection of workers whose connections to the hub and to their log are both broken.

The system closes the connections of a killed process, so both sides notice at once. A suspended process, or
one behind a cut link, keeps its connections. So a worker whose connections to the hub and to its log's shard
are both gone, and that does not reconnect, counts as dead early (`store/roll.py`: `broken_seconds`). A single
lost connection may be the link's fault.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from atoll.net.endpoint import Server
from atoll.store.members import Membership
from atoll.wire.messages import Looked, Ping, encode

_SILENT_BEATS = 1.5  # heartbeats of silence after which a member's connection is tested
_ASK_SECONDS = 0.2  # seconds between tests of a silent member

_PING = encode(Ping())


class BrokenLinks:
    """Checks the connections of workers that missed a heartbeat."""

    def __init__(self, members: Membership, server: Server) -> None:
        self._members, self._server = members, server
        # Incarnation -> the connection of its heartbeats; the most recently heard is last.
        self._beats: OrderedDict[int, bytes] = OrderedDict()
        self._silent: dict[int, bytes] = {}  # members that missed a heartbeat
        self._next: list[tuple[float, int]] = []  # a heap: when to test each silent member again
        self._asked: set[int] = set()  # incarnations that the log was asked about

    def beat(self, peer: bytes, incarnation: int) -> None:
        """Note a heartbeat."""
        if not self._members.shards.count:
            return
        self._beats[incarnation] = peer
        self._beats.move_to_end(incarnation)
        if self._silent.pop(incarnation, None) is not None:
            self._asked.discard(incarnation)

    def hear(self, incarnation: int) -> None:
        """Note a heartbeat relayed by the member's launcher; the member's connection is unchanged."""
        peer = self._beats.get(incarnation) or self._silent.get(incarnation)
        if peer is not None:
            self.beat(peer, incarnation)

    def poll(self, now: float) -> Iterator[tuple[int, int]]:
        """Yield (rank, incarnation) of workers whose connection to the hub is gone. The caller asks their log
        about its own. Only silent workers cost time. Without shards nothing is tracked: members of a ring
        report each other."""
        self._find_silent(now)
        while self._next and self._next[0][0] <= now:
            _, incarnation = heapq.heappop(self._next)
            peer, rank = self._silent.get(incarnation), self._members.workers.rank_of(incarnation)
            if peer is None or rank is None:
                self._silent.pop(incarnation, None)
                continue  # heard again, gone, or no worker
            if self._server.offer(peer, _PING) == "gone":
                self._asked.add(incarnation)
                yield rank, incarnation
            heapq.heappush(self._next, (now + _ASK_SECONDS, incarnation))

    def _find_silent(self, now: float) -> None:
        while self._beats:
            incarnation = next(iter(self._beats))
            silence = self._members.roll.silence_of(now, incarnation)
            if silence is not None and silence < _SILENT_BEATS * self._members.roll.heartbeat:
                return  # all members behind it were heard later
            peer = self._beats.pop(incarnation)
            if silence is not None:
                self._silent[incarnation] = peer
                heapq.heappush(self._next, (now, incarnation))

    def looked(self, message: Looked) -> None:
        """Handle the log's answer."""
        if (
            message.incarnation in self._asked
            and self._members.workers.rank_of(message.incarnation) is not None
        ):
            self._members.roll.note_broken(message.incarnation, message.lost)

    def left(self, incarnation: int) -> None:
        """Forget a member that left or died."""
        self._beats.pop(incarnation, None)
        self._silent.pop(incarnation, None)
        self._asked.discard(incarnation)
