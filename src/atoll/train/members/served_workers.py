"""What workers of a parameter server tell one another outside the iterations: through the log's meetings.

They have no group of their own: a worker that dies is left out, and the others' meetings go on.
"""

from __future__ import annotations

import contextlib

from atoll.core.errors import AtollError, RunError
from atoll.exchange.link import LOG, Link
from atoll.train.members.attendance import Attendance
from atoll.train.members.meetings import MeetingWorkers, called
from atoll.train.sync.servedmodels import ServedModels
from atoll.wire.messages import AnyMessage, Ended, Ends, Meet, Met

MEETING, ENDING = "meeting", "ending"  # what a Meet is sent again until; an Ends


class CalledAwayError(AtollError):
    """A meeting was left before its end; what was brought to it is brought again."""


class ServedWorkers(MeetingWorkers):
    """`Workers` over the shards' log."""

    def __init__(self, attendance: Attendance, shards: Link, models: ServedModels) -> None:
        super().__init__(attendance.place, None)
        self.attendance, self._shards, self._models = attendance, shards, models
        self._met: dict[int, list[bytes]] = {}
        shards.on(Met, self._handle_met)

    @property
    def late(self) -> bool:
        return self.attendance.late

    @property
    def ranks(self) -> list[int]:
        return self.attendance.ranks

    def saw(self, ranks: list[int]) -> None:
        """These live, as an iteration's word says, between two calls: the first of them is the first now."""
        self.attendance.ranks = list(ranks)

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Each live worker's bytes, in order of rank."""
        self.check_open()
        if self.late:
            return [payload]
        number = self.attendance.number
        self.attendance.number += 1
        return self._meet(payload, number, what)

    def _meet(self, payload: bytes, number: int, what: str) -> list[bytes]:
        """What those who come to the meeting of this number bring, in order of who they are to the log."""
        shards = self._shards
        meet = Meet(
            incarnation=shards.incarnation, number=number, what=what[:256], stand=self._standing_for(what)
        )
        shards.send(LOG, meet, memoryview(payload), until=MEETING)
        shards.wait(
            lambda: number in self._met or self._leaves(),
            lambda: [LOG],
            f"every worker's part in {called(what)}",
        )
        shards.answered(MEETING)
        if number not in self._met:
            raise CalledAwayError(f"this worker is called away from {what}")
        return self._met.pop(number)

    def part(self) -> None:
        if self.late:
            return
        shards, ended = self._shards, False

        def handle_ended(_shard: int, _message: AnyMessage, _payload: memoryview | None) -> None:
            nonlocal ended
            ended = True

        shards.on(Ended, handle_ended)
        stand = self._standing_for("the end of the session")
        shards.send(LOG, Ends(incarnation=shards.incarnation, stand=stand), until=ENDING)
        with contextlib.suppress(RunError):  # nobody is there to tell: what was trained counts all the same
            shards.wait(lambda: ended, lambda: [LOG], "word that nobody waits for this worker")
        shards.answered(ENDING)

    def _leaves(self) -> bool:
        """Whether this worker is not to wait on in a meeting, but to come to it again."""
        return False

    def _handle_met(self, _shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, Met)
        parts, offset = [], 0
        for size in message.sizes:
            parts.append(bytes(payload[offset : offset + size]) if payload is not None else b"")
            offset += size
        self._met[message.number] = parts
        self.attendance.ranks = list(message.workers)
        self._models.catch_up(message.clock)
