"""Heartbeats at the hub: signs of life, progress, and speed of workers."""

from __future__ import annotations

from atoll.hub.book import Book
from atoll.hub.broken import BrokenLinks
from atoll.hub.connections import given_up
from atoll.hub.decisions import Decisions
from atoll.hub.groups import Groups
from atoll.hub.pairs import Pairs
from atoll.hub.rings import Rings
from atoll.hub.turn import Turn
from atoll.wire.messages import Beat, Heard, Heartbeat, Heartbeats, Over


class LifeSigns:
    """Handles heartbeats of the members in `book`, at a constant cost each."""

    def __init__(
        self,
        book: Book,
        broken: BrokenLinks,
        rings: Rings,
        groups: Groups | None,
        pairs: Pairs,
        decisions: Decisions,
        turn: Turn,
    ) -> None:
        self._book, self._members, self._broken = book, book.members, broken
        self._rings, self._groups, self._pairs = rings, groups, pairs
        self._decisions, self._turn = decisions, turn
        turn.handlers |= {Heartbeat: self.handle, Heartbeats: self.handle_many}
        self._ungrouped_said = False
        self._stranger_said = False  # a launcher relayed another's worker

    def handle(self, peer: bytes, beat: Heartbeat) -> None:
        """Handle a member's own heartbeat."""
        if not self._members.roll.hear(self._turn.now(), beat.incarnation, beat.iteration):
            self._turn.refuse(peer, given_up(beat.incarnation), "Heartbeat")
        elif self._book.over:  # only shards are left
            self._turn.send(peer, Over())
        else:
            self._broken.beat(peer, beat.incarnation)
            self._note_pace(beat)
            self._rings.beat(peer, beat.incarnation)
            self._pairs.beat(peer, beat.incarnation)

    def handle_many(self, peer: bytes, message: Heartbeats) -> None:
        """Handle heartbeats relayed by a launcher. The answer names incarnations that are unknown or came
        from another launcher; these then send their own heartbeats."""
        now, roll, unknown = self._turn.now(), self._members.roll, []
        for beat in message.beats:
            incarnation = beat.incarnation
            silence = roll.silence_of(now, incarnation)
            if silence is None or not message.launcher == roll.known[incarnation].launcher != "":
                unknown.append(incarnation)
                self._tell_of_stranger(incarnation)
            elif beat.age <= silence:  # else the worker was heard directly since
                roll.hear(now, incarnation, beat.iteration, beat.age)
                self._broken.hear(incarnation)
                self._note_pace(beat)
                self._rings.hear(incarnation)
        self._turn.send(peer, Heard(number=message.number, unknown=unknown))

    def _tell_of_stranger(self, incarnation: int) -> None:
        """Record once that a launcher relayed a heartbeat of a worker that it did not start."""
        if self._stranger_said or not self._members.roll.is_there(incarnation):
            return
        self._stranger_said = True
        reason = f"a launcher passed on a heartbeat of incarnation {incarnation}, which it has not started"
        self._decisions.add("heartbeat", "not taken", reason)

    def _note_pace(self, beat: Heartbeat | Beat) -> None:
        """Take a worker's progress and speed from a heartbeat."""
        rank = self._members.workers.rank_of(beat.incarnation)
        if self._groups is not None and rank is not None:
            self._groups.beat(rank, beat)
        elif beat.pace and not self._ungrouped_said:
            self._ungrouped_said = True
            reason = "workers are of strategy ps-hra, and this hub was started without --groups"
            self._decisions.add("groups", "none", reason)
