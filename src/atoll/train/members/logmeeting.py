"""Meetings of a parameter server's workers outside the iterations, through the log.

The workers have no group of their own: a worker that dies is left out, and the others' meetings go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from atoll.core.errors import AtollError, RunError
from atoll.exchange.link import LOG, ShardLink
from atoll.train.members.attendance import Attendance
from atoll.train.members.meetings import BytesMeeting, called
from atoll.train.sync.servedmodels import ServedModels
from atoll.wire.messages import AnyMessage, Ended, Ends, Meet, Met, WorkerStand

MEETING, ENDING = "meeting", "ending"  # the names of a Meet and an Ends, which are sent again until answered


class CalledAwayError(AtollError):
    """A meeting was left before its end; this worker must bring its part again."""


class LogMeeting(BytesMeeting):
    """A meeting at the shards' log."""

    def __init__(self, attendance: Attendance, shards: ShardLink, models: ServedModels) -> None:
        self.roster = self._attendance = attendance
        self._shards, self._models = shards, models
        self._met: dict[int, tuple[list[int], list[bytes]]] = {}  # by number: who came, and their bytes
        shards.on(Met, self._handle_met)

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        if self.roster.late:
            return [payload]
        came, parts = self.meet(payload, self._attendance.begin(), what, self.standing_for(what))
        self._attendance.ranks = came
        return parts

    def meet(
        self,
        payload: bytes,
        number: int,
        what: str,
        stand: WorkerStand,
        leaves: Callable[[], bool] = lambda: False,
    ) -> tuple[list[int], list[bytes]]:
        """Bring `payload` to the meeting of this number; return who came, in the log's order, and their
        bytes.

        Raises CalledAwayError once `leaves()` is True: this worker must come to the meeting again.

        Args:
            payload: this worker's, or this group's, bytes.
            number: the number of the call.
            what: the call, in words.
            stand: this worker's place in its script.
            leaves: returns whether this worker must leave the meeting.
        """
        shards = self._shards
        self._met = {each: met for each, met in self._met.items() if each >= number}  # others came twice
        meet = Meet(incarnation=shards.incarnation, number=number, what=what[:256], stand=stand)
        shards.send(LOG, meet, memoryview(payload), until=MEETING)
        shards.wait(
            lambda: number in self._met or leaves(),
            lambda: [LOG],
            f"every worker's part in {called(what)}",
        )
        shards.answered(MEETING)
        if number not in self._met:
            raise CalledAwayError(f"this worker is called away from {what}")
        return self._met.pop(number)

    def part(self) -> None:
        if self.roster.late:
            return
        shards, ended = self._shards, False

        def handle_ended(_shard: int, _message: AnyMessage, _payload: memoryview | None) -> None:
            nonlocal ended
            ended = True

        shards.on(Ended, handle_ended)
        stand = self.standing_for("the end of the session")
        shards.send(LOG, Ends(incarnation=shards.incarnation, stand=stand), until=ENDING)
        with contextlib.suppress(RunError):  # the shards are gone; the training still counts
            shards.wait(lambda: ended, lambda: [LOG], "word that nobody waits for this worker")
        shards.answered(ENDING)

    def _handle_met(self, _shard: int, message: AnyMessage, payload: memoryview | None) -> None:
        assert isinstance(message, Met)
        parts, offset = [], 0
        for size in message.sizes:
            parts.append(bytes(payload[offset : offset + size]) if payload is not None else b"")
            offset += size
        self._met[message.number] = list(message.workers), parts
        self._models.catch_up(message.clock)
